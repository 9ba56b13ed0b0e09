"""A candidate of the exchange ends with its last reference: a process group that ends late aborts the process."""

from __future__ import annotations

import gc
import weakref

import torch

from oktopk import Comm, Reducer, run_local


def test_a_reducer_is_in_no_cycle() -> None:
    def ends(comm: Comm) -> bool:
        reducer = Reducer("oktopk", comm)
        reducer.all_reduce(torch.ones(100))
        assert reducer.last is not None
        watched = weakref.ref(reducer)
        del reducer
        return watched() is None

    gc.disable()
    try:
        assert run_local(2, ends) == [True, True]
    finally:
        gc.enable()
