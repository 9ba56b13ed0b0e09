"""Does sparse training learn as fast as dense? Many settings, one order of the data, one table.

settings.py      what is tried, by name
workload.py      what an experiment wants from a workload
recognition.py   speech, written down: the recipes an4 and an4-small
speech.py        its corpus in memory, on the device
classification.py    images, named: the recipe fashion
language.py      text, continued: the recipe gpt
images.py        idx files, and all of them as one
mechanisms.py    what a rank does with its gradient before, in and after the exchange
learner.py       the net, its workers' gradients, the update
experiment.py    one training; many of them beside each other
tables.py        figures and the table
plots.py         loss and metric over steps, bytes and simulated time
"""
