"""Do the tests notice? Break the code in one place at a time, in a copy, and see whether a test fails.

    python -m tests.mutate --seed 1 --count 60 --results quick.jsonl

A first run of the suite on the unbroken code tells which tests get to which place, and how long each takes. Each change
is then tried on those tests alone: first the tests of its package, the short before the long, up to the first that
fails. A test that now takes much longer than before fails, too.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.reach import CHOSEN, FOLDER, limit_s, make_folder

ROOT = Path(__file__).parents[1]
TARGETS = ("algorithms/*.py", "codec/*.py", "ddp/*.py", "steps/*.py", "feedback.py", "partition.py", "selection.py")
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*"}
QUICK = "not slow and not long"


@dataclass(frozen=True)
class Mutant:
    """One change: in `path` (below src/oktopk), on `line`, the text `was` from `start` to `end` becomes `text`.

    The statement or expression in which that lies goes from `first` to `last`.
    """

    path: str
    line: int
    start: int
    end: int
    text: str
    was: str
    whole_line: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.was!r} -> {self.text!r} in {self.whole_line!r}"

    def probe(self, place: int) -> tuple[str, str]:
        """Return the texts that make a call of `reached` when put around it; a statement has no bracket to close."""
        return (f"reached({place}); ", "") if self.text == "pass" else (f"(reached({place}) or (", "))")


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield every change of one file: comparisons and signs turned, constants changed, statements left out."""
    lines = source.splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def mutant(node: ast.expr | ast.stmt, start: int, end: int, text: str) -> Mutant:
        line = lines[node.lineno - 1].decode().strip()
        return Mutant(path, node.lineno, start, end, text, source[start:end].decode(), line, *place(node))

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


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of the checkout that nobody else has."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        leave = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "runs")
        yield Path(shutil.copytree(root, Path(folder) / "copy", ignore=leave))


def pytest_in(copy: Path, *options: str, limit_s: float | None = None, **variables: str) -> tuple[int | None, str]:
    """Run pytest in a copy; return its status, None if it did not end in time, and what it wrote."""
    env = {**os.environ, **variables, "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.reach", "-q", *options]
    with (copy / "log").open("w") as log:
        tests = subprocess.Popen(command, cwd=copy, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        status: int | None = tests.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        if tests.poll() is None:
            os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()
    return status, (copy / "log").read_text()


def put_probes(package: Path, mutants: Sequence[Mutant]) -> None:
    """Put a call of `reached` around each change's place."""
    for path in {mutant.path for mutant in mutants}:
        source = (package / path).read_bytes()
        texts = []
        for place, mutant in enumerate(mutants):
            if mutant.path == path:
                before, after = mutant.probe(place)
                texts += [
                    (mutant.first, 1, -mutant.last, place, before),
                    (mutant.last, 0, -mutant.first, -place, after),
                ]
        for at, *_, text in sorted(texts, reverse=True):
            source = source[:at] + text.encode() + source[at:]
        body = ast.parse(source).body
        futures = [node for node in body if getattr(node, "module", None) == "__future__"]
        lines = source.splitlines(keepends=True)
        lines.insert((futures or body)[0].end_lineno, b"from tests.reach import reached\n")  # or after the docstring
        (package / path).write_bytes(b"".join(lines))


def tests_of(root: Path, mutants: Sequence[Mutant], marked: str, workers: int) -> list[dict[str, float]]:
    """Return for each change the tests that get to it, and their seconds; all tests, where an import gets there."""
    with copied(root) as copy:
        put_probes(copy / "src" / "oktopk", mutants)
        folder = copy / "reach"
        make_folder(folder)
        _, log = pytest_in(copy, "-m", marked, "-n", str(workers), "--dist", "worksteal", **{FOLDER: str(folder)})
        print(log.strip().splitlines()[-1], flush=True)
        seconds, reaching = {}, [set() for _ in mutants]
        for worker in folder.rglob("tests"):
            lines = [json.loads(line) for line in worker.read_text().splitlines()]
            names = {number: name for number, name, _, failed in lines if not failed}
            seconds |= {name: taken for number, name, taken, _ in lines if number in names}
            for line in set((worker.parent / "reached").read_text().splitlines()):
                number, place = map(int, line.split())
                if number in names or number == 0:
                    reaching[place].add(names.get(number, ""))
    return [{name: seconds[name] for name in (seconds if "" in names else names)} for names in reaching]


def in_order(path: str, tests: dict[str, float]) -> list[tuple[str, float]]:
    """Return the tests, those of a change's own package first, and the short before the long."""
    package = f"tests/{path.split('/')[0]}/" if "/" in path else f"tests/test_{path}"
    return sorted(tests.items(), key=lambda test: (not test[0].startswith(package), test[1]))


def outcome(root: Path, mutant: Mutant, tests: dict[str, float]) -> str:
    """Return the first test that fails in a copy of the checkout with this change; "survived" if none does."""
    if not tests:
        return "survived: no test gets there"
    with copied(root) as copy:
        file, chosen = copy / "src" / "oktopk" / mutant.path, copy / "chosen.json"
        source = file.read_bytes()
        file.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
        chosen.write_text(json.dumps(in_order(mutant.path, tests)))
        files, limit = sorted({name.split("::")[0] for name in tests}), limit_s(sum(tests.values()))
        status, log = pytest_in(copy, "-x", *files, limit_s=limit, **{CHOSEN: str(chosen)})
    failed = [line for line in log.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if status is None:
        return f"not done in {limit:.0f} s"
    return f"survived {len(tests)} tests" if status == 0 else failed[0].split(" - ")[0] if failed else f"exit {status}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the fate of each mutant, and the share that was killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2, help="how many processes run tests")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to break and to test")
    parser.add_argument("--marked", default=QUICK, help="pytest's -m")
    parser.add_argument("--results", type=Path, help="append each fate to this file, and go on from it")
    args = parser.parse_args(argv)
    mutants = random.Random(args.seed).sample(all_mutants(args.root), args.count)
    done = args.results.read_text().splitlines() if args.results and args.results.exists() else []
    fates = {str(line["mutant"]): line["fate"] for line in map(json.loads, done)}
    left = [mutant for mutant in mutants if str(mutant) not in fates]
    with ThreadPoolExecutor(args.jobs) as pool:
        reaching = tests_of(args.root, left, args.marked, args.jobs) if left else []
        waiting = {pool.submit(outcome, args.root, *each): each[0] for each in zip(left, reaching, strict=True)}
        for future in as_completed(waiting):
            mutant = str(waiting[future])
            fates[mutant] = future.result()
            print(f"{mutant}: {fates[mutant]}", flush=True)
            if args.results:
                with args.results.open("a") as file:
                    file.write(json.dumps({"mutant": mutant, "fate": fates[mutant]}) + "\n")
    survived = [fates[str(mutant)].startswith("survived") for mutant in mutants]
    print(f"{len(mutants) - sum(survived)} of {len(mutants)} killed")


if __name__ == "__main__":
    main()
