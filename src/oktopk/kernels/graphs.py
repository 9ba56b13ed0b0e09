"""`Graphs`: launches that are the same every time, as CUDA graphs: the host makes one call instead of a dozen."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

MOST = 8
"""Places at which tensors are remembered; whoever comes with new ones every time launches as ever."""


class Graphs:
    """What some kinds of work launched, by where the tensors lie that they were given. All else lies where it lay."""

    def __init__(self) -> None:
        self._made: dict[tuple[Hashable, ...], torch.cuda.CUDAGraph | None] = {}

    def run(self, work: Callable[..., None], *tensors: Tensor, kind: Hashable = None) -> None:
        """Do `work(*tensors)`; from the second time on, with tensors in the same places, by what it launched then."""
        if not tensors[0].is_cuda or torch.cuda.is_current_stream_capturing():
            work(*tensors)
            return
        places = (kind, *[tensor.data_ptr() for tensor in tensors])
        if places not in self._made:  # the first time compiles, which a graph cannot hold
            work(*tensors)
            if len(self._made) < MOST:
                self._made[places] = None
            return
        graph = self._made[places]
        if graph is None:
            graph = self._made[places] = _captured(work, tensors)
        graph.replay()


def _captured(work: Callable[..., None], tensors: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    stream, here = torch.cuda.Stream(tensors[0].device), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may go on with their own work
        try:
            work(*tensors)
        finally:
            graph.capture_end()
    here.wait_stream(stream)
    return graph
