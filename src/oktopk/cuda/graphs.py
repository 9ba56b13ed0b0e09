"""`Graphs`: repeated launches as CUDA graphs, so that the host makes one call instead of a dozen."""

from collections.abc import Callable, Hashable
from contextlib import suppress

import torch
from torch import Tensor

from oktopk.errors import SettingError

MOST = 8
"""Sets of addresses that are remembered; a caller with new tensors every time launches without a graph."""


class Graphs:
    """Captured CUDA graphs, keyed by kind and the addresses of the tensor arguments."""

    def __init__(self) -> None:
        self._made: dict[tuple[Hashable, ...], torch.cuda.CUDAGraph | None] = {}
        self._wanted: dict[tuple[Hashable, ...], tuple[Callable[..., None], tuple[Tensor, ...]]] = {}

    def run(self, work: Callable[..., None], *tensors: Tensor, kind: Hashable = None) -> None:
        """Run `work(*tensors)`, or replay its graph if it was captured with tensors at the same addresses."""
        if torch.cuda.is_current_stream_capturing():
            raise SettingError("a step cannot be part of a CUDA graph: the residual is another one at every step")
        places = (kind, *[tensor.data_ptr() for tensor in tensors])
        graph = self._made.get(places)
        if graph is not None:
            graph.replay()
            return
        work(*tensors)
        if places in self._made:
            self._wanted[places] = work, tensors
        elif len(self._made) < MOST:
            self._made[places] = None

    def capture(self) -> None:
        """Capture the work that ran twice at the same addresses, without running it.

        Not while backward runs: torch lets no thread draw random numbers on the GPU meanwhile, and a recomputed forward
        may have to.
        """
        for places, (work, tensors) in self._wanted.items():
            self._made[places] = _captured(work, tensors)
        self._wanted.clear()


def _captured(work: Callable[..., None], tensors: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    here = torch.cuda.current_stream()
    is_default = here == torch.cuda.default_stream()  # which cannot be captured; others are shared, and may be in use
    stream = torch.cuda.Stream(tensors[0].device) if is_default else here  # type: ignore[no-untyped-call]
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may go on with their own work
        try:
            work(*tensors)
        except BaseException:
            with suppress(RuntimeError):  # the capture is broken, too, and that is not what to tell
                graph.capture_end()
            raise
        graph.capture_end()
    here.wait_stream(stream)
    return graph
