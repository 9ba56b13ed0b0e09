"""`NamedTransport`: the state of a running member for one that heals, over HTTP from an address that the user named.

torchft's own transport listens on all addresses and loads pickles. This one listens on `address`, sends a copy of the
state, so that training need not wait for the reader, and loads with `weights_only=True`.
"""

from __future__ import annotations

import io
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import torch
from torchft.checkpointing import CheckpointTransport

ASK_AGAIN_S = 0.02
"""Seconds between two requests for a state that its member is still writing."""
ANSWERS_S = 1.0
"""Seconds to answer at least, because a busy machine may take as long to run a thread."""


class NamedTransport(CheckpointTransport[dict[str, Any]]):
    """Serves this member's state at `address`, and fetches another's. Give it to torchft's Manager.

    `asked_step` is the newest step that this member has asked another for: it may never train at an older one.
    """

    def __init__(self, address: str = "127.0.0.1", timeout: timedelta = timedelta(seconds=60)) -> None:
        self.asked_step = 0
        self._timeout_s = timeout.total_seconds()
        self._served: tuple[int, bytes] | None = None
        self._open = build_opener(ProxyHandler({})).open  # members reach each other without a proxy
        self._server = ThreadingHTTPServer((address, 0), _handler_of(self))
        self._server.daemon_threads = True
        host, port = self._server.server_address[:2]
        self._url = f"http://{host!s}:{port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def metadata(self) -> str:
        """Return the address at which this member's state is served."""
        return self._url

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta) -> None:
        """Serve a copy of this state until the step is over."""
        memory = io.BytesIO()
        torch.save(state_dict, memory)
        self._served = (step, memory.getvalue())

    def disallow_checkpoint(self) -> None:
        """Serve no more."""
        self._served = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Return the state of another member at `step`; it may still be writing it."""
        self.asked_step = max(self.asked_step, step)
        deadline = time.monotonic() + min(timeout.total_seconds(), self._timeout_s)
        while True:
            try:
                with self._open(f"{metadata}{step}", timeout=max(deadline - time.monotonic(), ANSWERS_S)) as answer:
                    state: dict[str, Any] = torch.load(io.BytesIO(answer.read()), weights_only=True)
                    return state
            except HTTPError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(ASK_AGAIN_S)

    def shutdown(self, wait: bool = True) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        if wait:
            self._thread.join(self._timeout_s)

    def find(self, path: str) -> bytes | None:
        """Return the state that a request wants, if it is there."""
        served = self._served
        return served[1] if served is not None and path == f"/{served[0]}" else None


def _handler_of(transport: NamedTransport) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = transport._timeout_s

        def do_GET(self) -> None:
            state = transport.find(self.path)
            if state is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(state)))
            self.end_headers()
            self.wfile.write(state)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    return Handler
