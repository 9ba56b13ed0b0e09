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
