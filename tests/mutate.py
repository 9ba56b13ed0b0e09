"""Do the tests notice? Break the code in one place at a time, in a copy, and see whether a test fails.

    python -m tests.mutate --seed 1 --count 20 -- -m "not slow and not long" -x -q tests/test_laws.py

What follows `--` goes to pytest; the checkout itself is never changed.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = (
    "algorithms/*.py",
    "codec/*.py",
    *(f"{name}.py" for name in ("feedback", "partition", "selection")),
    *(f"{name}.py" for name in ("ddp/attach", "ddp/engine", "ddp/group")),
)
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*"}
QUICK = ["-m", "not slow and not long", "-x", "-q", "-n", "2", "--dist", "loadfile"]


@dataclass(frozen=True)
class Mutant:
    """One change: in `path` (below src/oktopk), on `line`, the text from `start` to `end` becomes `text`."""

    path: str
    line: int
    start: int
    end: int
    text: str
    was: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.was!r} -> {self.text!r}"

    def apply(self, root: Path) -> None:
        file = root / "src" / "oktopk" / self.path
        source = file.read_bytes()
        file.write_bytes(source[: self.start] + self.text.encode() + source[self.end :])


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield every change of one file: comparisons and signs turned, constants changed, statements left out."""
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]
    data = source.encode()

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def mutant(node: ast.expr | ast.stmt, start: int, end: int, text: str) -> Mutant:
        return Mutant(path, node.lineno, start, end, text, data[start:end].decode())

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            start, end = place(node.left)[1], place(node.comparators[0])[0]
            if b"(" not in data[start:end] and b")" not in data[start:end]:
                yield mutant(node, start, end, f" {COMPARISONS[type(node.ops[0])]} ")
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            start, end = place(node.left)[1], place(node.right)[0]
            if b"(" not in data[start:end] and b")" not in data[start:end]:
                yield mutant(node, start, end, f" {OPERATORS[type(node.op)]} ")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool, float):
            changed = not node.value if isinstance(node.value, bool) else node.value + 1
            yield mutant(node, *place(node), repr(changed))
        elif isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
        ):
            yield mutant(node, *place(node), "pass")


def outcome(mutant: Mutant | None, pytest: Sequence[str], limit_s: float) -> str:
    """Return what the tests say of a copy of the checkout with this change in it."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "copy"
        leave = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "runs")
        shutil.copytree(ROOT, copy, ignore=leave)
        if mutant is not None:
            mutant.apply(copy)
        env = {**os.environ, "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *pytest]
        with (Path(folder) / "output").open("w+") as output:
            tests = subprocess.Popen(
                command, cwd=copy, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = tests.wait(limit_s)
            except subprocess.TimeoutExpired:
                return f"killed: not done in {limit_s:g} s"
            finally:
                if tests.poll() is None:
                    os.killpg(tests.pid, signal.SIGKILL)
                    tests.wait()
            output.seek(0)
            failed = [line for line in output if line.startswith(("FAILED", "ERROR"))]
    return "survived" if status == 0 else f"killed: {failed[0].split(' - ')[0].strip() if failed else status}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print what became of each of so many mutants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds for the tests of one mutant")
    parser.add_argument("pytest", nargs="*", default=QUICK, help="what pytest is told, after --")
    args = parser.parse_args(argv)
    package = ROOT / "src" / "oktopk"
    files = sorted(path for target in TARGETS for path in package.glob(target))
    found = [m for file in files for m in mutants_of(str(file.relative_to(package)), file.read_text())]
    whole = outcome(None, args.pytest, args.limit_s)
    if whole != "survived":
        raise SystemExit(f"the tests have to pass on the code as it is: {whole}")
    survived = 0
    for mutant in random.Random(args.seed).sample(found, args.count):
        became = outcome(mutant, args.pytest, args.limit_s)
        survived += became == "survived"
        print(f"{mutant}: {became}", flush=True)
    print(f"{args.count - survived} of {args.count} killed")


if __name__ == "__main__":
    main()
