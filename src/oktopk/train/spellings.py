"""Old spellings: what users of the research code type, in today's words, with a note."""

from __future__ import annotations

RENAMED = {"--nworkers": "--nproc", "--lstm-lr": "--lr"}
VALUES = {
    "--compressor": {"none": "dense", "topkA": "topka", "topkDSA": "topkdsa", "gTopk": "gtopk", "oktopkA": "oktopk"}
}
NO = ("false", "no", "0")


def modern(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments as we spell them, and a note for each that was changed.

    >>> modern(["train", "--data_dir", "d", "--compression", "False"])[0]
    ['train', '--data-dir', 'd', '--compressor', 'dense']
    """
    made, notes, coming = list[str](), list[str](), list(arguments)
    while coming:
        flag, equals, value = coming.pop(0).partition("=")
        if not flag.startswith("--"):
            made.append(flag + equals + value)
            continue
        spelled = RENAMED.get(flag.replace("_", "-"), flag.replace("_", "-"))
        if spelled == "--compression":
            on = (value if equals else coming.pop(0) if coming else "").lower() not in NO
            made += [] if on else ["--compressor", "dense"]
            notes.append(f"{flag}: compression is on unless --compressor is dense")
            continue
        if spelled != flag:
            notes.append(f"{flag} is now {spelled}")
        made.append(spelled + equals + value)
        given = value if equals else (coming[0] if coming else "")
        if given in VALUES.get(spelled, {}):
            today = VALUES[spelled][given]
            notes.append(f"{spelled} {given} is now {today}")
            made[-1] = spelled
            made.append(today)
            coming = coming if equals else coming[1:]
    return made, notes
