"""A switch that delays and loses packets, in place of the laboratory's bridge.

    python -I -S switch.py DELAY_S LOSS DEVICE...

It forwards each frame after DELAY_S seconds, loses each with the chance LOSS, and prints `ready` when it listens. It is
run as a file with the standard library alone, because importing the package takes seconds.

Frames pass through packet sockets with the kernel's virtio_net_hdr before them. A host therefore leaves checksums, and
the cutting of frames of up to 64 kB, to the last device, as it would to a network card.
"""

import errno
import random
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

SEED = 0
BUFFER_BYTES = 64 << 20
"""Bytes of each port's buffer, each way: frames wait in it while other ports are served or a link is slow."""

LARGEST_BYTES = 1 << 17
BATCH = 64
"""Frames taken from a port before the next port's turn."""

# From linux/if_packet.h, linux/if_ether.h and asm-generic/socket.h: Python has no names for them.
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
ETH_P_ALL = 3
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33

HEADER_BYTES = 10
TARGET = slice(HEADER_BYTES, HEADER_BYTES + 6)
SOURCE = slice(HEADER_BYTES + 6, HEADER_BYTES + 12)


def serve(ports: Sequence[socket.socket], delay_s: float, is_lost: Callable[[], bool]) -> None:
    """Forward frames until the process is killed."""
    port_of: dict[bytes, socket.socket] = {}  # by the address behind it
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    buffer = memoryview(bytearray(LARGEST_BYTES))
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], wait_s)[0]:
            due_s = time.monotonic() + delay_s
            for frame in _frames(port, buffer):
                port_of[frame[SOURCE]] = port
                if not is_lost():
                    waiting.append((due_s, port, frame))
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, source, frame = waiting.popleft()
            known = port_of.get(frame[TARGET])
            for port in [known] if known else [port for port in ports if port is not source]:
                _send(port, frame)


def _frames(port: socket.socket, buffer: memoryview) -> Iterator[bytes]:
    for _ in range(BATCH):
        try:
            num_bytes = port.recv_into(buffer)
        except BlockingIOError:
            return
        yield bytes(buffer[:num_bytes])


def _send(port: socket.socket, frame: bytes) -> None:
    try:
        port.send(frame)
    except OSError as error:
        if error.errno not in (errno.ENOBUFS, errno.EAGAIN):  # a switch drops frames if the link's queue is full
            raise


def open_port(device: str) -> socket.socket:
    """Return a socket that receives every frame which arrives at the device."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)  # it would receive its own frames
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    port.setblocking(False)
    port.bind((device, ETH_P_ALL))
    return port


if __name__ == "__main__":
    chance, loss = random.Random(SEED), float(sys.argv[2])
    opened = [open_port(device) for device in sys.argv[3:]]
    print("ready", flush=True)
    serve(opened, float(sys.argv[1]), lambda: chance.random() < loss)
