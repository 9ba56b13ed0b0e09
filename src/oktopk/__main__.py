"""`python -m oktopk`, and the command `oktopk`."""

import sys


def main() -> None:
    """Run the command line, if what it needs is installed."""
    try:
        from oktopk.train.cli import main as run
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] in ("oktopk", "torch", "numpy"):
            raise
        if sys.argv[1:2] == ["doctor"]:  # which is wanted where something is missing
            from oktopk.doctor.__main__ import main as examine

            examine(sys.argv[2:])
        sys.exit(f"oktopk: the command line needs {error.name}: pip install 'oktopk[train]'")
    run()


if __name__ == "__main__":
    main()
