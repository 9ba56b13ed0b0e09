import pytest

from oktopk.errors import PeerError
from oktopk.train.collectives import lost_peers_named
from oktopk.train.dist import PlaceError

LOST = "another rank died, left or was cut off: "
TOLD = {
    "[/src/gloo/tcp/pair.cc:537] Read error [127.0.0.1]:2: Connection reset by peer. This is typically Y":
        f"{LOST}Read error [127.0.0.1]:2: Connection reset by peer",
    "Got the following error when running the callback: PeerError: rank 1: ValueError: enough\n\nAt:\n  a.py":
        "rank 1: ValueError: enough",
    "NCCL error in: x.cpp:1, remote process exited": f"{LOST}NCCL error in: x.cpp:1",
}  # fmt: skip


def test_a_lost_peer_is_told_in_a_line_and_a_bug_is_not_taken_for_one():
    for text, told in TOLD.items():
        with pytest.raises(PeerError) as caught, lost_peers_named():
            raise RuntimeError(text)
        assert str(caught.value).startswith(told)
        assert "\n" not in str(caught.value)
    for error in (RuntimeError("mat1 and mat2"), RuntimeError(), PlaceError("gloo/"), KeyError(1)):
        with pytest.raises(type(error)) as caught, lost_peers_named():
            raise error
        assert caught.value is error
