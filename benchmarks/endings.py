"""Ends interpreters in every way while our threads run, and counts ends by an unexpected signal.

    python -m benchmarks.endings [--count 500] [--at-once 4]

Each child joins a run, hosts its store or finds one, and ends inside its `with`: it returns, exits, raises, is
interrupted, forks a child that ends as well, replaces itself by another program, or its main thread ends while another
one runs. A loop of ours that ran while Python finalizes would end it by SIGSEGV. `faulthandler` is on. More children
than cores are the load.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from benchmarks import support

PATIENCE = 120.0  # seconds for any one of them

HEAD = """
import faulthandler, os, signal, sys, threading, time
faulthandler.enable()
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
import rdzv.sync, store.sync
{setting}
handler = rdzv.sync.connect(URL + "/run-%d?min_nodes=1" % os.getpid()).__enter__()
info = handler.next_rendezvous()
info.store.set("key", "value")
"""

SETTINGS = {
    "its own store": "URL = 'tcp://127.0.0.1:%d' % port()",
    "another's store": "URL = sys.argv[1]",
    "store.sync": "URL = store.sync.serve('127.0.0.1', 0).__enter__().url",
}
"""The store's place: in the node itself, in another process, or in a thread beside it."""

PORT = """
def port():
    import socket
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]
"""

ENDINGS: dict[str, tuple[str, int]] = {
    "return": ("", 0),
    "exit": ("sys.exit(3)", 3),
    "raise": ("raise ValueError('mine')", 1),
    "interrupt": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    "fork": ("os.waitpid(child, 0) if (child := os.fork()) else sys.exit(0)", 0),
    "exec": ("os.execv(sys.executable, [sys.executable, '-c', ''])", 0),
    "another thread": ("threading.Thread(target=lambda: (time.sleep(0.1), info.store.get('key'))).start()", 0),
}
"""The code of each ending, and its expected status."""


def end_one(number: int, url: str) -> tuple[str, int, bool, str]:
    """Run one child; what it was, its status, whether that is the one it is to have, and what it said."""
    where, setting = list(SETTINGS.items())[number % len(SETTINGS)]
    how, (act, wanted) = list(ENDINGS.items())[number // len(SETTINGS) % len(ENDINGS)]
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PORT + HEAD.format(setting=setting) + act, url],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        env={key: value for key, value in os.environ.items() if not key.startswith("RDZV_")},
        check=False,
    )
    return f"{how}, {where}", child.returncode, child.returncode == wanted, child.stdout


def main() -> None:
    """End them, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="how many")
    parser.add_argument("--at-once", type=int, default=4, help="how many at a time")
    options = parser.parse_args()
    print(support.describe_machine())
    ended: Counter[str] = Counter()
    wrong = []
    with support.serving() as url, ThreadPoolExecutor(options.at_once) as pool:
        for what, status, right, said in pool.map(lambda number: end_one(number, url), range(options.count)):
            ended[what] += 1
            if not right:
                wrong.append(what)
                name = signal.Signals(-status).name if status < 0 else str(status)
                print(f"{what}: ended with {name}\n{said}", flush=True)
    support.table("Interpreters ended", ("how, and where the store was", "times"), sorted(ended.items()))
    print(f"{options.count} endings, {len(wrong)} of them not as they should")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
