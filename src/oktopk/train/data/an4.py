"""The CMU AN4 corpus, from any of the forms in which it is distributed, as wav files with manifests.

CMU has archives of raw audio in either byte order and of NIST sphere files; people have those, what they unpacked, or
folders of wav files with manifests that were made on another machine. Nothing in any of them can name a file that is
written outside the folder of the corpus.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from oktopk.train.data.archive import MOST_MEMBERS, read_files
from oktopk.train.data.audio import RATE_HZ, ByteOrder, decode_pcm, detect_byte_order, has_header
from oktopk.train.data.errors import DataError, shortened
from oktopk.train.data.folder import MANIFESTS, PARTS, TRAIN_MANIFEST, add_utterance, held, replaced, write_manifests
from oktopk.train.data.labels import LabelError, encode
from oktopk.train.data.progress import counted

LISTS = {"train": "an4_train", "val": "an4_test"}
"""What the corpus calls its parts, in `etc/`."""

SIGNS = (f"etc/{LISTS['train']}.fileids", TRAIN_MANIFEST)
"""A corpus as CMU made it has the one, a folder that somebody prepared the other."""

COMPLETE = {"train": 948, "val": 130}
"""How many utterances the whole corpus has."""

AUDIO_SUFFIXES = (".sph", ".raw", ".wav")
NOTICES = ("LICENSE", "COPYRIGHT", "COPYING", "README")
"""Whose names begin so is kept: the licence wants the copyright notice beside every copy."""

NUM_PROBES = 16
"""Recordings, from all over the corpus, that the byte order is judged by."""

MOST_CHARACTERS = 2_000
"""Of a transcription: AN4's longest has about 80."""

MOST_LINE = 10_000
"""Characters of a line in a list, which holds a transcription or two paths."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
"""With a suffix, any file system takes it: most have 255 bytes for a name."""


@dataclass(frozen=True)
class Part:
    """What one part of an imported corpus holds."""

    utterances: int
    minutes: float
    speakers: int


@dataclass(frozen=True)
class Imported:
    """What an import wrote; `audio` says what was found, `warnings` what is unlike the complete corpus."""

    out: Path
    train: Part
    val: Part
    audio: str
    warnings: tuple[str, ...]


def import_an4(source: str | Path, out: str | Path, *, force: bool = False) -> Imported:
    """Write the corpus in `source` to `out`, and return what it holds.

    `source` is CMU's archive, its unpacked folder, or a folder of wav files with manifests, whatever their paths.

    `out` gets wav files, transcriptions, two manifests and the corpus's own notices, all of them or none. A corpus
    that is there already is replaced only with `force`.
    """
    source, out = Path(source), Path(out)
    _check_out(out, force)
    files = _read_source(source)
    found = {part: _utterances(files, source, part) for part in PARTS}
    order = _byte_order([item.data for part in PARTS for item in found[part]], source)
    with replaced(out) as folder:
        parts = _write(folder, found, order)
        _keep_notices(folder, files)
    return Imported(out, parts["train"], parts["val"], _audio_name(found, order), _warnings(parts))


@dataclass(frozen=True)
class _Item:
    name: str
    speaker: str
    text: str
    data: bytes
    path: str


def _check_out(out: Path, force: bool) -> None:
    if held(out) and not force:
        raise DataError(
            "bad corpus", out, f"has {', '.join(held(out))} already; --force imports again and replaces them"
        )


def _read_source(source: Path) -> dict[str, bytes]:
    """Return what is needed of the corpus, by its path below the folder that has `etc/`, or the manifests, in it."""
    files = read_files(_root(source), _wanted)
    for wanted in SIGNS:
        found = [name for name in files if f"/{name}".endswith(f"/{wanted}")]
        if found:
            return _below(min(found, key=len).removesuffix(wanted), files)
    raise _no_corpus(source)


def _root(source: Path) -> Path:
    """Return the folder of the corpus, which must show itself before whatever lies below it is read."""
    if not source.is_dir():
        return source
    for root in (source, source / "an4"):
        if any((root / sign).is_file() for sign in SIGNS):
            return root
    raise _no_corpus(source)


def _no_corpus(source: Path) -> DataError:
    return DataError(
        "bad corpus", source, f"has no {' and no '.join(SIGNS)}; wanted CMU's AN4 archive or its unpacked folder"
    )


def _wanted(name: str) -> bool:
    path = PurePosixPath(name)
    lists = {f"{stem}{suffix}" for stem in LISTS.values() for suffix in (".fileids", ".transcription")}
    return (
        path.suffix in (*AUDIO_SUFFIXES, ".txt")
        or path.name in lists.union(MANIFESTS)
        or path.name.upper().startswith(NOTICES)
    )


def _below(root: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {name.removeprefix(root): data for name, data in files.items() if name.startswith(root)}


def _utterances(files: dict[str, bytes], source: Path, part: str) -> list[_Item]:
    items = _prepared(files, source, part) if TRAIN_MANIFEST in files else _listed(files, source, part)
    if not items:
        raise DataError("empty", source, f"its list of the {part} part names no utterance")
    if len({item.name for item in items}) != len(items):
        raise DataError("bad corpus", source, f"its list of the {part} part names an utterance twice")
    return items


def _listed(files: dict[str, bytes], source: Path, part: str) -> list[_Item]:
    texts = dict(_transcripts(files, source, part))
    return [_item(line, files, texts, source) for line in _lines(files, source, f"etc/{LISTS[part]}.fileids")]


def _prepared(files: dict[str, bytes], source: Path, part: str) -> list[_Item]:
    """Return the utterances of a folder with manifests, whose paths may be those of another machine."""
    manifest = dict(zip(PARTS, MANIFESTS, strict=True))[part]
    namesakes: dict[str, list[str]] = {}
    for path in files:
        namesakes.setdefault(PurePosixPath(path).name, []).append(path)
    return [_prepared_item(line, files, namesakes, source) for line in _lines(files, source, manifest)]


def _prepared_item(line: str, files: dict[str, bytes], namesakes: dict[str, list[str]], source: Path) -> _Item:
    wav, txt = (_nearest(column.strip(), namesakes, source) for column in f"{line},".split(",")[:2])
    name = PurePosixPath(wav).stem
    _plain(name, source)
    text = _checked(files[txt].decode("utf-8", "replace").strip(), name, source)
    return _Item(name, _speaker(name), text, files[wav], f"{source}/{wav}")


def _nearest(path: str, namesakes: dict[str, list[str]], source: Path) -> str:
    """Return the file whose path ends as `path` does, as far as possible."""
    parts = PurePosixPath(path.replace("\\", "/")).parts
    for start in range(len(parts)):
        end = "/".join(parts[start:])
        found = [name for name in namesakes.get(parts[-1], ()) if f"/{name}".endswith(f"/{end}")]
        if len(found) == 1:
            return found[0]
        if found:
            raise DataError(
                "bad corpus", source, f"lists {shortened(path)}, which could be {' or '.join(sorted(found)[:2])}"
            )
    raise DataError("missing", source, f"lists {shortened(path)} but has no file of that name")


def _speaker(name: str) -> str:
    """Return who speaks, from a name like `an251-fash-b`."""
    parts = name.split("-")
    return parts[1] if len(parts) > 1 else name


def _transcripts(files: dict[str, bytes], source: Path, part: str) -> Iterator[tuple[str, str]]:
    """Yield each name and its text; the training lines have `<s> TEXT </s> (name)`, the test lines no marks."""
    for line in _lines(files, source, f"etc/{LISTS[part]}.transcription"):
        text, _, end = line.strip().rpartition("(")
        name = end.removesuffix(")")
        if name == end or not name or ")" in name:
            raise DataError(
                "bad text",
                source,
                f"etc/{LISTS[part]}.transcription has {shortened(line)}, wanted: <s> TEXT </s> (ID)",
            )
        yield name, text.strip().removeprefix("<s>").removesuffix("</s>").strip()


def _lines(files: dict[str, bytes], source: Path, name: str) -> list[str]:
    if name not in files:
        raise DataError("bad corpus", source, f"has no {name}")
    lines = [line for line in files[name].decode("utf-8-sig", "replace").splitlines() if line.strip()]
    if len(lines) > MOST_MEMBERS:
        raise DataError("bad corpus", source, f"{name} has {len(lines)} lines, more than {MOST_MEMBERS}")
    for line in lines:
        if len(line) > MOST_LINE:
            raise DataError("bad corpus", source, f"{name} has a line of {len(line)} characters, more than {MOST_LINE}")
    return lines


def _item(line: str, files: dict[str, bytes], texts: dict[str, str], source: Path) -> _Item:
    path = PurePosixPath(line.strip())
    _plain(path.name, source)
    audio = next((f"wav/{path}{suffix}" for suffix in AUDIO_SUFFIXES if f"wav/{path}{suffix}" in files), None)
    if audio is None:
        wanted = ", ".join(AUDIO_SUFFIXES)
        raise DataError("missing", source, f"lists wav/{path} but has no such file ({wanted}); is it complete?")
    text = _checked(texts.get(path.name, ""), path.name, source)
    return _Item(path.name, path.parent.name, text, files[audio], f"{source}/{audio}")


def _plain(name: str, source: Path) -> str:
    if not _PLAIN_NAME.fullmatch(name):
        raise DataError(
            "bad corpus",
            source,
            f"names an utterance {shortened(name)}, which can be no file name; wanted at most 200 of A-Z a-z 0-9 _ . -",
        )
    return name


def _checked(text: str, name: str, source: Path) -> str:
    if len(text) > MOST_CHARACTERS:
        raise DataError(
            "bad text", source, f"the transcription of {name} has {len(text)} characters, more than {MOST_CHARACTERS}"
        )
    try:
        encode(text)
    except LabelError as error:
        raise DataError("bad text", source, f"the transcription of {name}: {error}") from None
    if not text:
        raise DataError("bad text", source, f"there is no transcription of {name}")
    return text


def _byte_order(recordings: list[bytes], source: Path) -> ByteOrder | None:
    """Return the byte order of those without a header, or None if all have one. The README inside is wrong about it."""
    raw = [data for data in recordings if data and not has_header(data)]
    return detect_byte_order(raw[:: max(1, len(raw) // NUM_PROBES)], source) if raw else None


def _write(folder: Path, found: dict[str, list[_Item]], order: ByteOrder | None) -> dict[str, Part]:
    with counted() as bar:
        task = bar.add_task("writing", total=sum(map(len, found.values())))
        samples = dict.fromkeys(found, 0)
        for part, item in [(part, item) for part, items in found.items() for item in items]:
            pcm = decode_pcm(item.data, item.path, order)
            add_utterance(folder, part, item.name, pcm, item.text)
            samples[part] += len(pcm)
            bar.advance(task)
    write_manifests(folder, {part: [item.name for item in found[part]] for part in found})
    return {part: _part(found[part], samples[part]) for part in found}


def _part(items: list[_Item], num_samples: int) -> Part:
    return Part(len(items), num_samples / RATE_HZ / 60, len({item.speaker for item in items}))


def _keep_notices(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        if "/" not in name and name.upper().startswith(NOTICES) and _PLAIN_NAME.fullmatch(name):
            (folder / name).write_bytes(data)


def _audio_name(found: dict[str, list[_Item]], order: ByteOrder | None) -> str:
    if order:
        return f"raw, {order} endian"
    return "NIST sphere" if found["train"][0].data.startswith(b"NIST") else "wav"


def _warnings(parts: dict[str, Part]) -> tuple[str, ...]:
    return tuple(
        f"{part}: {parts[part].utterances} utterances, the complete corpus has {wanted}; results will not compare"
        for part, wanted in COMPLETE.items()
        if parts[part].utterances != wanted
    )
