"""A lighthouse, and the Manager of a member, which listen on the address that the user named.

torchft's own Manager server listens on all addresses of its host, at a port of its own: that cannot be changed.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from oktopk.errors import PeerError, SettingError
from oktopk.integrations.torchft.transport import NamedTransport

SIOCGIFADDR = 0x8915
STATUS_BYTES = 1 << 16
ANSWERS_S = 5.0
"""Seconds to answer at least, because a busy machine may take as long to run a thread."""
TICK_MS = 20
"""Milliseconds between two looks of the lighthouse, because torchft's 100 would be a good part of a recovery."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds after which a member is given up.

    collective_s    in a collective: a member that is frozen or cut off costs the others this time, once
    heartbeat_s     without a sign of life at the lighthouse, which then forms a quorum without it
    join_s          that a quorum waits for members that are alive and not there yet, from when the first has come. It
                    must be longer than a step. Else those whom one quorum left out are early at the next, which then
                    leaves out others, and so on
    quorum_s        that a member waits for a quorum
    """

    collective_s: float = 10.0
    heartbeat_s: float = 5.0
    join_s: float = 60.0
    quorum_s: float = 60.0


class Lighthouse:
    """The server at which members meet. `url` is for them; it listens on the host of `address` alone."""

    def __init__(self, address: str, min_members: int, patience: Patience) -> None:
        host, port = split_address(address)
        try:
            self._server = LighthouseServer(
                bind=f"{host}:{port}",
                min_replicas=min_members,
                join_timeout_ms=round(1e3 * patience.join_s),
                quorum_tick_ms=TICK_MS,
                heartbeat_timeout_ms=round(1e3 * patience.heartbeat_s),
            )
        except RuntimeError as error:
            raise PeerError(f"no lighthouse can listen on {address}: {error}. Name an address of this host") from error
        self.url = f"http://{host}:{self._server.address().rpartition(':')[2]}"

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()


def make_manager(
    lighthouse: str, address: str, *, name: str, min_members: int, patience: Patience
) -> tuple[Any, Callable[[], None]]:
    """Return the Manager of one member, which listens on `address`, and the function that ends it."""
    within = {each: timedelta(seconds=getattr(patience, each)) for each in ("collective_s", "quorum_s")}
    _check_answers(lighthouse, patience.collective_s)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address))
    transport = NamedTransport(address, within["quorum_s"])
    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    try:
        manager: Any = Manager(
            pg=ProcessGroupGloo(timeout=within["collective_s"]),
            load_state_dict=None, state_dict=None,  # `attach` registers its own
            min_replica_size=min_members, use_async_quorum=False, rank=0, world_size=1,
            store_addr=address, store_port=port, lighthouse_addr=lighthouse, replica_id=name, hostname=address,
            timeout=within["quorum_s"], quorum_timeout=within["quorum_s"], connect_timeout=within["collective_s"],
            checkpoint_transport=transport,
        )  # fmt: skip
    except Exception as error:  # torchft raises its RPCs' errors as they come
        transport.shutdown()
        raise PeerError(f"no lighthouse answers at {lighthouse}: {error}") from error

    def close() -> None:
        manager.shutdown(wait=False)
        del store_of[:]

    store_of = [store]  # it lives as long as the manager
    return manager, close


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT.

    >>> split_address("10.0.0.1:29510")
    ('10.0.0.1', 29510)
    """
    host, colon, port = address.removeprefix("http://").rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 2**16):
        raise SettingError(f"wanted an address as HOST:PORT, such as 127.0.0.1:29510, not {address!r}")
    return host, int(port)


def address_towards(lighthouse: str) -> str:
    """Return this host's address on the way to the lighthouse, at which the other members reach it, too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(split_address(lighthouse))  # sends nothing
        return str(asking.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    raise SettingError(f"no network interface of this host has the address {address}")


def answers(lighthouse: str, timeout_s: float = 2.0) -> bool:
    """Whether something listens at the address of a lighthouse."""
    with suppress(PeerError):
        _check_answers(lighthouse, timeout_s)
        return True
    return False


def _check_answers(lighthouse: str, timeout_s: float) -> None:
    """Refuse an address at which no lighthouse listens; torchft would try it until its timeout."""
    host, port = split_address(lighthouse)
    asking = HTTPConnection(host, port, timeout=timeout_s)
    try:
        asking.connect()
        assert asking.sock is not None
        asking.sock.settimeout(max(timeout_s, ANSWERS_S))
        asking.request("GET", "/status")
        found = b"quorum" in asking.getresponse().read(STATUS_BYTES)
        why = "something else listens there"
    except OSError as error:
        found, why = False, error.strerror or str(error)
    except HTTPException:
        found, why = False, "something else listens there"
    finally:
        asking.close()
    if not found:
        raise PeerError(
            f"no lighthouse answers at {lighthouse}: {why}. Is it running there, and is the address the one that it "
            "was started with?"
        )
