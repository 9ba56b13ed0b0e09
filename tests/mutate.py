"""Do the tests notice? Break the code in one place at a time, in a copy, and see whether a test fails.

    python -m tests.mutate --seed 1 --count 60 --results quick.jsonl
    python -m tests.mutate --root ../older --repeat quick.jsonl --marked ""

The first line breaks this checkout and runs the quick suite. The second line makes the same changes to another checkout
and runs all of its tests. It skips a change that a test killed which stands unchanged in both. The files that test the
broken package come first, files that never call it are left out, and pytest stops at the first failure.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = ("algorithms/*.py", "codec/*.py", "ddp/*.py", "steps/*.py", "feedback.py", "partition.py", "selection.py")
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*"}
QUICK = "not slow and not long"
CORE = ("tests/test_*.py", "tests/algorithms", "tests/codec", "tests/comm", "tests/laws")
ORDER = {
    "algorithms": ("tests/algorithms", "tests/test_golden.py", "tests/test_laws.py", "tests/test_traps.py", *CORE),
    "codec": ("tests/codec", "tests/test_golden.py", *CORE),
    "ddp": ("tests/ddp", "tests/test_golden.py"),
    "steps": ("tests/steps", "tests/test_golden.py", "tests/test_laws.py", "tests/ddp"),
    "": ("tests/test_{name}.py", "tests/test_golden.py", *CORE),
}
"""Test files by the package of the broken file, the likeliest to notice first."""

THEN = ("tests/ddp", "tests/cuda", *CORE, "tests/telemetry", "tests/train/test_*.py")
UNRELATED = re.compile("bench|netlab|doctor|docstrings|examples|mutate")


@dataclass(frozen=True)
class Mutant:
    """One change: in `path` (below src/oktopk), on `line`, the text from `start` to `end` becomes `text`."""

    path: str
    line: int
    start: int
    end: int
    text: str
    was: str
    whole_line: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.was!r} -> {self.text!r} in {self.whole_line.strip()!r}"

    @property
    def place(self) -> tuple[str, ...]:
        """The line's text and the change in it: the same in two checkouts, wherever the line has gone."""
        return self.whole_line.strip(), self.was, self.text

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
        return Mutant(path, node.lineno, start, end, text, data[start:end].decode(), lines[node.lineno - 1].decode())

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
            changed = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
            yield mutant(node, *place(node), repr(changed))
        elif isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
        ):
            yield mutant(node, *place(node), "pass")


def all_mutants(root: Path) -> list[Mutant]:
    """Return every change of every target of a checkout."""
    package = root / "src" / "oktopk"
    files = sorted(path for target in TARGETS for path in package.glob(target))
    return [m for file in files for m in mutants_of(str(file.relative_to(package)), file.read_text())]


def same_in(root: Path, wanted: Mutant) -> Mutant | None:
    """Return the same change of the same line in another checkout; None where the line is not there."""
    found = [mutant for mutant in all_mutants(root) if mutant.place == wanted.place]
    return next((mutant for mutant in found if mutant.path == wanted.path), found[0] if found else None)


def test_files(root: Path, path: str) -> list[str]:
    """Return the files to test, in order, for a change of `path`."""
    package = path.split("/")[0] if "/" in path else ""
    found: dict[str, None] = {}
    for pattern in (*ORDER[package], *THEN):
        for place in sorted(root.glob(pattern.format(name=Path(path).stem))):
            for file in sorted(place.rglob("test_*.py")) if place.is_dir() else [place]:
                name = str(file.relative_to(root))
                if not UNRELATED.search(name):
                    found[name] = None
    return list(found)


def outcome(root: Path, mutant: Mutant, marked: str, limit_s: float) -> str:
    """Return the first test that fails in a copy of the checkout with this change; "survived" if none does."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "copy"
        leave = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "runs")
        shutil.copytree(root, copy, ignore=leave)
        mutant.apply(copy)
        env = {**os.environ, "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}", "OMP_NUM_THREADS": "1"}
        select = ["-m", marked] if marked else []
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-q", *select]
        with (Path(folder) / "output").open("w+") as output:
            tests = subprocess.Popen(
                [*command, *test_files(copy, mutant.path)],
                cwd=copy,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = tests.wait(limit_s)
            except subprocess.TimeoutExpired:
                return f"not done in {limit_s:g} s"
            finally:
                if tests.poll() is None:
                    os.killpg(tests.pid, signal.SIGKILL)
                    tests.wait()
            output.seek(0)
            failed = [line for line in output if line.startswith(("FAILED", "ERROR"))]
    return "survived" if status == 0 else failed[0].split(" - ")[0].strip() if failed else f"exit {status}"


def stands_unchanged(test: str, here: Path, there: Path) -> bool:
    """Whether the function of a test that failed has the same text in both checkouts."""
    found = re.match(r"(?:FAILED|ERROR) ([^:]+)::(\w+)", test)
    if found is None:
        return False
    ours, theirs = (_text_of(root / found[1], found[2]) for root in (here, there))
    return ours is not None and ours == theirs


def _text_of(file: Path, function: str) -> str | None:
    source = file.read_text() if file.exists() else ""
    named = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == function)
    return next((ast.get_source_segment(source, node) for node in named), None)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the fate of each mutant, and the share that was killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds for the tests of one mutant")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to break and to test")
    parser.add_argument("--marked", default=QUICK, help="pytest's -m")
    parser.add_argument("--results", type=Path, help="append each fate to this file")
    parser.add_argument("--repeat", type=Path, help="break what the results of another checkout name")
    args = parser.parse_args(argv)
    if args.repeat:
        fates = [json.loads(line) for line in args.repeat.read_text().splitlines()]
    else:
        sample = random.Random(args.seed).sample(all_mutants(args.root), args.count)
        fates = [{"mutant": asdict(mutant), "fate": ""} for mutant in sample]

    def test(earlier: dict[str, object]) -> str:
        mutant = Mutant(**earlier["mutant"])  # type: ignore[arg-type]
        found = same_in(args.root, mutant) if args.repeat else mutant
        if found is None:
            fate = "not there"
        elif args.repeat and stands_unchanged(str(earlier["fate"]), ROOT, args.root):
            fate = str(earlier["fate"])
        else:
            fate = outcome(args.root, found, args.marked, args.limit_s)
        print(f"{mutant}: {fate}", flush=True)
        if args.results:
            with args.results.open("a") as file:
                file.write(json.dumps({"mutant": asdict(mutant), "fate": fate}) + "\n")
        return fate

    became = [fate for fate in map(test, fates) if fate != "not there"]
    print(f"{len(became) - became.count('survived')} of {len(became)} killed")


if __name__ == "__main__":
    main()
