from functools import partial
from tarfile import SYMTYPE, TarInfo

from oktopk.train.data import cli, synth
from oktopk.train.data.manifest import MANIFESTS
from tests import commands
from tests.train.data.corpus import files, manifest_of, pack, spoilt

call, refused = partial(commands.call, "data"), partial(commands.refused, "data")


def test_an4_says_what_it_found_warns_of_what_is_missing_and_needs_force_to_replace(tmp_path):
    arguments = ("an4", pack(files("big"), tmp_path / "a.tgz"), "--out", tmp_path / "out")
    done = call(*arguments)
    assert done.exit_code == 0
    assert "train    3 utterances, 0.1 minutes\n" in done.stdout
    assert "raw, big endian" in done.stdout
    assert "WARNING train: 3 utterances, the complete corpus has 948" in done.stderr
    assert [call("check", tmp_path / "out" / name).exit_code for name in MANIFESTS] == [0, 0]
    assert "--force" in refused(*arguments)
    assert call(*arguments, "--force").exit_code == 0


def test_check_names_each_bad_file_and_sums_up_good_ones(tmp_path):
    done = call("check", manifest_of(tmp_path, [0.5, 1.25]))
    assert (done.exit_code, done.stdout) == (0, "2 utterances, 0.0 minutes, 0.50 to 1.25 s, no problems\n")
    path = spoilt(tmp_path, "stereo")
    (tmp_path / "m.csv").write_text("u0.wav,u0.txt\nstereo.wav,stereo.txt\n")
    done = call("check", tmp_path / "m.csv")
    assert (done.exit_code, done.stderr) == (1, f"1 problem in {tmp_path / 'm.csv'}\n")
    assert done.stdout.splitlines()[1].startswith(f"    2  stereo        {path}: wanted one channel")


def test_synth_makes_and_then_keeps(tmp_path, monkeypatch):
    arguments = ("synth-an4", "--out", tmp_path / "s", "--grammar", "commands", "--utterances")
    first, second = call(*arguments, 2), call(*arguments, 2)
    assert first.stdout.startswith(f"2 + 16 utterances in {tmp_path / 's'}, made\n")
    assert "nothing to do" in second.stdout
    monkeypatch.setattr(cli, "make_speech", lambda *_: True)
    assert "256 + 32 utterances" in call(*arguments, 256).stdout


def test_text_is_gathered_and_needs_force_to_replace(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("x" * 100)
    arguments = ("text", *(tmp_path / f"{i}.txt" for i in range(3)), "--out", tmp_path / "out")
    done = call(*arguments)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"200 bytes to train on, 100 to validate with, of 3 files, in {tmp_path / 'out'}\n")
    assert f"oktopk train --recipe gpt-tiny --data-dir {tmp_path / 'out'}" in done.stdout
    assert "--force" in refused(*arguments)
    assert call(*arguments, "--force").exit_code == 0
    assert "nowhere" in refused("text", tmp_path / "nowhere", "--out", tmp_path / "other")
    assert "0.txt" in refused(*arguments[:-1], tmp_path / "0.txt")


def test_an_error_is_one_line_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(synth, "ENGINE", "no_such_package")
    (tmp_path / "file").touch()
    trap = TarInfo("an4/" + 300 * "a")
    trap.type, trap.linkname = SYMTYPE, "/etc/passwd"
    good, bad = pack(files("big"), tmp_path / "a.tgz"), pack(files("big"), tmp_path / "trap.tgz", trap)
    assert 'pip install "oktopk[synth]"' in refused("synth-an4", "--out", tmp_path / "s")
    assert "nowhere.tar.gz" in refused("an4", tmp_path / "nowhere.tar.gz", "--out", tmp_path / "s")
    assert "file" in refused("an4", good, "--out", tmp_path / "file")
    assert "... (304 characters) that is a link" in refused("an4", bad, "--out", tmp_path / "s")
