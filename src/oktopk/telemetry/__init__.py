"""Step records, their sinks, and their summary."""
