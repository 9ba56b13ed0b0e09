"""`oktopk doctor`, with the standard library alone: it helps most where a package is missing."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch

from oktopk.doctor import here, selftest, speed
from oktopk.doctor.report import FAIL, Finding, print_report

HELP = """Show versions, devices and kernels here, whether the kernels compute right, and how fast.

  oktopk doctor           the report, in seconds; exit status 1 if something is wrong
  oktopk doctor --json    the same for a program, or for a bug report

ok is as it should be. note works, and could be better: the line says how.
FAIL is wrong: do not train with it.

The self-test compares the kernels in use with a slow and simple reference,
bit by bit, on new random numbers, and lets two ranks exchange gradients:
nothing may be lost. The speed is that of the pass over a gradient of 27.6 M
elements, beside a copy: more than half of it is good. Kernels are compiled
the first time."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report; the exit status is 1 if a check failed."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="oktopk doctor", description=HELP, formatter_class=plain)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else")
    as_object = parser.parse_args(argv).json
    sys.exit(0 if print_report(list(examine()), as_object) else 1)


def examine() -> Iterator[Finding]:
    """Yield all findings, one by one; a check that raises gives a finding, too."""
    yield from here.versions()
    yield from here.devices()
    yield from here.backends()
    for device in (torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))):
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where triton's kernels run
            yield from here.kernels(device)
            yield from _checked("self-test", selftest.kernels, device)
            yield from _checked("self-test", selftest.exchange, device)
            yield from _checked("speed", speed.selection, device)


def _checked(about: str, check: Callable[[torch.device], Iterator[Finding]], device: torch.device) -> Iterator[Finding]:
    """Turn an exception of a check into a finding, so that the other checks still run."""
    try:
        yield from check(device)
    except Exception as error:
        yield Finding(about, "could not be done", f"{type(error).__name__}: {error}".splitlines()[0], FAIL)


if __name__ == "__main__":
    main()
