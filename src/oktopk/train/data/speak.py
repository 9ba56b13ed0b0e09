"""Speaks for one synthetic speaker: a program of its own, run by its path as a child process.

eSpeak NG is GPL-3, keeps its state in globals and is not reentrant: here it lives in a process that only ever reads a
request and writes samples. Nothing but the standard library is imported, so that a child starts in milliseconds.

In, on stdin, JSON: {"voice": "en-us+m1", "lines": [{"say": text, "rate": 170, "pitch": 50, "range": 50, "gap": 0}]}.
Out, on stdout: the sample rate, then for each line the number of samples and the samples, as int32 and int16.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any, BinaryIO

SYNCHRONOUS = 2  # espeak_AUDIO_OUTPUT: samples come through the callback before espeak_Synth returns
DO_NOT_EXIT = 0x8000  # of espeak_Initialize: report failure instead of ending the process
RATE, VOLUME, PITCH, RANGE, GAP = 1, 2, 3, 4, 7  # espeak_PARAMETER: words a minute, percent, 0-100, 0-100, 10 ms
BY_CHARACTER = 1  # espeak_POSITION_TYPE
UTF8, PHONEMES = 1, 0x100  # flags of espeak_Synth; PHONEMES: what stands in [[ ]] is phonemes

QUIET = 40
"""At the engine's own volume of 100 many voices hit the ends of 16 bits."""

GO_ON = 0
"""What the callback answers."""

SAMPLES = ctypes.POINTER(ctypes.c_short)
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, SAMPLES, ctypes.c_int, ctypes.c_void_p)


class Engine:
    """One eSpeak, with one voice."""

    def __init__(self, voice: str) -> None:
        import espeakng_loader

        self.lib = ctypes.CDLL(espeakng_loader.get_library_path())
        self.lib.espeak_Synth.argtypes = _SYNTH_ARGUMENTS
        data = espeakng_loader.get_data_path()
        self.rate_hz = int(self.lib.espeak_Initialize(SYNCHRONOUS, 0, os.fsencode(data), DO_NOT_EXIT))
        if self.rate_hz <= 0:
            sys.exit(
                f"eSpeak NG does not start with its data in {data}; a path above 150 characters is too long for it"
            )
        if self.lib.espeak_SetVoiceByName(voice.encode()) != 0:
            sys.exit(f"eSpeak NG has no voice {voice}; is espeakng-loader older than 0.2.4?")
        self.heard = bytearray()
        self.callback = CALLBACK(self._hear)  # kept: ctypes would free it under the library's feet
        self.lib.espeak_SetSynthCallback(self.callback)

    def _hear(self, samples: Any, num_samples: int, _events: object) -> int:
        if samples and num_samples > 0:
            self.heard += ctypes.string_at(samples, 2 * num_samples)
        return GO_ON

    def speak(self, line: dict[str, Any]) -> bytes:
        """Return the samples of one line."""
        self.lib.espeak_SetParameter(VOLUME, QUIET, 0)
        for parameter, name in ((RATE, "rate"), (PITCH, "pitch"), (RANGE, "range"), (GAP, "gap")):
            self.lib.espeak_SetParameter(parameter, int(line[name]), 0)
        self.heard.clear()
        text = line["say"].encode() + b"\0"
        if self.lib.espeak_Synth(text, len(text), 0, BY_CHARACTER, 0, UTF8 | PHONEMES, None, None) != 0:
            sys.exit(f"eSpeak NG cannot say {line['say']!r}")
        return bytes(self.heard)


_SYNTH_ARGUMENTS: list[Any] = [
    ctypes.c_char_p,
    ctypes.c_size_t,
    ctypes.c_uint,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_void_p,
]


def main() -> None:
    """Answer the one request on stdin."""
    out = _private_stdout()
    request = json.load(sys.stdin)
    engine = Engine(request["voice"])
    _write_int32(out, engine.rate_hz)
    for line in request["lines"]:
        samples = engine.speak(line)
        _write_int32(out, len(samples) // 2)
        out.write(samples)
    out.close()


def _private_stdout() -> BinaryIO:
    """Return stdout for ourselves; what the library prints goes to stderr and cannot get between the samples."""
    ours = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(ours, "wb")


def _write_int32(out: BinaryIO, number: int) -> None:
    out.write(number.to_bytes(4, sys.byteorder, signed=True))


if __name__ == "__main__":
    main()
