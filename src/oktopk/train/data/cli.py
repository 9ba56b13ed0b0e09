"""`oktopk data`: make, import and check the speech and the text that the trainer reads."""

from math import fsum
from pathlib import Path
from typing import Annotated

import typer

from oktopk.cli.errors import exit_on_error
from oktopk.train.data.an4 import COMPLETE, import_an4
from oktopk.train.data.grammar import Grammar
from oktopk.train.data.manifest import TRAIN_MANIFEST, check_manifest, read_manifest
from oktopk.train.data.synth import make_speech
from oktopk.train.data.text import files_of, make_text, standard_library

ABOUT = """Make, import and check the speech and the text that oktopk train reads.

No corpus at hand? oktopk data synth-an4 --out DIR makes one, offline, in seconds.

Speech is DIR/train, DIR/val and two manifests with relative paths, text is two files: DIR can be moved and copied."""

Out = Annotated[Path, typer.Option("--out", help="The folder to make; the trainer takes it as --data-dir.")]


def an4(
    source: Annotated[Path, typer.Argument(help="CMU's archive, its folder, or a folder of wav files with manifests.")],
    out: Out,
    force: Annotated[bool, typer.Option("--force", help="Replace a corpus that is in DIR already.")] = False,
) -> None:
    """Import CMU's AN4: 948 utterances to train on, 130 to validate.

    The content of the files tells raw audio of either byte order, NIST sphere and wav apart. The archive is not
    unpacked; if anything is wrong with it, nothing is written. In a folder of wav files with manifests of wrong paths,
    each file is found by the end of its path.

    oktopk data an4 an4_raw.bigendian.tar.gz --out data/an4
    """
    with exit_on_error():
        parts, audio = import_an4(source, out, force=force)
    for part, seconds in parts.items():
        if len(seconds) != COMPLETE[part]:
            found = f"{part}: {len(seconds)} utterances, the complete corpus has {COMPLETE[part]}"
            typer.secho("WARNING", fg="yellow", bold=True, err=True, nl=False)
            typer.echo(f" {found}; results will not compare", err=True)
        typer.echo(f"{part:<5} {len(seconds):>4} utterances, {fsum(seconds) / 60:.1f} minutes")
    typer.echo(f"{audio} audio, now 16 kHz wav in {out}\nnext: oktopk train --dataset an4 --data-dir {out}")


def check(manifest: Annotated[Path, typer.Argument(help=f"A manifest, such as DIR/{TRAIN_MANIFEST}.")]) -> None:
    """Name each file of a manifest that has a fault.

    Every file is read to its end. Faults are files that are missing, empty, unreadable, not at 16 kHz or not mono,
    texts with characters outside A to Z, apostrophe and space, and recordings too short for their text. Exit status: 0
    without a fault, 1 with one.

    oktopk data check data/an4/an4_train_manifest.csv
    """
    with exit_on_error():
        problems = check_manifest(manifest)
        durations_s = [] if problems else [utterance.duration_s for utterance in read_manifest(manifest)]
    if problems:
        typer.echo(f"{'line':>5}  {'problem':<12}  file")
        for line, problem in problems:  # one line each, however long, for grep and cut
            typer.echo(f"{line or '-':>5}  {problem.kind:<12}  {problem}")
        typer.echo(f"{len(problems)} problem{'s' * (len(problems) > 1)} in {manifest}", err=True)
        raise typer.Exit(1)
    minutes, shortest, longest = fsum(durations_s) / 60, durations_s[0], durations_s[-1]
    typer.echo(f"{len(durations_s)} utterances, {minutes:.1f} minutes, {shortest:.2f} to {longest:.2f} s, no problems")


def text(
    out: Out,
    sources: Annotated[
        list[Path] | None, typer.Argument(help="Files, and folders of files; default: Python's standard library.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace text that is in DIR already.")] = False,
) -> None:
    """Gather the text of files and folders, as bytes.

    The files are shuffled, always alike, and 3 % of the bytes are to validate with, in whole files. Files with a zero
    byte are no text and are left out. The default is the sources of Python's standard library (PSF licence, 11 MB).

    oktopk data text ~/src/linux/Documentation README.md --out data/text
    """
    with exit_on_error():
        files = files_of(sources) if sources else standard_library()
        train, val = make_text(files, out, force)
    typer.echo(f"{train:,} bytes to train on, {val:,} to validate with, of {len(files):,} files, in {out}")
    typer.echo(f"next: oktopk train --recipe gpt-tiny --data-dir {out}")


def synth_an4(
    out: Out,
    utterances: Annotated[
        int, typer.Option(min=1, help="To train on; an eighth as many, at least 16, validate.")
    ] = 948,
    grammar: Annotated[
        Grammar, typer.Option(help="an4: spelled names, numbers, dates, commands. commands: digits and commands only.")
    ] = "an4",
) -> None:
    """Make speech like that of AN4 offline, with eSpeak NG.

    Needs: pip install "oktopk[synth]". Speech of the same settings that is in DIR is kept.

    oktopk data synth-an4 --out data/synth --grammar commands --utterances 256
    """
    val_utterances = max(16, round(utterances / 8))
    with exit_on_error():
        is_new = make_speech(out, utterances, val_utterances, grammar)
    how = "made" if is_new else "there already, the same settings: nothing to do"
    typer.echo(f"{utterances} + {val_utterances} utterances in {out}, {how}")
    typer.echo(f"next: oktopk train --dataset an4 --data-dir {out}")
