"""The whole of it: what `python -m benchmarks` runs, keeps, fits, checks, draws and writes into the documents.

parts     which parts there are, and the steps of each: what is measured, in what order
runner    runs a part in a process of its own, within its time, and takes its rows as they come
results   what was measured, as JSON, and the medians of it
growth    how a cost grows with N, and how much of it grows faster than N log N
promises  each promised ratio: its sentence, how it is taken from the results, its limit
figures   a figure as SVG
pictures  which figures there are
pages     the tables of the documents, made of the results
"""
