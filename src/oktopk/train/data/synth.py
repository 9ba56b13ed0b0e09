"""Speech made offline, like AN4: who has no corpus can train on it, and a test can hold the whole chain to a result.

eSpeak NG speaks (`speak.py`, one child process for each speaker, see there), in many voices and accents, each with its
own rate and pitch; the voices of `train` and `val` have nothing in common. What comes out depends on the settings
alone: not on the run, the number of jobs or the threads of a BLAS library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
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
from oktopk.train.data.progress import counted
from oktopk.train.data.resample import resample

VERSION = 1
"""Of what the settings mean: with another one the same seed gives other samples, and old folders are made again."""

ACCENTS = ("en-us", "en-us-nyc", "en-029", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd")

VARIANTS = (
    *("Alex", "Andrea", "Andy", "Annie", "Denis", "Diogo", "Gene", "Gene2", "Henrique", "Hugo", "Lee", "Mario"),
    *("Michael", "Mike", "Nguyen", "RicishayMax", "adam", "anika", "announcer", "antonio", "aunty", "belinda"),
    *("benjamin", "boris", "david", "ed", "edward", "edward2", "f1", "f4", "grandma", "grandpa", "gustave", "iven2"),
    *("iven3", "iven4", "john", "kaukovalta", "klatt3", "klatt4", "linda", "m1", "m2", "m3", "m4", "m5", "m6", "m7"),
    *("m8", "marcelo", "max", "michel", "miguel", "mike2", "norbert", "pablo", "paul", "pedro", "quincy", "rob"),
    *("robert", "shelby", "steph", "travis", "zac"),
)
"""Voices that are people, not robots, and whose definition has no `breath`: those read memory that nobody wrote."""

UTTERANCES_A_SPEAKER = 8
VAL_PART = 8
"""One voice of eight is kept for validation, and by default one utterance for eight of training."""

LEAST_VAL = 16

RATE_WPM = (100, 165)
PITCH = (25, 75)
RANGE = (30, 70)
GAP_10MS = (0, 12)
LEVEL_DB = (-22.0, -5.0)
"""Of the loudest sample, against full scale."""

SNR_DB = (22.0, 45.0)
SILENCE_S = (0.08, 0.35)
"""Before and after the words."""

DULLNESS = (1, 6)
"""Samples over which the noise is averaged: 1 hisses, 6 hums."""

CHILD_TIMEOUT_S = 300.0

ENGINE = "espeakng_loader"


@dataclass(frozen=True)
class Made:
    """What `make_speech` left in `out`; `cached` if it was there already."""

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
    """Make `utterances` to train on and `val_utterances` to validate with in `out`, and return what is there.

    By default `val_utterances` is an eighth, at least 16, and `jobs` the number of cores. Where `out` holds speech of
    the same settings nothing is made; where it holds speech of others that is replaced; real recordings never are.
    """
    out, settings = Path(out), _settings(utterances, seed, val_utterances, grammar)
    jobs = int(within("jobs", _num_cores() if jobs is None else jobs, 1))
    made = _stamp_of(out) == settings and all((out / name).exists() for name in MANIFESTS)
    if not made:
        _check_out(out)
        _check_engine()
        _make(out, settings, jobs)
    return Made(out, settings.utterances, settings.val_utterances, cached=made)


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
    known = cast(Grammar, one_of("grammar", grammar, KINDS))
    return _Settings(VERSION, utterances, val, seed, known)


def _stamp_of(out: Path) -> _Settings | None:
    try:
        return _Settings(**json.loads((out / STAMP).read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, TypeError, KeyError):
        return None  # none, of another version, or spoilt: in each case not what is wanted


def _check_out(out: Path) -> None:
    if held(out) and not (out / STAMP).exists():
        raise DataError(
            "bad corpus", out, f"has {', '.join(held(out))}, not made by synth-an4; choose another folder for this"
        )


def _check_engine() -> None:
    if find_spec(ENGINE) is None:
        raise SpeechError('speech is made by the package espeakng-loader, not installed: pip install "oktopk[synth]"')


def _make(out: Path, settings: _Settings, jobs: int) -> None:
    speakers = [speaker for part in PARTS for speaker in speakers_of(part, settings.size(part), settings.seed)]
    with replaced(out) as folder:
        _in_parallel(lambda speaker: _record(folder, speaker, settings), speakers, jobs)
        write_manifests(folder, {part: [_name(part, i) for i in range(settings.size(part))] for part in PARTS})
        stamp = {"settings": asdict(settings), "engine": _engine_version()}
        (folder / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Speaker:
    """Somebody with a voice, a way to talk, and utterances to say."""

    part: str
    voice: str
    rate_wpm: int
    pitch: int
    pitch_range: int
    utterances: range


def speakers_of(part: str, utterances: int, seed: int) -> list[Speaker]:
    """Return who says the utterances of a part; no voice variant speaks in both parts."""
    voices = _voices(part, seed)
    starts = range(0, utterances, UTTERANCES_A_SPEAKER)
    return [
        _speaker(part, voices[i % len(voices)], range(start, min(start + UTTERANCES_A_SPEAKER, utterances)), seed)
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


def _record(folder: Path, speaker: Speaker, settings: _Settings) -> int:
    """Write what a speaker says, and return how many utterances that is."""
    randoms = [_random(settings.seed, _name(speaker.part, i)) for i in speaker.utterances]
    texts = [say(settings.grammar, random) for random in randoms]
    lines = [_line(speaker, text, random) for text, random in zip(texts, randoms, strict=True)]
    rate_hz, spoken = _speak(speaker.voice, lines)
    for i, text, samples in zip(speaker.utterances, texts, spoken, strict=True):
        recorded = _as_recorded(resample(samples, rate_hz, RATE_HZ), _noise_source(settings.seed, speaker.part, i))
        add_utterance(folder, speaker.part, _name(speaker.part, i), recorded, text)
    return len(texts)


def _line(speaker: Speaker, text: str, random: Random) -> dict[str, Any]:
    return {
        "say": spoken_form(text),
        "rate": round(speaker.rate_wpm * random.uniform(0.9, 1.1)),
        "pitch": speaker.pitch + random.randint(-6, 6),
        "range": speaker.pitch_range,
        "gap": random.randint(*GAP_10MS),
    }


def spoken_form(text: str) -> str:
    """Return what the engine is given: small letters, as capitals may be read as abbreviations, and A as a phoneme.

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
    return int.from_bytes(done.stdout[:4], sys.byteorder), _split(done.stdout[4:], voice, lines)


def _split(answer: bytes, voice: str, lines: list[dict[str, Any]]) -> list[NDArray[np.float32]]:
    spoken, at = [], 0
    for line in lines:
        num_samples = int.from_bytes(answer[at : at + 4], sys.byteorder)
        samples = np.frombuffer(answer[at + 4 : at + 4 + 2 * num_samples], np.int16)
        if not samples.any():
            raise SpeechError(f"the speech engine said nothing for {line['say']!r} with voice {voice}")
        spoken.append(samples.astype(np.float32) / np.float32(FULL_SCALE))
        at += 4 + 2 * num_samples
    return spoken


def _as_recorded(speech: NDArray[np.float32], random: np.random.Generator) -> Samples:
    """Return what a microphone would have given: another level, silence around the words, noise under them."""
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


def _random(seed: int, what: str) -> Random:
    """Return a generator of its own for each thing that is drawn: none depends on what was drawn before it."""
    return Random(f"{VERSION} {seed} {what}")


def _noise_source(seed: int, part: str, i: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([VERSION, seed, PARTS.index(part), i]))


def _name(part: str, i: int) -> str:
    return f"{part}{i:05d}"


def _in_parallel(work: Callable[[Speaker], int], speakers: Iterable[Speaker], jobs: int) -> None:
    """Do the work of all speakers; threads will do, as the engine is a child and numpy lets go of the interpreter."""
    with counted() as bar, ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(work, speaker) for speaker in speakers]
        task = bar.add_task("speaking", total=sum(len(speaker.utterances) for speaker in speakers))
        try:
            for future in as_completed(futures):
                bar.advance(task, future.result())
        finally:
            pool.shutdown(cancel_futures=True)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _engine_version() -> str:
    try:
        return f"espeakng-loader {version('espeakng-loader')}"
    except PackageNotFoundError:
        return "unknown"
