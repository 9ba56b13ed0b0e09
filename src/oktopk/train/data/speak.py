"""Speak for one synthetic speaker: a program of its own, run by its path as a child process.

eSpeak NG is GPL-3, keeps its state in globals and is not reentrant, so it lives in a process that only reads a request
and writes samples. Nothing but the standard library is imported, so that a child starts in milliseconds.

In, on stdin, JSON: {"voice": "en-us+m1", "lines": [{"say": text, "rate": 170, "pitch": 50, "range": 50, "gap": 0}]}.
Out, on stdout: the sample rate, then for each line the number of samples and the samples, as int32 and int16.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, BinaryIO

SYNCHRONOUS = 2  # espeak_AUDIO_OUTPUT: samples come through the callback before espeak_Synth returns
DO_NOT_EXIT = 0x8000  # of espeak_Initialize: report failure instead of ending the process
VOLUME, PARAMETERS = 2, {"rate": 1, "pitch": 3, "range": 4, "gap": 7}  # espeak_PARAMETER
BY_CHARACTER = 1  # espeak_POSITION_TYPE
UTF8, PHONEMES = 1, 0x100  # flags of espeak_Synth; PHONEMES: text in [[ ]] is phonemes

QUIET = 40  # volume in percent: at 100 many voices hit the ends of 16 bits

CALLBACK = ctypes.CFUNCTYPE(c_int, ctypes.POINTER(ctypes.c_short), c_int, c_void_p)


class Engine:
    """One eSpeak, with one voice."""

    def __init__(self, voice: str) -> None:
        import espeakng_loader

        self.lib = ctypes.CDLL(espeakng_loader.get_library_path())
        self.lib.espeak_Synth.argtypes = [c_char_p, c_size_t, c_uint, c_int, c_uint, c_uint, c_void_p, c_void_p]
        data = espeakng_loader.get_data_path()
        self.rate_hz = int(self.lib.espeak_Initialize(SYNCHRONOUS, 0, os.fsencode(data), DO_NOT_EXIT))
        if self.rate_hz <= 0:
            sys.exit(f"eSpeak NG does not start with its data in {data}; its limit for a path is 150 characters")
        if self.lib.espeak_SetVoiceByName(voice.encode()) != 0:
            sys.exit(f"eSpeak NG has no voice {voice}; is espeakng-loader older than 0.2.4?")
        self.samples = bytearray()
        self.callback = CALLBACK(self._receive)  # kept: ctypes would free it while the library uses it
        self.lib.espeak_SetSynthCallback(self.callback)

    def _receive(self, samples: Any, num_samples: int, _events: object) -> int:
        if samples and num_samples > 0:
            self.samples += ctypes.string_at(samples, 2 * num_samples)
        return 0  # go on

    def speak(self, line: dict[str, Any]) -> bytes:
        """Return the samples of one line."""
        self.lib.espeak_SetParameter(VOLUME, QUIET, 0)
        for name, parameter in PARAMETERS.items():
            self.lib.espeak_SetParameter(parameter, int(line[name]), 0)
        self.samples.clear()
        text = line["say"].encode() + b"\0"
        if self.lib.espeak_Synth(text, len(text), 0, BY_CHARACTER, 0, UTF8 | PHONEMES, None, None) != 0:
            sys.exit(f"eSpeak NG cannot say {line['say']!r}")
        return bytes(self.samples)


def main() -> None:
    """Answer the one request on stdin."""
    # The library may print: its stdout becomes stderr, so that nothing gets between the samples.
    ours = os.dup(1)
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    engine = Engine(request["voice"])
    with os.fdopen(ours, "wb") as out:
        _write_int32(out, engine.rate_hz)
        for line in request["lines"]:
            samples = engine.speak(line)
            _write_int32(out, len(samples) // 2)
            out.write(samples)


def _write_int32(out: BinaryIO, number: int) -> None:
    out.write(number.to_bytes(4, sys.byteorder, signed=True))


if __name__ == "__main__":
    main()
