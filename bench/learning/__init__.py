"""Does sparse training learn as fast as dense? Many settings, one order of the data, one table.

settings.py      what is tried, by name
speech.py        the corpus in memory, on the device
mechanisms.py    what a rank does with its gradient before, in and after the exchange
learner.py       the net, its workers' gradients, the update, the evaluation
experiment.py    one training; many of them beside each other
tables.py        figures and the table
plots.py         loss and WER over steps, bytes and simulated time
"""
