"""A command for `rdzv run` that obeys signals: SIGUSR1 succeed, SIGUSR2 fail.

    obedient.py [with-child] [slow] [stubborn]

It prints its environment as one line of JSON. At SIGTERM it prints a line and ends: after a while if it is slow, and
never if it is stubborn.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time


def main() -> None:
    if "with-child" in sys.argv:  # one that would stay for ever, in the same process group
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    told_by = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, told_by)
    if os.environ["RANK"] == "0":  # the port is free, or this fails
        meeting_point = socket.create_server(("", int(os.environ["MASTER_PORT"])))
        meeting_point.setblocking(False)
    told = {name: os.environ[name] for name in os.environ if "RANK" in name or "WORLD_SIZE" in name}
    told |= {name: os.environ[name] for name in os.environ if name.startswith(("MASTER_", "RDZV_"))}
    print(json.dumps({**told, "pid": os.getpid(), "guard": os.getppid()}), flush=True)
    while True:
        number = signal.sigwait(told_by)
        if number == signal.SIGUSR1:
            sys.exit(0)
        if number == signal.SIGUSR2:
            sys.exit(3)
        print("asked to end by", signal.Signals(number).name, flush=True)
        if "slow" in sys.argv:
            time.sleep(0.3)
            print("saved", flush=True)
        if "stubborn" not in sys.argv:
            sys.exit(0)


if __name__ == "__main__":
    main()
