"""A corpus of four utterances in AN4's layout, in each of the forms in which people have it, and files with a fault."""

import io
import tarfile

import numpy as np
import soundfile

from oktopk.train.data.manifest import write_manifest

RATE_HZ = 16_000
TRAIN = {"fash/an251-fash-b": "YES", "fash/an252-fash-b": "A B C", "mgah/cen1-mgah-b": "TWENTY ONE"}
VAL = {"fcaw/an406-fcaw-b": "RUBOUT G M"}
PARTS = {"train": TRAIN, "val": VAL}
LICENCE = b"Copyright (c) somebody. Keep this.\n"
FAULTS = ["wrong rate", "stereo", "empty", "unreadable", "missing", "bad text", "too short"]


def tone(seconds=1.0, hz=220.0, rate_hz=RATE_HZ):
    """Return a tone with a little noise: smooth, as speech is."""
    at = np.arange(int(seconds * rate_hz)) / rate_hz
    noise = np.random.default_rng(0).normal(0, 20, len(at))
    return (8_000 * np.sin(2 * np.pi * hz * at) + noise).astype(np.int16)


def samples_of(name):
    """Return the recording of `name`; another length and pitch for each."""
    which = sorted([*TRAIN, *VAL]).index(name)
    return tone(1.0 + 0.25 * which, 200 + 50 * which)


def audio(name, form):
    """Return a recording's suffix and bytes."""
    samples = samples_of(name)
    if form in ("big", "little"):
        return ".raw", samples.astype(">i2" if form == "big" else "<i2").tobytes()
    file = io.BytesIO()
    soundfile.write(file, samples, RATE_HZ, format="NIST" if form == "sphere" else "WAV", subtype="PCM_16")
    return ".sph" if form == "sphere" else ".wav", file.getvalue()


def files(form):
    """Return the corpus as paths and bytes."""
    made = {"an4/LICENSE": LICENCE, "an4/README": b"The files are little endian, it says here.\n"}
    for listed, folder, texts in (("an4_train", "an4_clstk", TRAIN), ("an4_test", "an4test_clstk", VAL)):
        made[f"an4/etc/{listed}.fileids"] = "".join(f"{folder}/{name}\n" for name in texts).encode()
        # As in the corpus: sentence marks in the training list only.
        line = "<s> {} </s> ({})\n" if listed == "an4_train" else "{} ({})\n"
        lines = (line.format(text, name.split("/")[1]) for name, text in texts.items())
        made[f"an4/etc/{listed}.transcription"] = "".join(lines).encode()
        for name in texts:
            suffix, data = audio(name, form)
            made[f"an4/wav/{folder}/{name}{suffix}"] = data
    return made


def unpack(made, folder):
    """Write the corpus as files; returns its folder `an4`."""
    for name, data in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder / "an4"


def pack(made, path, *extra, mode="w:gz", form=tarfile.PAX_FORMAT):
    """Write the corpus as an archive, with `extra` members that have no content."""
    with tarfile.open(path, mode, format=form) as archive:
        for name, data in made.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member in extra:
            archive.addfile(member)
    return path


def tree(folder):
    """Return all files below a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def utterance(folder, name, samples, text="YES"):
    """Write one recording and its text into `folder`."""
    wav, txt = folder / f"{name}.wav", folder / f"{name}.txt"
    soundfile.write(wav, samples, RATE_HZ, subtype="PCM_16", format="WAV")
    txt.write_text(text + "\n", encoding="utf-8")
    return wav, txt


def manifest_of(path, seconds):
    """Write utterances of these lengths and a manifest of them."""
    path.mkdir(exist_ok=True)
    write_manifest(path / "m.csv", [utterance(path, f"u{i}", tone(s)) for i, s in enumerate(seconds)])
    return path / "m.csv"


def spoilt(folder, fault):
    """Write an utterance with one fault; return the file that has it."""
    text = {"bad text": "CAFÉ 1", "too short": "TWENTY ONE"}.get(fault, "YES")
    wav, txt = utterance(folder, fault.replace(" ", "-"), tone(0.02 if fault == "too short" else 1.0), text)
    sounds = {"wrong rate": tone(rate_hz=8000), "stereo": np.stack([tone(), tone()], axis=1), "empty": tone(0)}
    if fault in sounds:
        soundfile.write(wav, sounds[fault], 8000 if fault == "wrong rate" else RATE_HZ)
    elif fault == "unreadable":
        wav.write_bytes(b"RIFF, and then nothing that makes sense")
    elif fault == "missing":
        wav.unlink()
    return txt if fault == "bad text" else wav
