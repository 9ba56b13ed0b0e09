"""Make speech like AN4's offline, for training without a corpus and for tests of the whole chain.

eSpeak NG speaks (`speak.py`, one child process for each speaker), in many voices and accents, each with its own rate
and pitch. The voices of `train` and `val` have nothing in common. The bytes depend on the settings alone, not on the
number of jobs or the threads of a BLAS library.
"""

import json
import os
import subprocess
import sys
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from math import gcd
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from oktopk.train.data import speak
from oktopk.train.data.audio import FULL_SCALE, RATE_HZ, Samples
from oktopk.train.data.errors import DataError, SpeechError
from oktopk.train.data.grammar import Grammar, say
from oktopk.train.data.manifest import MANIFESTS, PARTS, STAMP, add_utterance, held, replaced, tracked

VERSION = 1  # of the synthesis: a folder of another version holds other samples and is made again
SEED = 0  # of voices, texts and noise

ACCENTS = ("en-us", "en-us-nyc", "en-029", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd")

# Voices of people, not robots, without `breath` in their definition: such voices read uninitialised memory.
VARIANTS = (
    "Alex Andrea Andy Annie Denis Diogo Gene Gene2 Henrique Hugo Lee Mario Michael Mike Nguyen RicishayMax adam anika "
    "announcer antonio aunty belinda benjamin boris david ed edward edward2 f1 f4 grandma grandpa gustave iven2 iven3 "
    "iven4 john kaukovalta klatt3 klatt4 linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel mike2 norbert pablo "
    "paul pedro quincy rob robert shelby steph travis zac"
).split()

UTTERANCES_A_SPEAKER = 8
VAL_PART = 8  # an eighth of the voices is for validation

RATE_WPM = (100, 165)
PITCH = (25, 75)
RANGE = (30, 70)
GAP_10MS = (0, 12)
LEVEL_DB = (-22.0, -5.0)  # of the loudest sample, against full scale
SNR_DB = (22.0, 45.0)
SILENCE_S = (0.08, 0.35)  # before and after the words
DULLNESS = (1, 6)  # samples over which the noise is averaged: 1 hisses, 6 hums

CHILD_TIMEOUT_S = 300.0
ENGINE = "espeakng_loader"

# Of the filter that resamples. From 22,050 to 16,000 Hz its transition band is 6.4 to 8.8 kHz.
ZERO_CROSSINGS = 16  # of the sinc, on each side
ROLL_OFF = 0.95  # cut-off as a part of the lower rate's Nyquist frequency; frequencies above that fold back
KAISER_BETA = 8.0  # of the window: side lobes near -80 dB, below the noise of 16 bits

Signal = NDArray[np.float32]


def make_speech(
    out: Path, utterances: int, val_utterances: int, grammar: Grammar = "an4", jobs: int | None = None
) -> bool:
    """Make `utterances` to train on and `val_utterances` to validate with in `out`; return whether it had to be done.

    Speech of the same settings in `out` is kept, and speech of other settings replaced; real recordings are never
    replaced. `jobs` is the number of cores by default.
    """
    sizes = {"utterances": utterances, "val_utterances": val_utterances}
    settings = {"version": VERSION, **sizes, "seed": SEED, "grammar": grammar}
    if _settings_of(out) == settings and all((out / name).exists() for name in MANIFESTS):
        return False
    if held(out) and not (out / STAMP).exists():
        there = ", ".join(held(out))
        raise DataError("bad corpus", out, f"has {there}, not made by synth-an4; choose another folder for this")
    check_possible()
    speakers = speakers_of("train", utterances) + speakers_of("val", val_utterances)
    # Threads: the engine is a child, and numpy releases the interpreter.
    with replaced(out) as folder, ThreadPoolExecutor(jobs or _num_cores()) as pool:
        futures = [pool.submit(_record, folder, speaker, grammar) for speaker in speakers]
        try:
            for future in tracked(as_completed(futures), "speaking", len(futures)):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
        (folder / STAMP).write_text(json.dumps({"settings": settings}, indent=2) + "\n", encoding="utf-8")
    return True


def check_possible() -> None:
    """Raise if the package that speaks is missing."""
    if find_spec(ENGINE) is None:
        raise SpeechError('speech is made by the package espeakng-loader: pip install "oktopk[synth]"')


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _settings_of(out: Path) -> Any:
    try:
        return json.loads((out / STAMP).read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, TypeError, KeyError):
        return None  # missing or spoilt: the speech is made again


@dataclass(frozen=True)
class Speaker:
    """A voice, its way to talk, and its utterances."""

    part: str
    voice: str
    rate_wpm: int
    pitch: int
    pitch_range: int
    utterances: range


def speakers_of(part: str, utterances: int) -> list[Speaker]:
    """Return the speakers of a part; no voice variant speaks in both parts."""
    variants = _random("variants").sample(VARIANTS, len(VARIANTS))
    num_val = len(VARIANTS) // VAL_PART
    chosen = variants[:num_val] if part == "val" else variants[num_val:]
    voices = [f"{accent}+{variant}" for accent, variant in product(ACCENTS, chosen)]
    voices = _random(f"voices {part}").sample(voices, len(voices))
    speakers = []
    for i, start in enumerate(range(0, utterances, UTTERANCES_A_SPEAKER)):
        random, voice = _random(f"speaker {part} {start}"), voices[i % len(voices)]
        way = random.randint(*RATE_WPM), random.randint(*PITCH), random.randint(*RANGE)
        speakers.append(Speaker(part, voice, *way, range(start, min(start + UTTERANCES_A_SPEAKER, utterances))))
    return speakers


def _random(purpose: str) -> Random:
    """Return a generator for one purpose, so that no draw depends on those before it."""
    return Random(f"{VERSION} {SEED} {purpose}")


def _record(folder: Path, speaker: Speaker, grammar: Grammar) -> None:
    """Write the recordings of a speaker."""
    names = [f"{speaker.part}{i:05d}" for i in speaker.utterances]
    randoms = [_random(name) for name in names]
    texts = [say(grammar, random) for random in randoms]
    lines = [_line(speaker, text, random) for text, random in zip(texts, randoms, strict=True)]
    rate_hz, spoken = _speak(speaker.voice, lines)
    for i, name, text, samples in zip(speaker.utterances, names, texts, spoken, strict=True):
        noise = np.random.Generator(np.random.PCG64([VERSION, SEED, PARTS.index(speaker.part), i]))
        add_utterance(folder, speaker.part, name, _as_recorded(resample(samples, rate_hz, RATE_HZ), noise), text)


def _line(speaker: Speaker, text: str, random: Random) -> dict[str, Any]:
    return {
        "say": spoken_form(text),
        "rate": round(speaker.rate_wpm * random.uniform(0.9, 1.1)),
        "pitch": speaker.pitch + random.randint(-6, 6),
        "range": speaker.pitch_range,
        "gap": random.randint(*GAP_10MS),
    }


def spoken_form(text: str) -> str:
    """Return the engine's input: small letters, as capitals may be read as abbreviations, and A as a phoneme.

    >>> spoken_form("B A ENTER")
    'b [[eI]] enter'
    """
    return " ".join("[[eI]]" if word == "A" else word.lower() for word in text.split())


def _speak(voice: str, lines: list[dict[str, Any]]) -> tuple[int, list[Signal]]:
    """Return the engine's sample rate and the samples of each line, from a child process."""
    request = json.dumps({"voice": voice, "lines": lines}).encode()
    command = [sys.executable, speak.__file__]
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=CHILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise SpeechError(f"the speech engine gave no answer for voice {voice} in {CHILD_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise SpeechError(f"the speech engine failed for voice {voice}: {said[-1] if said else done.returncode}")
    answer, spoken = json.loads(done.stdout), []
    for line, samples in zip(lines, answer["spoken"], strict=True):
        spoken.append(np.frombuffer(b64decode(samples), np.int16).astype(np.float32) / np.float32(FULL_SCALE))
        if not spoken[-1].any():
            raise SpeechError(f"the speech engine said nothing for {line['say']!r} with voice {voice}")
    return answer["rate_hz"], spoken


def resample(signal: Signal, from_hz: int, to_hz: int) -> Signal:
    """Return `signal` at another rate, by a windowed sinc, one filter for each phase.

    Products are added tap by tap, elementwise: a matrix product would leave the order of the sum to the BLAS library,
    which chooses it by the number of its threads.
    """
    up, down = to_hz // gcd(from_hz, to_hz), from_hz // gcd(from_hz, to_hz)
    filters, starts = _phases(up, down)
    num_taps = filters.shape[1]
    num_out = -(-len(signal) * up // down)
    num_blocks = -(-num_out // up)  # a block: `down` samples in, `up` samples out
    before = num_taps // 2 - 1
    padded = np.zeros(num_blocks * down + num_taps + before, np.float32)
    padded[before : before + len(signal)] = signal
    windows = sliding_window_view(padded, down + num_taps)[::down][:num_blocks]
    rows = np.ascontiguousarray(windows.T)  # row i is the i-th input of every block
    out = np.zeros((up, num_blocks), np.float32)
    for tap in range(num_taps):
        out += filters[:, tap, None] * rows[starts + tap]
    return np.ascontiguousarray(out.T).reshape(-1)[:num_out]


@lru_cache(maxsize=4)
def _phases(up: int, down: int) -> tuple[Signal, NDArray[np.intp]]:
    """Return the filter of each of `up` phases, and where in a block's input it begins."""
    cutoff = ROLL_OFF * min(1.0, up / down)
    half = int(np.ceil(ZERO_CROSSINGS / cutoff))
    middle = np.arange(up) * down / up
    starts = np.floor(middle).astype(np.intp)
    distance = np.arange(-half + 1, half + 1)[None, :] - (middle - starts)[:, None]
    window = np.i0(KAISER_BETA * np.sqrt(np.clip(1 - (distance / half) ** 2, 0, None))) / np.i0(KAISER_BETA)
    filters = cutoff * np.sinc(cutoff * distance) * window
    return (filters / filters.sum(axis=1, keepdims=True)).astype(np.float32), starts


def _as_recorded(speech: Signal, random: np.random.Generator) -> Samples:
    """Return the speech as from a microphone: at another level, with silence around the words and noise under them."""
    level = 10 ** (random.uniform(*LEVEL_DB) / 20)
    speech = speech * np.float32(level / np.abs(speech).max())
    loudness = float(np.sqrt(np.mean(speech.astype(np.float64) ** 2)))
    before, after = (int(random.uniform(*SILENCE_S) * RATE_HZ) for _ in range(2))
    signal = np.pad(speech, (before, after)).astype(np.float64)
    width = int(random.integers(DULLNESS[0], DULLNESS[1] + 1))
    white = random.standard_normal(len(signal) + width - 1)
    noise = sliding_window_view(white, width).sum(axis=1) / np.sqrt(width)
    signal += noise * loudness * 10 ** (-random.uniform(*SNR_DB) / 20)
    return np.rint(np.clip(signal, -1, 1) * (FULL_SCALE - 1)).astype(np.int16)
