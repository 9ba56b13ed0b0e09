"""A switch that takes its time and loses packets: the laboratory's, where links have delay or loss.

    python -I -S switch.py DELAY_S LOSS DEVICE...

Forwards frames between the devices, each after DELAY_S, each packet with the chance LOSS of getting nowhere, until it
is killed; says `ready` when it listens. Only the standard library, and run as a file: importing the package would take
it seconds.

Frames come and go by packet sockets with the kernel's notes on them (virtio_net_hdr), so that what a host leaves to its
network card stays left: the checksum, and the cutting of a frame of up to 64 kB into packets. Only a frame of which a
packet gets lost is cut here.
"""

from __future__ import annotations

import errno
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

SEED = 0
BUFFER_BYTES = 64 << 20
"""For each port each way: what comes while others are served, and what waits for a slow link."""

LARGEST_BYTES = 1 << 17
BATCH = 64
"""Frames taken from a port before the next one's turn."""

# From linux/if_packet.h, linux/if_ether.h and asm-generic/socket.h; Python has no names for them.
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
ETH_P_ALL = 3
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33

NOTES = struct.Struct("=BBHHHH")
TCP_IN_IPV4 = 1
ECN = 0x80
TARGET = slice(NOTES.size, NOTES.size + 6)
SOURCE = slice(NOTES.size + 6, NOTES.size + 12)
IP = NOTES.size + 14

FIN_PSH = 0x09
CWR = 0x80


class Notes(NamedTuple):
    """The kernel's notes on a frame, which come before it: its virtio_net_hdr."""

    flags: int
    kind: int
    """What is to be cut into packets; 0: nothing."""
    header_bytes: int
    packet_bytes: int
    """Payload of each packet but the last."""
    tcp: int
    """Where in the frame TCP's header starts."""
    checksum: int
    """Where in TCP's header the checksum is."""


class Switch:
    """Ports, who is behind which, and the frames that are on their way."""

    def __init__(self, ports: Sequence[socket.socket], delay_s: float, is_lost: Callable[[], bool]) -> None:
        self.ports = ports
        self.delay_s = delay_s
        self.is_lost = is_lost
        self.port_of: dict[bytes, socket.socket] = {}
        self.held: deque[tuple[float, socket.socket, bytes]] = deque()
        self.buffer = memoryview(bytearray(LARGEST_BYTES))

    def serve(self) -> None:
        """Forward, for ever."""
        while True:
            wait_s = max(0.0, self.held[0][0] - time.monotonic()) if self.held else None
            for port in select.select(self.ports, [], [], wait_s)[0]:
                self._take(port)
            self._release()

    def _take(self, port: socket.socket) -> None:
        due_s = time.monotonic() + self.delay_s
        for _ in range(BATCH):
            try:
                num_bytes = port.recv_into(self.buffer)
            except BlockingIOError:
                return
            frame = bytes(self.buffer[:num_bytes])
            self.port_of[frame[SOURCE]] = port
            self.held.extend((due_s, port, left) for left in what_is_left(frame, self.is_lost))

    def _release(self) -> None:
        now_s = time.monotonic()
        while self.held and self.held[0][0] <= now_s:
            _, source, frame = self.held.popleft()
            known = self.port_of.get(frame[TARGET])
            for port in [known] if known else [port for port in self.ports if port is not source]:
                _send(port, frame)


def _send(port: socket.socket, frame: bytes) -> None:
    try:
        port.send(frame)
    except OSError as error:
        if error.errno not in (errno.ENOBUFS, errno.EAGAIN):  # the link's queue is full: any switch drops then
            raise


def what_is_left(frame: bytes, is_lost: Callable[[], bool]) -> list[bytes]:
    """Return the frame if it loses no packet, else those of its packets that it does not lose."""
    num_packets = _num_packets(frame)
    left = [index for index in range(num_packets) if not is_lost()]
    if len(left) == num_packets:
        return [frame]
    return [_packet(frame, index, num_packets) for index in left]


def _num_packets(frame: bytes) -> int:
    notes = Notes(*NOTES.unpack_from(frame))
    if notes.kind & ~ECN != TCP_IN_IPV4:
        return 1
    return -(-(len(frame) - _payload_start(frame, notes)) // notes.packet_bytes)


def _payload_start(frame: bytes, notes: Notes) -> int:
    tcp = NOTES.size + notes.tcp
    return tcp + 4 * (frame[tcp + 12] >> 4)


def _packet(frame: bytes, index: int, num_packets: int) -> bytes:
    """Return the packet of that index as a frame of its own, as a network card would cut it."""
    notes = Notes(*NOTES.unpack_from(frame))
    tcp, payload_start = NOTES.size + notes.tcp, _payload_start(frame, notes)
    offset = index * notes.packet_bytes
    packet = bytearray(frame[:payload_start]) + frame[payload_start + offset :][: notes.packet_bytes]
    NOTES.pack_into(packet, 0, *notes._replace(kind=0, header_bytes=0, packet_bytes=0))
    _adapt_tcp_(packet, tcp, offset, index == 0, index == num_packets - 1)
    # In the checksum's place the kernel left the sum of addresses, protocol and length: the whole frame's length.
    _add_(packet, tcp + notes.checksum, len(packet) - len(frame), 0xFFFF)
    _adapt_ip_(packet, slice(IP, tcp), index)
    return bytes(packet)


def _adapt_tcp_(packet: bytearray, tcp: int, offset: int, is_first: bool, is_last: bool) -> None:
    (sequence,) = struct.unpack_from("!I", packet, tcp + 4)
    struct.pack_into("!I", packet, tcp + 4, (sequence + offset) % (1 << 32))
    packet[tcp + 13] &= ~((0 if is_first else CWR) | (0 if is_last else FIN_PSH))


def _adapt_ip_(packet: bytearray, header: slice, index: int) -> None:
    struct.pack_into("!H", packet, IP + 2, len(packet) - IP)
    _add_(packet, IP + 4, index, 1 << 16)  # the identification
    struct.pack_into("!H", packet, IP + 10, 0)
    words = struct.unpack(f"!{(header.stop - header.start) // 2}H", packet[header])
    struct.pack_into("!H", packet, IP + 10, 0xFFFF - sum(words) % 0xFFFF)


def _add_(packet: bytearray, place: int, amount: int, modulus: int) -> None:
    (word,) = struct.unpack_from("!H", packet, place)
    struct.pack_into("!H", packet, place, (word + amount) % modulus)


def open_port(device: str) -> socket.socket:
    """Return a socket that gets every frame which arrives at the device."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)  # or it would hear what it says
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    port.setblocking(False)
    port.bind((device, ETH_P_ALL))
    return port


def main() -> None:
    """Be the switch that the command line asks for."""
    delay_s, loss, devices = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    chance = random.Random(SEED)
    switch = Switch([open_port(device) for device in devices], delay_s, lambda: chance.random() < loss)
    print("ready", flush=True)
    switch.serve()


if __name__ == "__main__":
    main()
