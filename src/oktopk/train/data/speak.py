"""Speak for one synthetic speaker: a program of its own, run by its path as a child process.

eSpeak NG is GPL-3, keeps its state in globals and is not reentrant, so it lives in a process that only reads a request
and writes samples. Nothing but the standard library is imported, so that a child starts in milliseconds.

In, on stdin, JSON: {"voice": "en-us+m1", "lines": [{"say": text, "rate": 170, "pitch": 50, "range": 50, "gap": 0}]}.
Out, on stdout, JSON: {"rate_hz": 22050, "spoken": [the int16 samples of a line in base64, ...]}.
"""

import ctypes
import json
import os
import sys
from base64 import b64encode
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

SYNCHRONOUS = 2  # espeak_AUDIO_OUTPUT: samples come through the callback before espeak_Synth returns
DO_NOT_EXIT = 0x8000  # of espeak_Initialize: report failure instead of ending the process
VOLUME, PARAMETERS = 2, {"rate": 1, "pitch": 3, "range": 4, "gap": 7}  # espeak_PARAMETER
BY_CHARACTER = 1  # espeak_POSITION_TYPE
UTF8, PHONEMES = 1, 0x100  # flags of espeak_Synth; PHONEMES: text in [[ ]] is phonemes

QUIET = 40  # volume in percent: at 100 many voices hit the ends of 16 bits

CALLBACK = ctypes.CFUNCTYPE(c_int, ctypes.POINTER(ctypes.c_short), c_int, c_void_p)


def speak(voice: str, lines: list[dict[str, Any]]) -> tuple[int, list[bytes]]:
    """Return the sample rate and the samples of each line."""
    import espeakng_loader

    engine, data = ctypes.CDLL(espeakng_loader.get_library_path()), espeakng_loader.get_data_path()
    engine.espeak_Synth.argtypes = [c_char_p, c_size_t, c_uint, c_int, c_uint, c_uint, c_void_p, c_void_p]
    rate_hz = int(engine.espeak_Initialize(SYNCHRONOUS, 0, os.fsencode(data), DO_NOT_EXIT))
    if rate_hz <= 0:
        sys.exit(f"eSpeak NG does not start with its data in {data}; its limit for a path is 150 characters")
    if engine.espeak_SetVoiceByName(voice.encode()) != 0:
        sys.exit(f"eSpeak NG has no voice {voice}; is espeakng-loader older than 0.2.4?")
    samples = bytearray()

    def receive(chunk: Any, num_samples: int, _events: object) -> int:
        if chunk and num_samples > 0:
            samples.extend(ctypes.string_at(chunk, 2 * num_samples))
        return 0  # go on

    callback = CALLBACK(receive)  # kept: ctypes would free it while the library uses it
    engine.espeak_SetSynthCallback(callback)
    spoken = []
    for line in lines:
        engine.espeak_SetParameter(VOLUME, QUIET, 0)
        for name, parameter in PARAMETERS.items():
            engine.espeak_SetParameter(parameter, int(line[name]), 0)
        samples.clear()
        text = line["say"].encode() + b"\0"
        if engine.espeak_Synth(text, len(text), 0, BY_CHARACTER, 0, UTF8 | PHONEMES, None, None) != 0:
            sys.exit(f"eSpeak NG cannot say {line['say']!r}")
        spoken.append(bytes(samples))
    return rate_hz, spoken


if __name__ == "__main__":
    ours = os.dup(1)
    os.dup2(2, 1)  # the library may print
    rate_hz, spoken = speak(**json.load(sys.stdin))
    with os.fdopen(ours, "w") as out:
        json.dump({"rate_hz": rate_hz, "spoken": [b64encode(samples).decode() for samples in spoken]}, out)
