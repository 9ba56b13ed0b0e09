"""How ranks talk: one small protocol, real processes, ranks as threads, and a wrapper that measures either."""

from oktopk.comm.base import Comm, Pending
from oktopk.comm.local import LocalComm, run_local
from oktopk.comm.metered import MeteredComm, Traffic
from oktopk.comm.process_group import ProcessGroupComm

__all__ = ["Comm", "LocalComm", "MeteredComm", "Pending", "ProcessGroupComm", "Traffic", "run_local"]
