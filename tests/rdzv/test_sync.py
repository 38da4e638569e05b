"""The blocking twin: real sockets, real threads, real signals, real forks."""

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import rdzv.sync
import store
import store.sync
from rdzv.core.state import NodesWaiting
from rdzv.errors import RendezvousSettingsError, RendezvousStateError, RoundSupersededError
from rdzv.node.blocking_handler import BlockingChanges
from rdzv.node.link.node_loop import wait_for_result
from store.net.threads import END_WITHIN, LoopThread
from tests.support.interrupts import tears, torn
from tests.support.processes import free_port, start_python
from tests.support.proxy import Proxy

pytestmark = pytest.mark.some_here(4)

HEAD = """
import os, signal, sys, threading, time
import rdzv, rdzv.sync
URL = sys.argv[1]
"""


@pytest.fixture
def url() -> Iterator[str]:
    with store.sync.serve() as server:
        yield server.url


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_wait_ends_with_the_lease_also_if_the_store_is_unreachable() -> None:
    out = threading.Event()
    async with store.serve() as server, store.connect(server.url) as client, Proxy("127.0.0.1", server.port) as proxy:

        def node() -> str:
            url = f"tcp://127.0.0.1:{proxy.port}/job?min_nodes=1&ttl=0.6&disconnect_ttl=0.6"
            with rdzv.sync.connect(url, is_host=False) as handler:
                info = handler.next_rendezvous()
                with pytest.raises(RoundSupersededError) as caught:
                    info.store.get("never")
                out.set()
            return str(caught.value)

        waiting = asyncio.create_task(asyncio.to_thread(node))
        while not (await client.stats())["waits"]:
            pass
        proxy.black_hole()
        assert await asyncio.to_thread(out.wait, 5)
        proxy.heal()
        assert "lease" in await waiting
    gc.collect()  # as above


@tears
def test_a_poll_interrupted_by_a_signal_handler_loses_no_change() -> None:
    """Regression: 25 of 201 polls lost the change that had just arrived."""

    class Numbers(contextlib.nullcontext[Any]):
        def __init__(self) -> None:
            super().__init__(self)
            self._numbers = itertools.count()

        async def __anext__(self) -> int:
            await asyncio.sleep(0)
            return next(self._numbers)

    def call(work: Any) -> Any:
        under_way = thread.start_call(work)
        try:
            return wait_for_result(under_way)
        except BaseException:
            under_way.cancel()
            raise

    thread, got = LoopThread("node"), list[Any]()
    try:
        changes = BlockingChanges(Numbers(), call)
        with changes:
            for place in torn(lambda: got.append(changes.poll(5))):
                assert not got or got == [0], place
            assert got == [0]
    finally:
        thread.stop()


def test_changes_wait_for_news_and_end_with_the_context(url: str) -> None:
    with (
        rdzv.sync.connect(f"{url}/job?min_nodes=1&max_nodes=2&last_call_timeout=0", is_host=False) as member,
        rdzv.sync.connect(f"{url}/job?min_nodes=1&max_nodes=2&last_call_timeout=0", is_host=False) as late,
    ):
        member.next_rendezvous()
        with ThreadPoolExecutor(1) as pool, member.changes() as changes:
            joining = pool.submit(late.next_rendezvous)
            assert next(changes) == NodesWaiting(1)
            member.leave()
            assert joining.result(timeout=60).world_size == 1
            rest = pool.submit(list, changes)
            while not changes._turn.locked():
                pass
            changes.__exit__()  # regression: it waited for the end of the other thread's read
            rest.result(timeout=60)
            with pytest.raises(RendezvousStateError, match="changes are read in `with"):
                next(changes)  # regression: it waited for ever


def test_statuses_tell_of_each_change_to_the_closing(url: str) -> None:
    with rdzv.sync.connect(f"{url}/job?min_nodes=1&is_host=false", node_id="a") as member:
        statuses = member.statuses()
        assert next(statuses).round is None
        info = member.next_rendezvous()
        over: list[str] = []
        info.on_superseded(over.append)
        assert info.superseded() is None
        while next(statuses).round is None:
            pass
        member.set_closed("done")
        assert [status.closed for status in statuses if status.closed] == ["done"]
        member.leave()
        assert over == [info.superseded()]


@tears
def test_statuses_that_a_signal_handler_interrupts_are_over_and_begin_anew(url: str) -> None:
    with rdzv.sync.connect(f"{url}/job?min_nodes=1&is_host=false", node_id="a") as member:
        for _ in torn(lambda: next(member.statuses()), every=7):
            assert member.status().round is None


def test_a_blocking_call_in_the_node_thread_is_refused_and_holds_nothing_up(url: str) -> None:
    """Regression: a logging handler that asked for the status blocked the node thread, with all nodes, for ever."""
    with rdzv.sync.connect(f"{url}/job?min_nodes=1&is_host=false") as handler:

        async def ask() -> None:
            with pytest.raises(RendezvousStateError, match="make it in another thread"):
                handler.status()

        wait_for_result(handler.spawn(ask()))
        assert handler.next_rendezvous().world_size == 1


def test_wrong_settings_are_an_error_before_anything_is_started() -> None:
    before = set(threading.enumerate())
    with (
        pytest.raises(RendezvousSettingsError, match="there is no parameter 'min_node'"),
        rdzv.sync.connect("tcp://127.0.0.1:1/job?min_node=2"),
    ):
        pass
    assert set(threading.enumerate()) <= before


INTERRUPT = """
def waits():  # whether the main thread waits for another one
    return sys._current_frames()[threading.main_thread().ident].f_code.co_qualname == "Flag.wait"
def interrupt(when):  # as soon as that holds, and the main thread waits
    while not (when() and waits()):
        time.sleep(0.01)
    # To this very thread: the system may do that, and the main thread's wait is not interrupted. It is not, either, if
    # the signal comes just before the system call in which that waits.
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
def interrupt_when(when):
    threading.Thread(target=interrupt, args=(when,), daemon=True).start()
"""


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGUSR1, "Rescheduled")])
async def test_a_signal_interrupts_a_parked_call_withdraws_the_node_and_the_next_call_joins(
    number: int, raised: str
) -> None:
    """Regression: the next call was refused, because the interrupted one was still being withdrawn."""
    script = """
class Rescheduled(Exception): pass
def raise_it(*_): raise Rescheduled
signal.signal(signal.SIGUSR1, raise_it)
with rdzv.sync.connect(URL + "/job?min_nodes=2&ttl=600", is_host=False, node_id="a") as handler:
    print("parking", flush=True)
    try:
        handler.next_rendezvous()
    except (KeyboardInterrupt, Rescheduled) as error:
        print("out", type(error).__name__, flush=True)  # and not when the next keep-alive is due, after 200 s
        if isinstance(error, KeyboardInterrupt):
            handler.leave()
            print("nodes", len(handler.status().waiting), flush=True)
    print("rank", handler.next_rendezvous().rank, flush=True)
"""
    async with (
        store.serve() as server,
        store.connect(server.url) as client,
        start_python("-c", HEAD + script, server.url) as child,
    ):
        await child.line("parking")
        (first,) = await client.wait(["/rdzv/job/nodes/a"])
        os.kill(child.pid, number)
        assert await child.line("out", timeout=60) == f"out {raised}"
        assert raised != "KeyboardInterrupt" or await child.line("nodes") == "nodes 0"
        async with client.watch(first.key, start_revision=first.mod_revision + 1) as changes:
            await anext(event async for event in changes if event.kind == "put")  # else the round may have the first
        async with rdzv.connect(f"{server.url}/job?min_nodes=2", is_host=False, node_id="b") as other:
            assert f"rank {1 - (await other.next_rendezvous()).rank}" == await child.line("rank")
        assert await child.wait() == 0


async def test_ctrl_c_is_noticed_also_if_it_does_not_interrupt_the_wait() -> None:
    """Regression: a signal just before a wait for the node's thread was handled only after the wait, that is never."""
    script = """
def heard(wait, when):
    interrupt_when(when)
    try:
        wait()
    except KeyboardInterrupt:
        print("heard", flush=True)
with rdzv.sync.connect(URL + "/job?min_nodes=1&max_nodes=1", is_host=False, node_id="a") as handler:
    handler.next_rendezvous()
    with handler.changes() as changes:
        heard(lambda: next(changes), lambda: True)
        heard(lambda: changes.poll(3600), lambda: True)
    with rdzv.sync.connect(URL + "/job?min_nodes=1&max_nodes=1", is_host=False, node_id="b") as other:
        heard(other.next_rendezvous, lambda: "b" in handler.status().waiting)
"""
    async with store.serve() as server, start_python("-c", HEAD + INTERRUPT + script, server.url) as child:
        for _ in range(3):
            await child.line("heard")
        assert await child.wait() == 0


def is_answered(call: Callable[[], object]) -> bool:
    done: list[object] = []
    asking = threading.Thread(target=lambda: done.append(call()), daemon=True)
    asking.start()
    asking.join(30)
    return bool(done)


@tears
def test_a_node_works_after_an_interrupt_anywhere_in_a_call(url: str) -> None:
    """Regression: it left a lock taken, on which the thread of all nodes then waited, so all their leases expired."""
    with rdzv.sync.connect(f"{url}/job?min_nodes=1", is_host=False) as handler:
        for call, every in ((handler.num_nodes_waiting, 1), (handler.next_rendezvous, 3)):
            handler.next_rendezvous()
            places = 0
            for where in torn(call, every=every):
                places += 1
                assert is_answered(handler.num_nodes_waiting if every == 1 else handler.next_rendezvous), where
            assert places > 10


async def test_ctrl_c_while_the_nodes_thread_is_busy_leaves_no_join_behind() -> None:
    """Regression: the call began after its caller had gone, and put a node without a caller into the others' round."""
    script = """
busy = threading.Event()
async def hold_up():
    busy.wait()
with rdzv.sync.connect(URL + "/job?min_nodes=2&max_nodes=2", is_host=False, node_id="a") as handler:
    holding = handler.node.loop.spawn(hold_up())
    for _ in range(2):  # also while the one before is still to be undone
        interrupt_when(lambda: True)
        try:
            handler.next_rendezvous()
        except KeyboardInterrupt:
            print("out", flush=True)
    busy.set()
    holding.wait()
    handler.leave()  # which waits until what was abandoned is undone
    print("ghosts", list(handler.status().waiting), handler.node.is_joining, flush=True)
    print("rank", handler.next_rendezvous().rank, flush=True)
"""
    async with store.serve() as server, start_python("-c", HEAD + INTERRUPT + script, server.url) as child:
        for _ in range(2):
            await child.line("out")
        assert await child.line("ghosts") == "ghosts [] False"
        async with rdzv.connect(f"{server.url}/job?min_nodes=2&max_nodes=2", is_host=False, node_id="b") as other:
            info = await other.next_rendezvous()
            assert await child.line("rank") == f"rank {1 - info.rank}"
        assert await child.wait() == 0


@pytest.mark.parametrize("hosting", [False, True])
async def test_a_forked_child_gets_a_clear_error_and_can_leave(hosting: bool) -> None:
    """Regression: on leaving the context the child waited for ever for a thread that does not exist in it."""
    script = """
with rdzv.sync.connect(URL + "/job?min_nodes=1", node_id="a") as handler:
    info = handler.next_rendezvous()
    child = os.fork()
    if child == 0:
        for call in (handler.is_closed, handler.next_rendezvous, handler.leave):
            try:
                call()
            except rdzv.RendezvousStateError as error:
                print("child:", error, flush=True)
        sys.exit(7)
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    info.store.set("key", "value")
    print("parent still has rank", info.rank, flush=True)
"""
    async with store.serve() as server:
        url = f"tcp://127.0.0.1:{free_port()}" if hosting else server.url
        async with start_python("-W", "ignore", "-c", HEAD + script, url) as child:
            for _ in range(3):
                assert "was made before fork(); make a new one in the child" in await child.line("child:")
            assert await child.line("ended") == "child ended with 7"
            assert await child.line("parent") == "parent still has rank 0"
            assert await child.wait() == 0


ENDINGS = {
    "return": ("", 0, []),
    "exit": ("sys.exit(3)", 3, []),
    "raise": ("raise ValueError('mine')", 1, ["ValueError: mine"]),
    "interrupt": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, ["KeyboardInterrupt"]),
    "fork": ("os._exit(0) if not (child := os.fork()) else os.waitpid(child, 0)", 0, []),
}


@pytest.mark.some_of(3)
@pytest.mark.parametrize("hosting", [False, True])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_process_that_exits_inside_the_context_exits_at_once_and_silently(ending: str, hosting: bool) -> None:
    """Regression: its threads ended all at once, so nodes wrote to a store that was gone, logged and waited."""
    act, status, last_words = ENDINGS[ending]
    script = f"""
import atexit, faulthandler, signal, time
faulthandler.enable()
atexit.register(lambda: print("seconds", time.monotonic() - ended_at, flush=True))  # runs after ours
from store.net import threads
atexit.unregister(threads._stop_all_loops)
atexit.register(threads._stop_all_loops)
context = rdzv.sync.connect(URL + "/job?min_nodes=1", node_id="a")
handler = context.__enter__()
info = handler.next_rendezvous()
info.store.set("key", "value")
print("rank", info.rank, flush=True)
ended_at = time.monotonic()
{act}
"""
    async with store.serve() as server:
        url = f"tcp://127.0.0.1:{free_port()}" if hosting else server.url
        async with start_python("-W", "ignore::DeprecationWarning", "-c", HEAD + script, url) as child:
            assert await child.line("rank") == "rank 0"
            assert float((await child.line("seconds")).split()[1]) < END_WITHIN / 2
            assert await child.wait() == status
            said = [line for line in child.output if not line.startswith((" ", "Traceback", "rank", "seconds"))]
            assert said == last_words
