"""The command line: its commands, how each is imported, and how errors end it."""

COMMANDS = {
    "train": ("train", "Train a model with a sparse exchange, on this machine or a cluster."),
    "data": ("train", "Make, import and check the data that oktopk train reads."),
    "report": ("report", "Show the figures of a run, or of several side by side, as a page or a table."),
    "watch": ("report", "Follow a run in this terminal until it ends."),
    "bench": ("bench", "Measure every method of exchange, side by side, on networks of any speed."),
    "plan": ("cli", "Predict what each method costs on a network, and whether compression pays."),
    "doctor": ("cli", "Show versions, devices and kernels, and whether the kernels compute right."),
}
"""The extra that a command needs, and its line in the help text."""

NETWORK = "--ranks --mbit --delay-ms"
WORDS = {
    "": f"{' '.join(COMMANDS)} --help --version --completion",
    "train": "--recipe --dnn --dataset --data-dir --max-epochs --max-steps --batch-size --nsteps-update --lr "
    "--compressor --density --local-steps --dense-steps --seed --on-nonfinite --set --nproc --max-restarts "
    "--elastic --lighthouse --runs --name --resume --dry-run --settings",
    "data": "an4 check synth-an4 text",
    "data an4": "--out --force",
    "data check": "",
    "data synth-an4": "--out --utterances --grammar",
    "data text": "--out --force",
    "report": "--out --text --csv --json",
    "watch": "",
    "bench": "exchange step local chaos probe",
    "bench exchange": f"--numel --density {NETWORK} --methods --rounds --out",
    "bench step": f"--model --batch --density {NETWORK} --shard --methods --rounds --out",
    "bench local": f"--numel --density {NETWORK} --every --compute-s --methods --rounds --out",
    "bench chaos": "--minutes --faults --ranks --compute-s --out",
    "bench probe": f"--numel --density {NETWORK} --methods --out",
    "plan": f"--model --batch --numel --compute-ms {NETWORK} --hosts --optimizer --out --json",
    "doctor": "--json",
}
"""Words that may come after a command's name. A shell asks for them at each press of Tab, and importing torch to
learn them would take seconds."""
