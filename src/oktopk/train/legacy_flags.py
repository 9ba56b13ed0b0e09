"""Old spellings: what users of the research code type, in today's words, with a note."""

from __future__ import annotations

RENAMED = {"--nworkers": "--nproc", "--lstm-lr": "--lr"}
VALUES = {
    "--compressor": {"none": "dense", "topkA": "topka", "topkDSA": "topkdsa", "gTopk": "gtopk", "oktopkA": "oktopk"}
}
YES = ("true", "yes", "1")
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
        spelled = flag.replace("_", "-")
        spelled = RENAMED.get(spelled, spelled)
        if spelled == "--compression":
            said = (value if equals else coming[0] if coming else "").lower()
            if not equals and said in (*YES, *NO):  # it stood alone as well
                coming.pop(0)
            made += ["--compressor", "dense"] if said in NO else []
            notes.append(f"{flag}: compression is on unless --compressor is dense")
            continue
        if spelled != flag:
            notes.append(f"{flag} is now {spelled}")
        given = value if equals else (coming[0] if coming else "")
        today = VALUES.get(spelled, {}).get(given)
        if today is None:
            made.append(spelled + equals + value)
            continue
        notes.append(f"{spelled} {given} is now {today}")
        made += [spelled, today]
        coming = coming if equals else coming[1:]
    return made, notes
