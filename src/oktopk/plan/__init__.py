"""`oktopk plan`: the step time, bytes, memory and money of each method on a network, and whether compression pays.

topology     levels of links            profile    parameters and times of a step      learning   steps beside dense's
schedule     messages of an exchange    methods    the candidates                      measure    profile by real steps
model        seconds of a step          verdict    the sentence                        read, cli, show
"""
