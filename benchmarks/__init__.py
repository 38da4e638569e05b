"""Benchmarks, each beside its competitors in one run: `python -m benchmarks.NAME`; all of them: `python -m benchmarks`.

    arrivals    all nodes at the same moment: seconds, requests, bytes, processor
    barrier     from the last node's arrival until all have their rank, beside PyTorch's c10d rendezvous; bytes per node
    calls       one blocking call, beside PyTorch's TCPStore and a bare socket echo
    idle        the cost of idle members
    load        the server's cost of a request, and of a change sent to many, beside an echo and TCPStore
    regroup     from SIGKILL until each survivor is notified, and until the next round
    throughput  puts per second, and one put sent to many watchers
    torchrun    from SIGKILL of an agent to the survivor's step, and from a replacement to that of both, beside c10d

A peer takes part if it can be imported; else the output says so. Machines are busy and differ: compare ratios within
one run. Every figure is a median of several runs, and every run starts with a new server.
"""
