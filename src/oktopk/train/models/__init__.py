"""The models that `oktopk train` knows by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

from oktopk.errors import one_of
from oktopk.train.models.lstman4 import LSTMAN4, LSTMAN4_SMALL, SpeechRecogniser

__all__ = ["MODELS", "make_model"]

MODELS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "lstman4": lambda: SpeechRecogniser(LSTMAN4),
        "lstman4-small": lambda: SpeechRecogniser(LSTMAN4_SMALL),
    }
)


def make_model(name: str) -> nn.Module:
    """Return a new model of that name, its weights drawn from torch's default generator: seed that before."""
    return MODELS[one_of("model", name, MODELS)]()
