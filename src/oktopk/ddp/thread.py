"""`WorkerThread`: one thread that runs jobs in the order in which they come."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class WorkerThread:
    """A thread whose maker calls `stop`, which runs the submitted jobs and joins it."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether jobs are still run."""
        return self._thread.is_alive()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those submitted before it. A job deals with its own errors."""
        self._jobs.put(job)

    def stop(self, timeout: float) -> None:
        """Join the thread, after the jobs that are waiting."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)


def _run(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or the last job, and all it refers to, would live until the next one comes
