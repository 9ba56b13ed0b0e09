"""Make speech like AN4's offline, for training without a corpus and for tests of the whole chain.

eSpeak NG speaks (`speak.py`, one child process for each speaker), in many voices and accents, each with its own rate
and pitch. The voices of `train` and `val` have nothing in common. The bytes depend on the settings alone: not on the
run, the number of jobs or the threads of a BLAS library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from oktopk.errors import one_of, within
from oktopk.train.data import speak
from oktopk.train.data.audio import FULL_SCALE, RATE_HZ, Samples
from oktopk.train.data.errors import DataError, SpeechError
from oktopk.train.data.folder import MANIFESTS, PARTS, STAMP, add_utterance, held, replaced, write_manifests
from oktopk.train.data.grammar import KINDS, Grammar, say
from oktopk.train.data.progress import tracked
from oktopk.train.data.resample import resample

VERSION = 1  # of the synthesis: a folder of another version holds other samples and is made again

ACCENTS = ("en-us", "en-us-nyc", "en-029", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd")

# Voices of people, not robots, without `breath` in their definition: such voices read uninitialised memory.
VARIANTS = (
    "Alex Andrea Andy Annie Denis Diogo Gene Gene2 Henrique Hugo Lee Mario Michael Mike Nguyen RicishayMax adam anika "
    "announcer antonio aunty belinda benjamin boris david ed edward edward2 f1 f4 grandma grandpa gustave iven2 iven3 "
    "iven4 john kaukovalta klatt3 klatt4 linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel mike2 norbert pablo "
    "paul pedro quincy rob robert shelby steph travis zac"
).split()

UTTERANCES_A_SPEAKER = 8
VAL_PART, LEAST_VAL = 8, 16  # an eighth of the voices, and by default of the utterances, is for validation

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


@dataclass(frozen=True)
class Made:
    """Result of `make_speech`; `cached` if the speech was in `out` already."""

    out: Path
    utterances: int
    val_utterances: int
    cached: bool


def make_speech(
    out: str | Path,
    utterances: int = 948,
    seed: int = 0,
    val_utterances: int | None = None,
    jobs: int | None = None,
    grammar: Grammar = "an4",
) -> Made:
    """Make `utterances` to train on and `val_utterances` to validate with in `out`.

    By default `val_utterances` is an eighth, at least 16, and `jobs` the number of cores. Speech of the same settings
    in `out` is kept, and speech of other settings replaced; real recordings are never replaced.
    """
    out, settings = Path(out), _settings(utterances, seed, val_utterances, grammar)
    jobs = int(within("jobs", _num_cores() if jobs is None else jobs, 1))
    cached = _stamp_of(out) == settings and all((out / name).exists() for name in MANIFESTS)
    if not cached:
        if held(out) and not (out / STAMP).exists():
            there = ", ".join(held(out))
            raise DataError("bad corpus", out, f"has {there}, not made by synth-an4; choose another folder for this")
        if find_spec(ENGINE) is None:
            raise SpeechError('speech is made by the package espeakng-loader: pip install "oktopk[synth]"')
        _make(out, settings, jobs)
    return Made(out, settings.utterances, settings.val_utterances, cached)


@dataclass(frozen=True)
class _Settings:
    version: int
    utterances: int
    val_utterances: int
    seed: int
    grammar: Grammar

    def size(self, part: str) -> int:
        return self.utterances if part == "train" else self.val_utterances


def _settings(utterances: int, seed: int, val_utterances: int | None, grammar: str) -> _Settings:
    within("utterances", utterances, 1)
    val = max(LEAST_VAL, round(utterances / VAL_PART)) if val_utterances is None else val_utterances
    within("val_utterances", val, 1)
    within("seed", seed, 0)
    return _Settings(VERSION, utterances, val, seed, cast(Grammar, one_of("grammar", grammar, KINDS)))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stamp_of(out: Path) -> _Settings | None:
    try:
        return _Settings(**json.loads((out / STAMP).read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, TypeError, KeyError):
        return None  # missing, of another version, or spoilt: the speech is made again


def _make(out: Path, settings: _Settings, jobs: int) -> None:
    speakers = [speaker for part in PARTS for speaker in speakers_of(part, settings.size(part), settings.seed)]
    with replaced(out) as folder:
        with ThreadPoolExecutor(jobs) as pool:  # threads: the engine is a child, and numpy releases the interpreter
            futures = [pool.submit(_record, folder, speaker, settings) for speaker in speakers]
            try:
                for future in tracked(as_completed(futures), "speaking", len(futures)):
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)
        write_manifests(folder, {part: [_name(part, i) for i in range(settings.size(part))] for part in PARTS})
        stamp = {"settings": asdict(settings), "engine": _engine_version()}
        (folder / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")


def _engine_version() -> str:
    try:
        return f"espeakng-loader {version('espeakng-loader')}"
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class Speaker:
    """A voice, its way to talk, and its utterances."""

    part: str
    voice: str
    rate_wpm: int
    pitch: int
    pitch_range: int
    utterances: range


def speakers_of(part: str, utterances: int, seed: int) -> list[Speaker]:
    """Return the speakers of a part; no voice variant speaks in both parts."""
    voices, all_ = _voices(part, seed), range(utterances)
    starts = all_[::UTTERANCES_A_SPEAKER]
    return [
        _speaker(part, voices[i % len(voices)], all_[start : start + UTTERANCES_A_SPEAKER], seed)
        for i, start in enumerate(starts)
    ]


def _voices(part: str, seed: int) -> list[str]:
    variants = _random(seed, "variants").sample(VARIANTS, len(VARIANTS))
    num_val = len(VARIANTS) // VAL_PART
    chosen = variants[:num_val] if part == "val" else variants[num_val:]
    voices = [f"{accent}+{variant}" for accent, variant in product(ACCENTS, chosen)]
    return _random(seed, f"voices {part}").sample(voices, len(voices))


def _speaker(part: str, voice: str, utterances: range, seed: int) -> Speaker:
    random = _random(seed, f"speaker {part} {utterances.start}")
    return Speaker(part, voice, random.randint(*RATE_WPM), random.randint(*PITCH), random.randint(*RANGE), utterances)


def _random(seed: int, purpose: str) -> Random:
    """Return a generator for one purpose, so that no draw depends on those before it."""
    return Random(f"{VERSION} {seed} {purpose}")


def _name(part: str, i: int) -> str:
    return f"{part}{i:05d}"


def _record(folder: Path, speaker: Speaker, settings: _Settings) -> None:
    """Write the recordings of a speaker."""
    part, randoms = speaker.part, [_random(settings.seed, _name(speaker.part, i)) for i in speaker.utterances]
    texts = [say(settings.grammar, random) for random in randoms]
    lines = [_line(speaker, text, random) for text, random in zip(texts, randoms, strict=True)]
    rate_hz, spoken = _speak(speaker.voice, lines)
    for i, text, samples in zip(speaker.utterances, texts, spoken, strict=True):
        noise = np.random.Generator(np.random.PCG64([VERSION, settings.seed, PARTS.index(part), i]))
        add_utterance(folder, part, _name(part, i), _as_recorded(resample(samples, rate_hz, RATE_HZ), noise), text)


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


def _speak(voice: str, lines: list[dict[str, Any]]) -> tuple[int, list[NDArray[np.float32]]]:
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
    spoken, at = [], 4
    for line in lines:
        end = at + 4 + 2 * int.from_bytes(done.stdout[at : at + 4], sys.byteorder)
        samples = np.frombuffer(done.stdout[at + 4 : end], np.int16)
        if not samples.any():
            raise SpeechError(f"the speech engine said nothing for {line['say']!r} with voice {voice}")
        spoken.append(samples.astype(np.float32) / np.float32(FULL_SCALE))
        at = end
    return int.from_bytes(done.stdout[:4], sys.byteorder), spoken


def _as_recorded(speech: NDArray[np.float32], random: np.random.Generator) -> Samples:
    """Return the speech as from a microphone: at another level, with silence around the words and noise under them."""
    level = 10 ** (random.uniform(*LEVEL_DB) / 20)
    speech = speech * np.float32(level / np.abs(speech).max())
    loudness = float(np.sqrt(np.mean(speech.astype(np.float64) ** 2)))
    before, after = (int(random.uniform(*SILENCE_S) * RATE_HZ) for _ in range(2))
    signal = np.pad(speech, (before, after)).astype(np.float64)
    signal += _noise(len(signal), random) * loudness * 10 ** (-random.uniform(*SNR_DB) / 20)
    return np.rint(np.clip(signal, -1, 1) * (FULL_SCALE - 1)).astype(np.int16)


def _noise(num_samples: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return noise of standard deviation 1, more or less dull."""
    width = int(random.integers(DULLNESS[0], DULLNESS[1] + 1))
    white = random.standard_normal(num_samples + width - 1)
    noise: NDArray[np.float64] = np.zeros(num_samples)
    for shift in range(width):
        noise += white[shift : shift + num_samples]
    return noise / float(np.sqrt(width))
