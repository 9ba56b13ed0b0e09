"""Import the CMU AN4 corpus, from any of the forms in which it is distributed, as wav files with manifests.

CMU has archives of raw audio in either byte order and of NIST sphere files. People have those, the unpacked folder, or
a folder of wav files with manifests that were made on another machine. No name in any of them can lead to a file that
is written outside the folder of the corpus.
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from oktopk.train.data.archive import MOST_MEMBERS, read_files
from oktopk.train.data.audio import RATE_HZ, ByteOrder, decode_pcm, detect_byte_order, has_header
from oktopk.train.data.errors import DataError, Kind, shortened
from oktopk.train.data.labels import LabelError, encode
from oktopk.train.data.manifest import MANIFESTS, PARTS, TRAIN_MANIFEST, add_utterance, held, replaced, tracked

LISTS = {"train": "etc/an4_train", "val": "etc/an4_test"}  # CMU's lists of each part, without their suffixes
LIST_NAMES = [f"an4_{part}.{suffix}" for part in ("train", "test") for suffix in ("fileids", "transcription")]
SIGNS = (f"{LISTS['train']}.fileids", TRAIN_MANIFEST)  # a root has one: CMU's layout, or a prepared folder
COMPLETE = {"train": 948, "val": 130}  # utterances of the whole corpus
AUDIO_SUFFIXES = (".sph", ".raw", ".wav")
NOTICES = ("LICENSE", "COPYRIGHT", "COPYING", "README")  # kept: the licence wants its notice beside every copy
NUM_PROBES = 16  # recordings, from all over the corpus, from which the byte order is found
MOST_CHARACTERS = 2_000  # of a transcription; AN4's longest has about 80
MOST_LINE = 10_000  # characters of a line in a list, which holds a transcription or two paths

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")  # with a suffix below the 255 bytes of a file name


def import_an4(source: str | Path, out: str | Path, *, force: bool = False) -> tuple[dict[str, list[float]], str]:
    """Write the corpus in `source` to `out`; return the seconds of each utterance by part, and the form of the audio.

    `source` is CMU's archive, its unpacked folder, or a folder of wav files with manifests, whatever their paths.

    `out` gets wav files, transcriptions, two manifests and the corpus's own notices, all of them or none. A corpus
    that is there already is replaced only with `force`.
    """
    out = Path(out)
    if held(out) and not force:
        there = ", ".join(held(out))
        raise DataError("bad corpus", out, f"has {there} already; --force imports again and replaces them")
    corpus = _Corpus(Path(source))
    items = {part: corpus.items(part) for part in PARTS}
    raw = [item.data for part in PARTS for item in items[part] if item.data and not has_header(item.data)]
    probes = raw[:: max(1, len(raw) // NUM_PROBES)]
    order = detect_byte_order(probes, corpus.source) if raw else None  # the corpus's README is wrong
    with replaced(out) as folder:
        seconds = {part: [_write(folder, part, item, order) for item in tracked(items[part], part)] for part in PARTS}
        for name, data in corpus.files.items():
            if _is_notice(name) and _PLAIN_NAME.fullmatch(name):
                (folder / name).write_bytes(data)
    header = "NIST sphere" if items["train"][0].data.startswith(b"NIST") else "wav"
    return seconds, f"raw, {order} endian" if order else header


@dataclass(frozen=True)
class _Item:
    name: str
    text: str
    data: bytes
    path: str


class _Corpus:
    """The files of a corpus, by their paths below its root."""

    def __init__(self, source: Path) -> None:
        self.source = source
        files = read_files(self._root(), _wanted)
        signs = [(sign, name) for sign in SIGNS for name in files if f"/{name}".endswith(f"/{sign}")]
        if not signs:
            raise self._no_corpus()
        sign = signs[0][0]
        root = min((name for found, name in signs if found == sign), key=len).removesuffix(sign)
        self.files = {name.removeprefix(root): data for name, data in files.items() if name.startswith(root)}
        self._by_name: dict[str, list[str]] = {}
        for name in self.files:
            self._by_name.setdefault(PurePosixPath(name).name, []).append(name)

    def error(self, message: str, kind: Kind = "bad corpus") -> DataError:
        return DataError(kind, self.source, message)

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
        return [self._item(self._audio(path), path.name, texts.get(path.name, "")) for path in paths]

    def _audio(self, path: PurePosixPath) -> str:
        self._check_name(path.name)
        for suffix in AUDIO_SUFFIXES:
            if f"wav/{path}{suffix}" in self.files:
                return f"wav/{path}{suffix}"
        suffixes = ", ".join(AUDIO_SUFFIXES)
        raise self.error(f"lists wav/{path} but has no such file ({suffixes}); is it complete?", "missing")

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
            items.append(self._item(wav, name, self.files[txt].decode("utf-8", "replace").strip()))
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

    def _item(self, audio: str, name: str, text: str) -> _Item:
        if len(text) > MOST_CHARACTERS:
            count = f"{len(text)} characters, more than {MOST_CHARACTERS}"
            raise self.error(f"the transcription of {name} has {count}", "bad text")
        try:
            encode(text)
        except LabelError as error:
            raise self.error(f"the transcription of {name}: {error}", "bad text") from None
        if not text:
            raise self.error(f"there is no transcription of {name}", "bad text")
        return _Item(name, text, self.files[audio], f"{self.source}/{audio}")


def _wanted(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.endswith((*AUDIO_SUFFIXES, ".txt", *LIST_NAMES, *MANIFESTS)) or _is_notice(name)


def _is_notice(name: str) -> bool:
    return name.upper().startswith(NOTICES)


def _write(folder: Path, part: str, item: _Item, order: ByteOrder | None) -> float:
    """Write an utterance, and return its seconds."""
    pcm = decode_pcm(item.data, item.path, order)
    add_utterance(folder, part, item.name, pcm, item.text)
    return len(pcm) / RATE_HZ
