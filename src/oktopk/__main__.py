"""`python -m oktopk`, and the command `oktopk`: version, help, typos and completion, with Python alone.

Nothing here imports torch, or a package that `pip install oktopk` does not bring. Only the command that is called is
imported.
"""

import os
import signal
import sys

import oktopk
from oktopk.cli import COMMANDS, WORDS
from oktopk.errors import hint

HELP = f"""Usage: oktopk COMMAND [OPTIONS]

Sparse allreduce for data-parallel training: train with it, and see what it sends.

{chr(10).join(f"  {name:8} {line}" for name, (_, line) in COMMANDS.items())}

  oktopk train             makes speech offline and learns it on two workers, in minutes
  oktopk COMMAND --help    shows the options of a command
  oktopk --version         prints the version
  oktopk --completion SH   prints the completion for bash, zsh or fish: eval "$(oktopk --completion bash)"
"""

COMPLETE = "_OKTOPK_COMPLETE"
BASH = f"""_oktopk() {{ COMPREPLY=($({COMPLETE}=1 oktopk "${{COMP_WORDS[@]:1:COMP_CWORD}}")); }}
complete -o default -F _oktopk oktopk"""
SHELLS = {
    "bash": BASH,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{BASH}",
    "fish": f"complete -c oktopk -a '({COMPLETE}=1 oktopk (commandline -opc)[2..] (commandline -ct))'",
}


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = sys.argv[1:] if argv is None else argv
    name, *rest = args or ["--help"]
    if COMPLETE in os.environ:
        print(*complete(args), sep="\n")
    elif name in ("-h", "--help"):
        print(HELP, end="")
    elif name == "--version":
        print(f"oktopk {oktopk.__version__}")
    elif name == "--completion":
        shell = rest[0] if rest else ""
        print(SHELLS.get(shell) or _refuse(f"--completion wants bash, zsh or fish, and got {shell!r}"))
    elif name in (*COMMANDS, "worker"):
        run(name, rest)
    else:
        _refuse(f"no such command: {name!r}.{hint(name, WORDS[''].split()) or ' Try oktopk --help'}")


def run(name: str, args: list[str]) -> None:
    """Run a command."""
    if name == "doctor":
        from oktopk.doctor.__main__ import main as examine

        return examine(args)
    if name == "worker":  # Ctrl-C amid the imports: the command that started it has the last word
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from oktopk.cli.root import load

        load(name)(args=args, prog_name=f"oktopk {name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("oktopk", "torch", "numpy"):
            raise
        extra = COMMANDS["train" if name == "worker" else name][0]
        _refuse(f"oktopk {name} needs {error.name}: pip install 'oktopk[{extra}]'")


def complete(args: list[str]) -> list[str]:
    """Return the words that may stand in the place of the last argument; none where a file or a value may."""
    *before, last = args or [""]
    name = next((name for words in (before[:2], before[:1]) if (name := " ".join(words)) in WORDS), None)
    if name is None:
        return []
    words = WORDS[name].split() + ["--help"] * bool(name)
    return [word for word in words if word.startswith(last) and (last or not name or not word.startswith("-"))]


def _refuse(message: str) -> str:
    sys.stderr.write(f"oktopk: {message}\n")
    raise SystemExit(2)


if __name__ == "__main__":
    main()
