from __future__ import annotations

from pathlib import Path
from tarfile import SYMTYPE, TarInfo

import pytest
from typer.testing import CliRunner, Result

from oktopk.train.data import synth
from oktopk.train.data.cli import app
from oktopk.train.data.folder import TRAIN_MANIFEST, VAL_MANIFEST
from tests.train.data.corpus import FAULTS, files, manifest_of, pack, spoilt


def call(*arguments: object) -> Result:
    """Run a command with room for long lines, as in a pipe."""
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "400", "NO_COLOR": "1"})


def refused(*arguments: object) -> str:
    """Run a command that fails, and return its one line."""
    done = call(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line


def test_an4_says_what_it_found_warns_of_what_is_missing_and_needs_force_to_replace(tmp_path: Path) -> None:
    arguments = ("an4", pack(files("big"), tmp_path / "a.tgz"), "--out", tmp_path / "out")
    done = call(*arguments)
    assert done.exit_code == 0
    assert "train    3 utterances, 0.1 minutes, 2 speakers" in done.stdout
    assert "raw, big endian" in done.stdout
    assert "WARNING train: 3 utterances, the complete corpus has 948" in done.stderr
    assert call("check", tmp_path / "out" / TRAIN_MANIFEST).exit_code == 0
    assert call("check", tmp_path / "out" / VAL_MANIFEST).exit_code == 0
    assert "--force" in refused(*arguments)
    assert call(*arguments, "--force").exit_code == 0


def test_check_names_each_bad_file_and_sums_up_good_ones(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, [0.5, 1.25])
    done = call("check", manifest)
    assert (done.exit_code, done.stdout) == (0, "2 utterances, 0.0 minutes, 0.50 to 1.25 s, no problems\n")
    named = {fault: spoilt(tmp_path, fault) for fault in FAULTS}
    for fault, path in named.items():
        (tmp_path / "one.csv").write_text(f"{path.stem}.wav,{path.stem}.txt\n")
        done = call("check", tmp_path / "one.csv")
        assert done.exit_code == 1
        (line,) = [line for line in done.stdout.splitlines() if str(path) in line]
        assert fault in line
        assert done.stderr == f"1 problem in {tmp_path / 'one.csv'}\n"


def test_synth_makes_and_then_keeps(tmp_path: Path) -> None:
    arguments = ("synth-an4", "--out", tmp_path / "s", "--utterances", 2, "--grammar", "commands")
    first, second = call(*arguments), call(*arguments)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.stdout.startswith(f"2 + 16 utterances in {tmp_path / 's'}, made\n")
    assert "nothing to do" in second.stdout
    assert call("check", tmp_path / "s" / TRAIN_MANIFEST).exit_code == 0


def test_an_error_is_one_line_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth, "ENGINE", "no_such_package")
    (tmp_path / "file").touch()
    trap = TarInfo("an4/" + 300 * "a")
    trap.type, trap.linkname = SYMTYPE, "/etc/passwd"
    good, bad = pack(files("big"), tmp_path / "a.tgz"), pack(files("big"), tmp_path / "trap.tgz", trap)
    assert 'pip install "oktopk[synth]"' in refused("synth-an4", "--out", tmp_path / "s")
    assert "nowhere.tar.gz" in refused("an4", tmp_path / "nowhere.tar.gz", "--out", tmp_path / "s")
    assert "file" in refused("an4", good, "--out", tmp_path / "file")
    assert "... (304 characters) that is a link" in refused("an4", bad, "--out", tmp_path / "s")


def test_a_bad_nist_header_is_one_line_that_names_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A size below 0 was a traceback from within a callback, and then an unspecified internal error."""
    made = files("sphere")
    name = next(name for name in made if name.endswith(".sph"))
    for size in (b"  -1024", b"      0", b"   abcd", b"9999999"):
        bad = made | {name: made[name].replace(b"   1024", size, 1)}
        said = refused("an4", pack(bad, tmp_path / "a.tgz"), "--out", tmp_path / "out")
        assert f"{name.removeprefix('an4/')}: has a bad NIST header: its size is said to be" in said
        assert capfd.readouterr().err == ""
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "example"), [("an4", "an4_raw"), ("check", "1 something"), ("synth-an4", "[synth]")]
)
def test_help_teaches(command: str, example: str) -> None:
    done = call(command, "--help")
    assert done.exit_code == 0
    assert example in done.stdout
    assert f"oktopk data {command}" in done.stdout
