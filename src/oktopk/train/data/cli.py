"""`oktopk data`: make, import and check the speech that the trainer reads."""

from __future__ import annotations

from math import fsum
from pathlib import Path
from typing import Annotated

import typer

from oktopk.cli.errors import exit_on_error
from oktopk.train.data.an4 import import_an4
from oktopk.train.data.folder import TRAIN_MANIFEST
from oktopk.train.data.grammar import Grammar
from oktopk.train.data.manifest import check_manifest, read_manifest
from oktopk.train.data.synth import make_speech

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Make, import and check the speech that oktopk train reads.\n\n"
    "No corpus at hand? oktopk data synth-an4 --out DIR makes one, offline, in seconds.\n\n"
    "Each makes DIR/train, DIR/val and two manifests with relative paths: DIR can be moved and copied.",
)

Out = Annotated[Path, typer.Option("--out", help="The folder to make; the trainer takes it as --data-dir.")]


@app.command()
def an4(
    source: Annotated[
        Path,
        typer.Argument(
            help="CMU's archive (an4_raw.bigendian.tar.gz, an4_sphere.tar.gz, ...), its folder an4, or a folder of wav "
            "files with manifests."
        ),
    ],
    out: Out,
    force: Annotated[bool, typer.Option("--force", help="Replace a corpus that is in DIR already.")] = False,
) -> None:
    """Import CMU AN4: 948 utterances to train on, 130 to validate with.

    The content of the files tells raw audio of either byte order, NIST sphere and wav apart. The archive is not
    unpacked; if anything is wrong with it, nothing is written. In a folder of wav files with manifests of wrong paths,
    each file is found by the end of its path.

    Example: oktopk data an4 an4_raw.bigendian.tar.gz --out data/an4
    """
    with exit_on_error():
        imported = import_an4(source, out, force=force)
    for warning in imported.warnings:
        typer.secho("WARNING", fg="yellow", bold=True, err=True, nl=False)
        typer.echo(f" {warning}", err=True)
    for name, part in (("train", imported.train), ("val", imported.val)):
        typer.echo(f"{name:<5} {part.utterances:>4} utterances, {part.minutes:.1f} minutes, {part.speakers} speakers")
    typer.echo(f"{imported.audio} audio, now 16 kHz wav in {out}\nnext: oktopk train --dataset an4 --data-dir {out}")


@app.command()
def check(
    manifest: Annotated[Path, typer.Argument(help=f"A manifest, such as DIR/{TRAIN_MANIFEST}.")],
) -> None:
    """Read every file that a manifest names, and name each one with a fault.

    Faults are files that are missing, empty, unreadable, not at 16 kHz or not mono, texts with characters outside A to
    Z, apostrophe and space, and recordings too short for their text. Exit status: 0 all is well, 1 something is not.

    Example: oktopk data check data/an4/an4_train_manifest.csv
    """
    with exit_on_error():
        problems = check_manifest(manifest)
        durations_s = [] if problems else [utterance.duration_s for utterance in read_manifest(manifest)]
    if problems:
        typer.echo(f"{'line':>5}  {'problem':<12}  file")
        for problem in problems:  # one line each, however long, for grep and cut
            typer.echo(f"{problem.line or '-':>5}  {problem.kind:<12}  {problem.path}: {problem.message}")
        typer.echo(f"{len(problems)} problem{'s' * (len(problems) > 1)} in {manifest}", err=True)
        raise typer.Exit(1)
    minutes, shortest, longest = fsum(durations_s) / 60, durations_s[0], durations_s[-1]
    typer.echo(f"{len(durations_s)} utterances, {minutes:.1f} minutes, {shortest:.2f} to {longest:.2f} s, no problems")


@app.command("synth-an4")
def synth_an4(
    out: Out,
    utterances: Annotated[
        int, typer.Option(min=1, help="Utterances to train on. An eighth as many, at least 16, validate.")
    ] = 948,
    grammar: Annotated[
        Grammar, typer.Option(help="an4: spelled names, numbers, dates, commands. commands: digits and commands only.")
    ] = "an4",
) -> None:
    """Make spoken alphanumeric utterances like those of AN4, offline, with eSpeak NG.

    Needs: pip install "oktopk[synth]". Speech of the same settings that is in DIR is kept.

    Example: oktopk data synth-an4 --out data/synth --grammar commands --utterances 256
    """
    with exit_on_error():
        made = make_speech(out, utterances, grammar=grammar)
    how = "there already, the same settings: nothing to do" if made.cached else "made"
    typer.echo(f"{made.utterances} + {made.val_utterances} utterances in {out}, {how}")
    typer.echo(f"next: oktopk train --dataset an4 --data-dir {out}")
