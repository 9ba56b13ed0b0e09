"""Import the CMU AN4 corpus, from any of the forms in which it is distributed, as wav files with manifests.

CMU has archives of raw audio in either byte order and of NIST sphere files. People have those, the unpacked folder, or
a folder of wav files with manifests that were made on another machine. No name in any of them can lead to a file that
is written outside the folder of the corpus.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from oktopk.train.data.archive import MOST_MEMBERS, read_files
from oktopk.train.data.audio import RATE_HZ, ByteOrder, decode_pcm, detect_byte_order, has_header
from oktopk.train.data.errors import DataError, Kind, shortened
from oktopk.train.data.folder import MANIFESTS, PARTS, TRAIN_MANIFEST, add_utterance, held, replaced, write_manifests
from oktopk.train.data.labels import LabelError, encode
from oktopk.train.data.progress import tracked

LISTS = {"train": "etc/an4_train", "val": "etc/an4_test"}  # CMU's lists of each part, without their suffixes
SIGNS = (
    f"{LISTS['train']}.fileids",
    TRAIN_MANIFEST,
)  # a root has one: CMU's layout the first, a prepared folder the other
COMPLETE = {"train": 948, "val": 130}  # utterances of the whole corpus
AUDIO_SUFFIXES = (".sph", ".raw", ".wav")
NOTICES = ("LICENSE", "COPYRIGHT", "COPYING", "README")  # kept: the licence wants its notice beside every copy
NUM_PROBES = 16  # recordings, from all over the corpus, from which the byte order is found
MOST_CHARACTERS = 2_000  # of a transcription; AN4's longest has about 80
MOST_LINE = 10_000  # characters of a line in a list, which holds a transcription or two paths

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")  # with a suffix below the 255 bytes of a file name


@dataclass(frozen=True)
class Part:
    """Size of one part of an imported corpus."""

    utterances: int
    minutes: float
    speakers: int


@dataclass(frozen=True)
class Imported:
    """Result of an import; `warnings` say how it differs from the complete corpus."""

    out: Path
    train: Part
    val: Part
    audio: str
    warnings: tuple[str, ...]


def import_an4(source: str | Path, out: str | Path, *, force: bool = False) -> Imported:
    """Write the corpus in `source` to `out`, and return its size.

    `source` is CMU's archive, its unpacked folder, or a folder of wav files with manifests, whatever their paths.

    `out` gets wav files, transcriptions, two manifests and the corpus's own notices, all of them or none. A corpus
    that is there already is replaced only with `force`.
    """
    out, corpus = Path(out), _Corpus(Path(source))
    if held(out) and not force:
        there = ", ".join(held(out))
        raise DataError("bad corpus", out, f"has {there} already; --force imports again and replaces them")
    corpus.read()
    items = {part: corpus.items(part) for part in PARTS}
    order = _byte_order([item.data for part in PARTS for item in items[part]], corpus.source)
    with replaced(out) as folder:
        parts = _write(folder, items, order)
        for name, data in corpus.notices().items():
            (folder / name).write_bytes(data)
    return Imported(out, parts["train"], parts["val"], _audio_name(items["train"][0], order), _warnings(parts))


@dataclass(frozen=True)
class _Item:
    name: str
    speaker: str
    text: str
    data: bytes
    path: str


class _Corpus:
    """The files of a corpus, by their paths below its root."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.files: dict[str, bytes] = {}
        self._by_name: dict[str, list[str]] = {}

    def error(self, message: str, kind: Kind = "bad corpus") -> DataError:
        return DataError(kind, self.source, message)

    def read(self) -> None:
        """Read the files that an import needs."""
        files = read_files(self._root(), _wanted)
        signs = [(sign, name) for sign in SIGNS for name in files if f"/{name}".endswith(f"/{sign}")]
        if not signs:
            raise self._no_corpus()
        sign = signs[0][0]
        root = min((name for found, name in signs if found == sign), key=len).removesuffix(sign)
        self.files = {name.removeprefix(root): data for name, data in files.items() if name.startswith(root)}
        for name in self.files:
            self._by_name.setdefault(PurePosixPath(name).name, []).append(name)

    def _root(self) -> Path:
        """Return the archive, or the folder that has a sign; no other folder is read."""
        if not self.source.is_dir():
            return self.source
        for root in (self.source, self.source / "an4"):
            if any((root / sign).is_file() for sign in SIGNS):
                return root
        raise self._no_corpus()

    def _no_corpus(self) -> DataError:
        return self.error(f"has no {' and no '.join(SIGNS)}; wanted CMU's AN4 archive or its unpacked folder")

    def notices(self) -> dict[str, bytes]:
        return {name: self.files[name] for name in self.files if _is_notice(name) and _PLAIN_NAME.fullmatch(name)}

    def items(self, part: str) -> list[_Item]:
        """Return the utterances of a part."""
        items = self._prepared(part) if TRAIN_MANIFEST in self.files else self._listed(part)
        if not items:
            raise self.error(f"its list of the {part} part names no utterance", "empty")
        if len({item.name for item in items}) != len(items):
            raise self.error(f"its list of the {part} part names an utterance twice")
        return items

    def _listed(self, part: str) -> list[_Item]:
        """Return the utterances of CMU's lists, whose lines are paths below `wav/` without a suffix."""
        paths = [PurePosixPath(line.strip()) for line in self._lines(f"{LISTS[part]}.fileids")]
        texts = dict(self._transcription(line, part) for line in self._lines(f"{LISTS[part]}.transcription"))
        return [self._item(self._audio(path), path.name, path.parent.name, texts.get(path.name, "")) for path in paths]

    def _audio(self, path: PurePosixPath) -> str:
        self._check_name(path.name)
        found = [f"wav/{path}{suffix}" for suffix in AUDIO_SUFFIXES if f"wav/{path}{suffix}" in self.files]
        if not found:
            suffixes = ", ".join(AUDIO_SUFFIXES)
            raise self.error(f"lists wav/{path} but has no such file ({suffixes}); is it complete?", "missing")
        return found[0]

    def _transcription(self, line: str, part: str) -> tuple[str, str]:
        """Return name and text of `<s> TEXT </s> (name)`; the lines of the test part have no marks."""
        text, _, end = line.strip().rpartition("(")
        name = end.removesuffix(")")
        if name == end or not name or ")" in name:
            wanted = "wanted: <s> TEXT </s> (ID)"
            raise self.error(f"{LISTS[part]}.transcription has {shortened(line)}, {wanted}", "bad text")
        return name, text.strip().removeprefix("<s>").removesuffix("</s>").strip()

    def _prepared(self, part: str) -> list[_Item]:
        """Return the utterances of a manifest, whose paths may be those of another machine."""
        items = []
        for line in self._lines(MANIFESTS[PARTS.index(part)]):
            wav, txt = (self._nearest(column.strip()) for column in f"{line},".split(",")[:2])
            name = PurePosixPath(wav).stem
            self._check_name(name)
            speaker = name.split("-")[1] if "-" in name else name  # names are like an251-fash-b
            items.append(self._item(wav, name, speaker, self.files[txt].decode("utf-8", "replace").strip()))
        return items

    def _nearest(self, path: str) -> str:
        """Return the file that shares the longest end with `path`."""
        parts = PurePosixPath(path.replace("\\", "/")).parts
        for start in range(len(parts)):
            end = "/".join(parts[start:])
            found = [name for name in self._by_name.get(parts[-1], ()) if f"/{name}".endswith(f"/{end}")]
            if len(found) > 1:
                raise self.error(f"lists {shortened(path)}, which could be {' or '.join(sorted(found)[:2])}")
            if found:
                return found[0]
        raise self.error(f"lists {shortened(path)} but has no file of that name", "missing")

    def _lines(self, name: str) -> list[str]:
        if name not in self.files:
            raise self.error(f"has no {name}")
        lines = [line for line in self.files[name].decode("utf-8-sig", "replace").splitlines() if line.strip()]
        longest = max(map(len, lines), default=0)
        if len(lines) > MOST_MEMBERS:
            raise self.error(f"{name} has {len(lines)} lines, more than {MOST_MEMBERS}")
        if longest > MOST_LINE:
            raise self.error(f"{name} has a line of {longest} characters, more than {MOST_LINE}")
        return lines

    def _check_name(self, name: str) -> None:
        if not _PLAIN_NAME.fullmatch(name):
            wanted = "which can be no file name; wanted at most 200 of A-Z a-z 0-9 _ . -"
            raise self.error(f"names an utterance {shortened(name)}, {wanted}")

    def _item(self, audio: str, name: str, speaker: str, text: str) -> _Item:
        if len(text) > MOST_CHARACTERS:
            count = f"{len(text)} characters, more than {MOST_CHARACTERS}"
            raise self.error(f"the transcription of {name} has {count}", "bad text")
        try:
            encode(text)
        except LabelError as error:
            raise self.error(f"the transcription of {name}: {error}", "bad text") from None
        if not text:
            raise self.error(f"there is no transcription of {name}", "bad text")
        return _Item(name, speaker, text, self.files[audio], f"{self.source}/{audio}")


def _wanted(name: str) -> bool:
    path = PurePosixPath(name)
    lists = [
        f"{PurePosixPath(stem).name}{suffix}" for stem in LISTS.values() for suffix in (".fileids", ".transcription")
    ]
    return path.suffix in (*AUDIO_SUFFIXES, ".txt") or path.name in (*lists, *MANIFESTS) or _is_notice(path.name)


def _is_notice(name: str) -> bool:
    return name.upper().startswith(NOTICES)


def _byte_order(recordings: list[bytes], source: Path) -> ByteOrder | None:
    """Return the byte order of recordings without a header, None if all have one. The corpus's README is wrong."""
    raw = [data for data in recordings if data and not has_header(data)]
    return detect_byte_order(raw[:: max(1, len(raw) // NUM_PROBES)], source) if raw else None


def _write(folder: Path, items: dict[str, list[_Item]], order: ByteOrder | None) -> dict[str, Part]:
    num_samples = dict.fromkeys(items, 0)
    all_items = [(part, item) for part in items for item in items[part]]
    for part, item in tracked(all_items, "writing", len(all_items)):
        pcm = decode_pcm(item.data, item.path, order)
        add_utterance(folder, part, item.name, pcm, item.text)
        num_samples[part] += len(pcm)
    write_manifests(folder, {part: [item.name for item in items[part]] for part in items})
    return {
        part: Part(len(items[part]), num_samples[part] / RATE_HZ / 60, len({item.speaker for item in items[part]}))
        for part in items
    }


def _audio_name(item: _Item, order: ByteOrder | None) -> str:
    if order:
        return f"raw, {order} endian"
    return "NIST sphere" if item.data.startswith(b"NIST") else "wav"


def _warnings(parts: dict[str, Part]) -> tuple[str, ...]:
    return tuple(
        f"{part}: {parts[part].utterances} utterances, the complete corpus has {wanted}; results will not compare"
        for part, wanted in COMPLETE.items()
        if parts[part].utterances != wanted
    )
