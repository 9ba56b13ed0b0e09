"""Do the tests notice? Break the code in one place at a time, in a copy, and see whether a test fails.

    python -m tests.mutate --seed 1 --count 60 --results quick.jsonl
    python -m tests.mutate --root ../older --repeat quick.jsonl --marked ""

The first line breaks this checkout and runs the quick suite. The second line makes the same changes to another checkout
and runs all of its tests. The files that test the broken package come first, files that never call it are left out, and
pytest stops at the first failure.
"""

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
OTHERS = ("test_*.py", "algorithms", "codec", "comm", "steps", "ddp", "cuda", "telemetry", "train/test_*.py")
UNRELATED = re.compile("bench|netlab|doctor|docstrings|examples|mutate")


@dataclass(frozen=True)
class Mutant:
    """One change: in `path` (below src/oktopk), on `line`, the text `was` from `start` to `end` becomes `text`."""

    path: str
    line: int
    start: int
    end: int
    text: str
    was: str
    whole_line: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.was!r} -> {self.text!r} in {self.whole_line!r}"

    def found_in(self, root: Path) -> "Mutant | None":
        """Return the same change of the same line in another checkout; None where the line is not there."""
        mine = (self.whole_line.strip(), self.was, self.text)
        found = [each for each in all_mutants(root) if (each.whole_line, each.was, each.text) == mine]
        return next((each for each in found if each.path == self.path), found[0] if found else None)


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield every change of one file: comparisons and signs turned, constants changed, statements left out."""
    lines = source.splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def mutant(node: ast.expr | ast.stmt, start: int, end: int, text: str) -> Mutant:
        line = lines[node.lineno - 1].decode().strip()
        return Mutant(path, node.lineno, start, end, text, source[start:end].decode(), line)

    def turned(node: ast.expr, left: ast.expr, right: ast.expr, sign: str) -> Iterator[Mutant]:
        start, end = place(left)[1], place(right)[0]
        if not set(b"()") & set(source[start:end]):
            yield mutant(node, start, end, f" {sign} ")

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            yield from turned(node, node.left, node.comparators[0], COMPARISONS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield from turned(node, node.left, node.right, OPERATORS[type(node.op)])
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
    return [m for file in files for m in mutants_of(str(file.relative_to(package)), file.read_bytes())]


def test_files(root: Path, path: str) -> list[str]:
    """Return the files to test for a change of `path`: those of its package, then the bits, then the others."""
    first = path.split("/")[0] if "/" in path else f"test_{path}"
    places = [p for each in (first, "test_golden.py", *OTHERS) for p in sorted((root / "tests").glob(each))]
    files = [file for p in places for file in (sorted(p.rglob("test_*.py")) if p.is_dir() else [p])]
    return [name for name in dict.fromkeys(str(f.relative_to(root)) for f in files) if not UNRELATED.search(name)]


def outcome(root: Path, mutant: Mutant, marked: str, limit_s: float) -> str:
    """Return the first test that fails in a copy of the checkout with this change; "survived" if none does."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy, log = Path(folder) / "copy", Path(folder) / "log"
        leave = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "runs")
        shutil.copytree(root, copy, ignore=leave)
        file = copy / "src" / "oktopk" / mutant.path
        source = file.read_bytes()
        file.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
        env = {**os.environ, "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-q", "-m", marked]
        command += test_files(copy, mutant.path)
        with log.open("w") as output:
            tests = subprocess.Popen(command, cwd=copy, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            status = tests.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"not done in {limit_s:g} s"
        finally:
            if tests.poll() is None:
                os.killpg(tests.pid, signal.SIGKILL)
                tests.wait()
        failed = [line for line in log.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "survived" if status == 0 else failed[0].split(" - ")[0] if failed else f"exit {status}"


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
    mutants: list[Mutant | None] = list(random.Random(args.seed).sample(all_mutants(args.root), args.count))
    if args.repeat:
        lines = args.repeat.read_text().splitlines()
        mutants = [Mutant(**json.loads(line)["mutant"]).found_in(args.root) for line in lines]
    fates = []
    for mutant in filter(None, mutants):
        fates.append(outcome(args.root, mutant, args.marked, args.limit_s))
        print(f"{mutant}: {fates[-1]}", flush=True)
        if args.results:
            with args.results.open("a") as file:
                file.write(json.dumps({"mutant": asdict(mutant), "fate": fates[-1]}) + "\n")
    print(f"{len(fates) - fates.count('survived')} of {len(fates)} killed")


if __name__ == "__main__":
    main()
