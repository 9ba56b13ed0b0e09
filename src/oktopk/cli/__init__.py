"""The command line: its root, and how errors end a command."""
