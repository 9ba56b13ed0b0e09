"""Commands of `oktopk`, called in this process."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from unittest import mock

from oktopk.__main__ import main


def invoke(*words, columns=400):
    """Run a command with room for long lines, as in a pipe; return its exit code and what it printed."""
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    environ = mock.patch.dict(os.environ, {"COLUMNS": f"{columns}", "NO_COLOR": "1"})
    with environ, redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code or 0
    said, errors = stdout.getvalue(), stderr.getvalue()
    return SimpleNamespace(exit_code=code, stdout=said, stderr=errors, output=said + errors)


def call(command, words, *more, columns=400):
    return invoke(command, *words.split(), *more, columns=columns)


def refused(command, words, *more):
    """Return the line that says why: one, however narrow the terminal, since it is there to be copied."""
    result = call(command, words, *more, columns=40)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error ")
    return line
