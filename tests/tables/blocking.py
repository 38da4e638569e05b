"""The blocking cells, with real sockets, threads, signals, forks and a store in a process, and the probe after each."""

import asyncio
import contextlib
import ctypes
import functools
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import rdzv.sync
import store.sync
from rdzv.errors import RendezvousClosedError, RendezvousError
from tests.support.processes import ROOT, free_port
from tests.tables.awaited import Enough, judging, undoes
from tests.tables.calls import WITHIN
from tests.tables.cells import OF_A_ROUND, TEXTS, Cell

__all__ = ["MANNERS", "Machine", "play", "played_alone"]

MANNERS = (
    *("once", "twice", "second thread", "left elsewhere", "signals", "interrupted before", "forked child"),
    *("held GIL", "in a loop", "beside another job"),
)

LATE = 0.5  # seconds after its time limit by which a call must have ended
TO_UNDO = 2.0  # seconds more for calls that return something to the store
HELD = 0.2  # seconds for which a thread in C holds the GIL, again and again
AWAY = 0.5  # seconds until a store in the state "back" is started again
TO_MEET = 20.0  # seconds for the other nodes to meet: a lost lease has expired by then
LATE_CALL = "late: the call took"
_numbers = itertools.count()


class Interrupted(BaseException):
    """Raised by the signal handler."""


class Machine:
    """A store in a process of its own, at one port, with one folder if it is durable.

    Attributes:
        url: Its URL.
    """

    def __init__(self, *, durable: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._port = free_port()
        self._kept = ["--data-dir", self._folder.name] if durable else []
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()  # a timer of a cell may start it, too
        self.url = f"tcp://127.0.0.1:{self._port}"
        self.start()
        with rdzv.sync.connect(f"{self.url}/first", is_host=False):
            pass  # the first node of a process makes objects that stay: the pipe of its signals

    def start(self) -> None:
        """Start the store if it does not run, and wait until it answers."""
        with self._starting:
            if self._process is None:
                command = [sys.executable, "-m", "rdzv", "serve", "--port", str(self._port), *self._kept]
                env = {**os.environ, "PYTHONPATH": str(ROOT)}
                self._process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with store.sync.connect(self.url, timeout=20):
            pass

    def kill(self) -> None:
        """Kill the store."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Stop or resume the store."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill the store, and delete its folder."""
        self.kill()
        self._folder.cleanup()


class Stage:
    """Two blocking nodes in a round, and the object that a cell is about; see the awaited `Stage`."""

    def __init__(self, cell: Cell, machine: Machine) -> None:
        self.cell, self.machine = cell, machine
        self.faults: list[str] = []
        self.url = f"{machine.url}/table-{os.getpid()}-{next(_numbers)}"
        self.ends: list[contextlib.ExitStack] = []
        self.it: Any = None
        self.b: Any = None

    def node(self, name: str, join_timeout: float = TO_MEET, url: str = "") -> rdzv.sync.Handler:
        """Connect a node. It is closed at the end at the latest."""
        stack = contextlib.ExitStack()
        self.ends.append(stack)
        limits: dict[str, Any] = {"join_timeout": join_timeout, "close_timeout": WITHIN, "last_call_timeout": 0.1}
        sizes: dict[str, Any] = {"min_nodes": 2, "max_nodes": 3, "node_id": name, "is_host": False}
        handler = stack.enter_context(rdzv.sync.connect(url or self.url, **sizes, **limits))
        handler.own_node._link.store.timeout = WITHIN  # type: ignore[union-attr]  # otherwise 30 s for each
        return handler

    def meet(self, *nodes: rdzv.sync.Handler) -> list[Any]:
        """Let all nodes join. Return the result or the error of each."""
        results: list[Any] = [None] * len(nodes)

        def join(at: int) -> None:
            try:
                results[at] = nodes[at].next_rendezvous()
            except RendezvousError as error:
                results[at] = error

        _in_threads(*(functools.partial(join, at) for at in range(len(nodes))))
        return results

    def set_up(self, stack: contextlib.ExitStack) -> None:
        """Make the object, and bring it to its state."""
        of, when = self.cell.call.of, self.cell.when
        self.b = self.node("b")
        a = self.node("a", WITHIN)
        if of == "round":
            self._of_rounds(stack, a)
        else:
            info, _ = self.meet(a, self.b)
            if of in OF_A_ROUND:
                self.it = {"handler": a, "info": info, "shared": info.store, "changes": a.changes()}[of]
                if of == "shared":
                    self.it.set_timeout(WITHIN)
                if of == "changes" and when != "before":
                    stack.enter_context(self.it)
                if when == "round over":
                    self.meet(a, self.b)
            else:
                self._of_client(stack)
        if when == "member lost":
            self.ends[0].close()
        elif when == "run over":
            self.b.set_closed("done")
        elif when == "object over":
            stack.close()
            if of in {"handler", "info", "shared"}:
                a.close()

    def _of_rounds(self, stack: contextlib.ExitStack, a: rdzv.sync.Handler) -> None:
        from rdzv.loop.blocking import Round, iterate_rounds
        from rdzv.loop.member import LoopOptions

        given = iterate_rounds(Round, contextlib.nullcontext(a), LoopOptions())
        joining = threading.Thread(target=self.b.next_rendezvous)
        joining.start()
        self.it = next(given)
        joining.join()
        if self.cell.when == "before":
            return
        stack.push(_swallow)
        stack.enter_context(self.it)
        stack.push(_leave_body)
        if self.cell.when == "round over":
            joining = threading.Thread(target=self.b.next_rendezvous)
            joining.start()
            stack.close()
            next(given)
            joining.join()

    def _of_client(self, stack: contextlib.ExitStack) -> None:
        of, is_over = self.cell.call.of, self.cell.when == "object over"
        client: Any = stack.enter_context(store.sync.connect(self.machine.url, timeout=WITHIN))
        self.it = client
        if of == "recipes":
            recipes = store.sync.recipes
            wrapped = {name: functools.partial(getattr(recipes, name), client) for name in recipes.__all__}
            self.it = types.SimpleNamespace(**wrapped)
        if of == "lease":
            self.it = client.grant(10)
            if is_over:
                self.it.revoke()
        if of == "watch":
            self.it = client.watch("/rdzv")
            if self.cell.when != "before":
                stack.enter_context(self.it)
        if of == "kept":
            self.it = stack.enter_context(client.kept_lease(10))

    def upset_store(self) -> None:
        """Bring the store to the cell's state."""
        match self.cell.store:
            case "away":
                self.machine.kill()
            case "silent":
                self.machine.signal(signal.SIGSTOP)
            case "replaced":
                self.machine.kill()
                self.machine.start()
            case "back":
                self.machine.kill()
                threading.Timer(AWAY, self.machine.start).start()

    def mend_store(self) -> None:
        """Start or resume the store."""
        self.machine.signal(signal.SIGCONT)
        if self.cell.store == "back":
            time.sleep(AWAY)
        self.machine.start()


def played_alone(cell: Cell, machines: list[Machine]) -> list[str]:
    """Play a blocking cell. If it is late, play it three times more; it counts if it is late each time."""
    machine = machines[cell.store == "replaced"]
    faults = play(cell, machine, machines[2])
    for _ in range(3):
        if not any(LATE_CALL in fault for fault in faults):
            break
        faults = play(cell, machine, machines[2])
    return faults


def play(cell: Cell, machine: Machine, beside: Machine) -> list[str]:
    """Play one cell in the main thread. Return the defects. `beside` has other jobs of the same names."""
    threads, files = threading.active_count(), _files()
    stage = Stage(cell, machine)
    others = []
    try:
        with contextlib.ExitStack() as stack:
            stage.set_up(stack)
            if cell.manner == "beside another job":
                url = stage.url.replace(machine.url, beside.url)
                others = [stage.node("a", url=url), stage.node("b", url=url)]
                stage.meet(*others)
            stage.upset_store()
            with judging(stage.faults, cell.call.of, "the call"):
                _in_manner(stage)
            with judging(stage.faults, cell.call.of, "leaving its block"):
                if cell.manner == "left elsewhere":
                    _in_threads(stack.close)
                else:
                    stack.close()
        stage.mend_store()
        _probe(stage, others)
    finally:
        stage.mend_store()
        for end in stage.ends:
            end.close()
    until = time.monotonic() + 3
    while time.monotonic() < until and (threading.active_count() > threads or _files() > files):
        time.sleep(0.02)
    if threading.active_count() > threads:
        stage.faults.append(f"threads are left: {threading.enumerate()}")
    if _files() > files:
        stage.faults.append(f"{_files() - files} files or sockets are left: {_open_files()}")
    return stage.faults


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def _in_threads(*works: Callable[[], object]) -> None:
    """Do work in threads, and wait for its end. Raise the first error."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def _in_manner(stage: Stage) -> None:
    act = functools.partial(_act, stage)
    match stage.cell.manner:
        case "twice":
            _in_threads(act, act)
        case "second thread":
            _in_threads(act)
        case "signals":
            with _beside(_send_signal):
                act()
        case "interrupted before":
            with _beside(_send_signal, raises=True), contextlib.suppress(Interrupted):
                act()
                time.sleep(0.2)
            act()
        case "forked child":
            _in_child(stage)
            act()
        case "held GIL":
            libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the GIL
            with _beside(lambda: libc.usleep(int(HELD * 1e6))):
                act()
        case "in a loop":

            async def call() -> None:
                act()

            asyncio.run(call())
        case _:
            act()


def _act(stage: Stage) -> None:
    """Make the call, and wait for its end. Add to the faults if it raises an undocumented error, or is late."""
    cell = stage.cell
    began = time.monotonic()
    with judging(stage.faults, cell.call.of, "the call"):
        given = cell.call.act(stage.it, TEXTS[cell.text])
        if hasattr(given, "__enter__"):
            with given:
                pass
        elif hasattr(given, "__next__") and not cell.call.open_ended:
            next(given)
    most = WITHIN + LATE + TO_UNDO * undoes(cell.call.name) + 2 * HELD * (cell.manner == "held GIL")
    if (took := time.monotonic() - began) > most:
        stage.faults.append(f"{LATE_CALL} {took:.1f} s, with a limit of {WITHIN:g} s")


def _send_signal() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


@contextlib.contextmanager
def _beside(work: Callable[[], object], *, raises: bool = False) -> Iterator[None]:
    """Do some work every 0.1 s in a thread, for the length of a block. Signals raise, or do nothing."""
    over = threading.Event()

    def handle(*_: object) -> None:
        if raises and not over.is_set():
            over.set()
            raise Interrupted

    def again() -> None:
        while not over.wait(0.1):
            work()

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def _in_child(stage: Stage) -> None:
    """Make the call in a forked child, where the object is unusable: it must raise an error, or return, at once."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            began = time.monotonic()
            _act(stage)
            if (took := time.monotonic() - began) > WITHIN + LATE:
                stage.faults.append(f"the child took {took:.1f} s")
            os.write(writing, json.dumps(stage.faults).encode())
        os._exit(0)
    os.close(writing)
    said = b""
    if select.select([reading], [], [], 2 * WITHIN)[0]:
        said = os.read(reading, 65536)
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    stage.faults += (
        [f"in a child: {fault}" for fault in json.loads(said)] if said else ["a forked child hangs, or dies"]
    )


def _probe(stage: Stage, others: list[rdzv.sync.Handler]) -> None:
    """Check that the other nodes are still members and can meet again, and that nothing is left in the server."""
    cell = stage.cell
    for handler in others:
        if handler.membership is None or handler.membership.over is not None:
            stage.faults.append(f"another job's {handler.node_id} is out of its round")
    is_healthy = cell.store != "replaced" and cell.when not in {"run over", "member lost"} and not cell.call.ends
    if is_healthy and stage.b.membership.over is not None:
        stage.faults.append(f"b is out of its round: {stage.b.membership.over}")
    for end in stage.ends[1:]:
        end.close()
    if cell.store == "replaced" or cell.when == "member lost":
        stage.ends[0].close()
        stage.b = stage.node("d")
    for result in stage.meet(stage.b, stage.node("e")):
        closed_by_it = cell.when == "run over" or cell.call.ends
        if isinstance(result, RendezvousError) and not (isinstance(result, RendezvousClosedError) and closed_by_it):
            stage.faults.append(f"no next round: {result!r:.300}")
    for end in stage.ends:
        end.close()
    with store.sync.connect(stage.machine.url) as client:
        figures, nodes = client.stats(), client.list(f"/rdzv/{stage.url.rpartition('/')[2]}/nodes/")
    left = {name: figures[name] for name in ("watches", "waits") if figures[name]}
    if left or [entry for entry in nodes if not entry.key.endswith("/a")]:
        stage.faults.append(f"left at the server: {left or nodes}")


def _leave_body(*_: object) -> None:
    raise Enough


def _swallow(kind: type[BaseException] | None, *_: object) -> bool:
    return kind is Enough
