"""Each file answers one question, prints a table, and ends with one line of JSON."""
