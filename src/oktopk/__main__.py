"""`python -m oktopk`, and the command `oktopk`."""

import sys


def main() -> None:
    """Run the command line; without typer only `oktopk doctor` runs, as plain text."""
    try:
        from oktopk.cli.root import main as run

        run()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("oktopk", "torch", "numpy"):
            raise
        if sys.argv[1:2] == ["doctor"]:  # it helps most where a package is missing
            from oktopk.doctor.__main__ import main as examine

            examine(sys.argv[2:])
        sys.exit(f"oktopk: the command line needs {error.name}: pip install 'oktopk[train]'")


if __name__ == "__main__":
    main()
