"""The report: what the records of a run, or of several, have to say, as a page, tables, files and a live view."""
