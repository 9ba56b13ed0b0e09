"""Ok-Topk under Hugging Face Accelerate.

`DistributedDataParallelKwargs(comm_hook=...)` takes a member of a closed enum and ignores any other hook, so attach to
the model that `prepare` returns.
"""

from __future__ import annotations

from typing import Any

from oktopk import ddp
from oktopk.algorithms import Algorithm
from oktopk.ddp.attach import Attached
from oktopk.integrations.shared import ddp_of, load_beside, save_beside

try:
    import accelerate  # noqa: F401 - only to say that it is missing
except ImportError as error:
    raise ImportError("oktopk.integrations.accelerate needs Accelerate: pip install accelerate") from error


def attach(accelerator: Any, model: Any, algorithm: Algorithm | str, **settings: Any) -> Attached:
    """Attach to the model that `accelerator.prepare` returned, with the settings of `oktopk.attach`.

    `save_state` and `load_state` then keep every rank's residuals. `register_for_checkpointing` would keep rank 0's
    alone, because Accelerate writes custom objects on the main process only.
    """
    wrapped = ddp_of(model, "call accelerator.prepare(model) first, and start two processes or more")
    attached = ddp.attach(wrapped, algorithm, **{"scaler": accelerator.scaler, **settings})
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: save_beside(folder, attached))  # noqa: ARG005
    accelerator.register_load_state_pre_hook(lambda models, folder: load_beside(folder, attached))  # noqa: ARG005
    return attached
