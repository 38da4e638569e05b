"""The rendezvous on etcd: the time to complete a round, the requests per node, and the death of a leader.

    python -m benchmarks.etcd                                       # 4, 16, 64 and 128 nodes on one etcd
    python -m benchmarks.etcd --nodes 64 --runs 1 --fail-overs 3
    RDZV_TEST_ETCD=path/to/etcd python -m benchmarks.etcd --tls --nodes 300 --idle 20    # another release, over TLS

The round is that of `benchmarks.barrier`: all nodes but one are parked, and the time runs from the last arrival until
every node has its rank. Requests are those counted by etcd (`/metrics`), from before the first connection until the
last node is done, per node; without lease renewals and health checks, which depend on time and not on nodes.

`--idle` counts, for as many seconds, the requests of the waiting nodes, messages on streams included, their
connections, and the memory that etcd has taken since its start.

A fail-over: in a cluster of three the leader is killed while all nodes but one are parked; then the last one arrives.
The time runs from the kill until every node has its rank. Data lies in memory where the system offers that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import ssl
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import trustme

from benchmarks import support
from benchmarks.barrier import PATIENCE, SETTLE, complete, our_nodes, park
from benchmarks.support import ms
from tests.support.etcd import Etcd, Member, serve_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator

STARTED = re.compile(r'^grpc_server_started_total\{grpc_method="(\w+)"')
TIMELY = ("LeaseKeepAlive", "Status")  # depend on time


def requests(etcd: Etcd) -> Counter[str]:
    """Return the requests that etcd has counted, by kind."""
    counted: Counter[str] = Counter()
    for name, value in etcd.metrics().items():
        match = STARTED.match(name)
        if match and match[1] not in TIMELY:
            counted[match[1]] += int(value)
    return counted


RECEIVED = re.compile(r"^grpc_server_msg_received_total\{")


def received(etcd: Etcd) -> float:
    """Return the number of messages from clients."""
    return sum(value for name, value in etcd.metrics().items() if RECEIVED.match(name))


def connections(member: Member) -> int:
    """Return the number of client connections of a member."""
    port = f":{member.client_port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(fields[1].endswith(port) and fields[3] == "01" for fields in map(str.split, lines))


def resident(member: Member) -> int:
    """Return the resident bytes of a member."""
    return int(Path(f"/proc/{member.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def show_idle(etcd: Etcd, nodes: int, seconds: float, before: int) -> None:
    """Print the cost of waiting nodes for one etcd."""
    (member,) = etcd.members
    began, asked = time.monotonic(), received(etcd)
    time.sleep(seconds)
    rate = (received(etcd) - asked) / (time.monotonic() - began)
    print(
        f"{nodes} waiting nodes: {rate / nodes:.2f} messages and {connections(member) / nodes:.2f} connections per "
        f"node, {(resident(member) - before) / nodes / 1000:.0f} kB of etcd's memory per node",
        flush=True,
    )


@contextlib.contextmanager
def served(*, tls: bool) -> Iterator[tuple[Etcd, str]]:
    """Run one etcd; yield it with the parameters of its URL."""
    if not tls:
        with serve_etcd() as etcd:
            yield etcd, ""
        return
    with tempfile.TemporaryDirectory() as folder:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        ca, cert, key = (str(Path(folder) / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        authority.cert_pem.write_to_path(ca)
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        context = ssl.create_default_context(cafile=ca)
        with serve_etcd(scheme="https", tls=context, options=["--cert-file", cert, "--key-file", key]) as etcd:
            yield etcd, f"&ca={ca}"


def measure(
    etcd: Etcd, size: int, processes: int, *, more: str = "", idle: float = 0.0, kill_leader: bool = False
) -> tuple[float, Counter[str]]:
    """Return seconds until all are done, and the requests of all nodes."""
    url = f"{etcd.url}/barrier-{random.getrandbits(48):x}?min_nodes={size}&join_timeout=3600{more}"
    memory = resident(etcd.members[0])
    names = [[f"node-{number}" for number in share] for share in support.shares(size - 1, processes)]
    before = requests(etcd)
    with support.workers(*[(our_nodes, url, some) for some in [*names, ["the-last"]]]) as all_workers:
        last = park(all_workers, PATIENCE)
        time.sleep(random.uniform(*SETTLE))
        if idle:
            show_idle(etcd, size - 1, idle, memory)
        killed = time.monotonic()
        if kill_leader:
            etcd.leader().kill()
            killed = time.monotonic()
        seconds, done_at = complete(all_workers, last, size, PATIENCE)
        asked = Counter() if kill_leader else requests(etcd) - before
        return (done_at - killed if kill_leader else seconds), asked


def measure_fail_over(size: int, processes: int) -> float:
    """Return seconds from the leader's death until all are done."""
    with serve_etcd(3) as etcd:
        return measure(etcd, size, processes, kill_leader=True)[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.etcd", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16, 64, 128])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4, help="that carry the parked nodes")
    parser.add_argument("--fail-overs", type=int, default=3, help="how often a leader of three is killed")
    parser.add_argument("--tls", action="store_true", help="reach it over TLS")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds for which to count what waiting nodes ask")
    options = parser.parse_args()
    if shutil.which("etcd") is None and "RDZV_TEST_ETCD" not in os.environ:
        parser.exit(1, "etcd is not installed: apt-get install etcd-server, say\n")

    print(support.describe_machine())
    rows = []
    for size in options.nodes:
        times, per_node = [], []
        for _ in range(options.runs):
            with served(tls=options.tls) as (etcd, more):
                seconds, asked = measure(etcd, size, options.processes, more=more, idle=options.idle)
            times.append(seconds)
            per_node.append(sum(asked.values()) / size)
            kinds = ", ".join(f"{kind} {count / size:.1f}" for kind, count in sorted(asked.items()))
            print(f"{size} nodes: {ms(seconds)} ms; requests per node: {kinds}", flush=True)
        rows.append(
            (size, ms(support.median(times)), ms(min(times)), ms(max(times)), f"{support.median(per_node):.1f}")
        )
    header = ("nodes", "ms", "best", "worst", "requests per node")
    support.table("One etcd: from the last arrival to everyone done, medians", header, rows)
    fail_overs = [measure_fail_over(max(options.nodes), options.processes) for _ in range(options.fail_overs)]
    if fail_overs:
        shown = ", ".join(f"{seconds:.2f}" for seconds in sorted(fail_overs))
        print(f"Of three the leader killed, {max(options.nodes)} nodes: complete {shown} s after")


if __name__ == "__main__":
    main()
