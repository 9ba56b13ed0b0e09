"""Training whose members come and go, under torchft: its quorum and its healing, our exchange and the residual law.

    from oktopk.integrations.torchft import attach, LocalSteps, NamedTransport

`docs/elastic.md` has the law and a script. It needs torchft 0.2.
"""

try:
    import torchft  # noqa: F401 - only to say that it is missing
except ImportError as error:
    raise ImportError("oktopk.integrations.torchft needs torchft: pip install oktopk[torchft]") from error

from oktopk.integrations.torchft.attach import Member, attach
from oktopk.integrations.torchft.local import LocalSteps
from oktopk.integrations.torchft.transport import NamedTransport

__all__ = ["LocalSteps", "Member", "NamedTransport", "attach"]
