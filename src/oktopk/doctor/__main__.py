"""`python -m oktopk.doctor`: the same report where neither typer nor rich is installed, as plain lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from oktopk.doctor import examine
from oktopk.doctor.text import is_well, line_of, object_of, verdict_of


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report; the exit status is 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="oktopk doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else")
    as_object = parser.parse_args(argv).json
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_object:
            print(line_of(finding), flush=True)
    print(json.dumps(object_of(findings), allow_nan=False, indent=1) if as_object else verdict_of(findings))
    sys.exit(0 if is_well(findings) else 1)


if __name__ == "__main__":
    main()
