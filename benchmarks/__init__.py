"""Benchmarks, each beside its competitors in one run: `python -m benchmarks.NAME`; all of them: `python -m benchmarks`.

    arrivals    all nodes at the same moment: seconds, requests, bytes, processor
    barrier     from the last node's arrival to everyone's done, beside PyTorch's c10d rendezvous; bytes per node
    calls       one blocking call, beside PyTorch's TCPStore and a bare socket echo
    idle        what members cost that do nothing
    load        what one request costs the server, and one change told to many, beside an echo and TCPStore
    regroup     from SIGKILL to each survivor's being told, and to the next round
    throughput  puts per second, and one put told to many watchers
    torchrun    from SIGKILL of an agent to the survivor's step, and from a replacement to that of both, beside c10d

A peer takes part if it can be imported; the output says so if not. Machines are busy and differ: look at the ratios
within one run, not at times of two. Every figure is a median of several runs, and every run starts with a new server.
"""
