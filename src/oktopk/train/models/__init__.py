"""The models that `oktopk train` knows by name."""

from collections.abc import Callable
from functools import partial

from torch import nn

from oktopk.errors import one_of
from oktopk.train.models.gpt import SIZES, Gpt
from oktopk.train.models.lstman4 import SpeechRecogniser

MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstman4": partial(SpeechRecogniser, channels=(32, 32), hidden=800, layers=5, lookahead=21),
    "lstman4-small": partial(SpeechRecogniser, channels=(8, 8), hidden=160, layers=2, bidirectional=True),
    **{name: partial(Gpt, *size) for name, size in SIZES.items()},
}


def make_model(name: str) -> nn.Module:
    """Return a new model of that name, its weights drawn from torch's default generator: seed that before."""
    return MODELS[one_of("model", name, MODELS)]()
