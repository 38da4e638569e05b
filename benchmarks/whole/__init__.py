"""The whole run of `python -m benchmarks`: it runs, stores, fits, checks, draws, and writes into the documents.

parts     the parts, and the steps of each, in order runner    runs a part in a process of its own, within its time, and
takes its rows as they come results   the measurements, as JSON, and their medians growth    how a cost grows with N,
and how much of it grows faster than N log N promises  each promised ratio: its sentence, how it is taken from the
results, its limit figures   a figure as SVG pictures  the list of the figures pages     the tables of the documents,
made of the results
"""
