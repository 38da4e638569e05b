"""A program that saves at the first signal that ends it, and prints the signals that it got."""

SCRIPT = """
import signal, sys, time

told = []

def save(number, _):
    told.append(signal.Signals(number).name)
    if len(told) == 1:
        time.sleep(SECONDS)
        print("saved after", *told, flush=True)
        sys.exit(0)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, save)
print("ready", flush=True)
time.sleep(60)
"""


def saves(seconds: float) -> str:
    """Return the program's text; it takes `seconds` to save."""
    return SCRIPT.replace("SECONDS", str(seconds))
