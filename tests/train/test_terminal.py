"""`oktopk train` on a pseudo-terminal of 60, 80 and 100 columns, as a user sees it."""

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
import time

import pytest

from tests.integrations.examples import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
SMALL = "--batch-size 2 --max-epochs 2 --dense-steps 3 --set threads=1 --set device=cpu --name run"


def typed(words, width, folder, *, interrupted_at=None):
    """Run a command on a terminal; return all that it wrote and its exit status. Ctrl-C is typed after a pattern."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))  # before anything is drawn
        environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT / "src")}
        for name in ("COLUMNS", "LINES"):  # which rich believes before it asks the terminal
            environment.pop(name, None)
        os.execve(sys.executable, [sys.executable, "-m", "oktopk", *map(str, words)], environment)
    said, deadline = b"", time.monotonic() + 100
    try:
        while time.monotonic() < deadline:
            try:
                said += os.read(terminal, 1 << 16)
            except OSError:  # the other end is closed
                break
            if interrupted_at and re.search(interrupted_at, said):
                os.write(terminal, b"\x03")
                interrupted_at = None
        else:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(terminal)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said.decode(), status


def lines_of(said):
    """Return the lines as they were drawn, those that were drawn over too, without colours."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said))


@pytest.mark.parametrize("width", [60, *(pytest.param(width, marks=pytest.mark.long) for width in (80, 100))])
def test_bar_count_and_time_left_stay_and_text_goes_first(width, speech, tmp_path):
    said, status = typed(
        ["train", *SMALL.split(), "--nproc", 1, "--max-steps", 16, "--data-dir", speech], width, tmp_path
    )
    assert status == 0, said
    lines = lines_of(said)
    bars = [line for line in lines if re.search("[━╸╺]{8}.* ([1-9]|1[0-6])/16 ", line)]
    assert len(bars) > 2
    shown = r"/16 (\d:\d\d:\d\d|-:--:--) epoch \d/2"
    odd = [line for line in bars if len(line) > width or not re.search(shown, line)]
    assert len(odd) <= 1, odd  # the worker may write a line of its own into one
    assert all(len(line) <= width for line in lines if set(line) & set("│┌└"))
    assert any("next: oktopk report runs/run" in line for line in lines)


def test_ctrl_c_before_a_checkpoint_advises_no_resume_and_the_report_names_it(speech, tmp_path):
    words = ["train", *SMALL.replace("size 2", "size 1").split(), "--nproc", 2, "--data-dir", speech]
    said, status = typed(words, 80, tmp_path, interrupted_at=rb" [1-9]/32")  # the bar need not show each step
    assert status == 130, said
    lines = [line for line in lines_of(said) if line]
    assert "no checkpoint to go on from" in lines[-1]
    assert "--resume" not in said
    assert not any("elastic" in line for line in lines)
    shown, status = typed(["report", "runs/run", "--text"], 80, tmp_path)
    assert status == 0
    assert "was stopped by Ctrl-C" in shown or "KeyboardInterrupt" in shown  # the latter amid an exchange
