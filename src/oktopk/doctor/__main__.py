"""`python -m oktopk.doctor`: the same report where neither typer nor rich is installed, as plain lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from oktopk.doctor import examine
from oktopk.doctor.report import is_well, print_report


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report; the exit status is 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="oktopk doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else")
    as_object = parser.parse_args(argv).json
    findings = list(examine())
    print_report(findings, as_object)
    sys.exit(0 if is_well(findings) else 1)


if __name__ == "__main__":
    main()
