"""The advice of each error, followed by the test, solves the problem."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rdzv.sync
import store.sync
from rdzv.cli.main import main
from store import StoreUsageError


@dataclass(frozen=True)
class Remedy:
    """A wrong call, the error with its advice, and the call that follows the advice."""

    wrong: Callable[[Any], object]
    error: type[Exception]
    advice: str
    then: Callable[[Any], object]


def with_flag(call: Callable[..., object], flag: str, error: type[Exception], advice: str) -> Remedy:
    """Return the remedy of a call that is wrong if this flag is False, and right if it is True."""
    return Remedy(partial(call, **{flag: False}), error, advice, partial(call, **{flag: True}))


def locked(client: store.sync.Client, name: str) -> int:
    with store.sync.recipes.lock(client, name) as held:
        return held.token


def served(**options: Any) -> str:
    with store.sync.serve("0.0.0.0", **options) as server:
        return server.url


OF_A_STORE = {
    "long key": Remedy(
        lambda it: it.put("k" * 5000, b""), store.LimitExceeded, "use a shorter one", lambda it: it.put("k", b"")
    ),
    "large value": Remedy(
        lambda it: it.put("k", b"x" * 2000),
        store.LimitExceeded,
        "store a reference to it instead",
        lambda it: it.put("k", b"file:///there"),
    ),
    "one key": Remedy(lambda it: it.get_many("k"), StoreUsageError, r"write \['k'\]", lambda it: it.get_many(["k"])),
    "no expectation": Remedy(
        lambda it: it.compare_and_set("k", b""),
        StoreUsageError,
        "exactly one of expected_revision and expected_value",
        lambda it: it.compare_and_set("k", b"", expected_revision=0),
    ),
    "no number": Remedy(
        lambda it: (it.put("k", b"x"), it.add("k", 1)),
        StoreUsageError,
        "no decimal number to add to",
        lambda it: (it.put("k", b"7"), it.add("k", 1)),
    ),
    "no time": Remedy(
        lambda it: it.ping(timeout=float("nan")),
        StoreUsageError,
        "give seconds, or None",
        lambda it: (it.ping(timeout=5), it.ping(timeout=None)),
    ),
    "a lease of one key": Remedy(
        lambda it: (it.put("k", b"", ttl=9), it.put("j", b"", lease=it.get("k").lease)),
        StoreUsageError,
        "grant one to put 'j' on",
        lambda it: it.put("j", b"", lease=it.grant(9)),
    ),
    "a negated condition": Remedy(
        lambda it: it.transact(when=[store.when.value("k") != b""], then=[]),
        TypeError,
        "use ==, exists or missing",
        lambda it: it.transact(when=[store.when.missing("k")], then=[]),
    ),
    "no name": Remedy(lambda it: locked(it, ""), StoreUsageError, "give it one", lambda it: locked(it, "a")),
    "open to all": Remedy(
        lambda _: served(), StoreUsageError, "give it a token", lambda _: served(token="0123456789abcdef" * 2)
    ),
    "open to all, and meant so": Remedy(
        lambda _: served(), StoreUsageError, "or say insecure", lambda _: served(insecure=True)
    ),
}


@pytest.mark.parametrize("remedy", OF_A_STORE.values(), ids=OF_A_STORE)
def test_advice_of_a_store(remedy: Remedy) -> None:
    with (
        store.sync.serve(limits=store.Limits(value_bytes_max=1000)) as server,
        store.sync.connect(server.url) as client,
    ):
        with pytest.raises(remedy.error, match=remedy.advice):
            remedy.wrong(client)
        remedy.then(client)


def test_advice_to_start_the_server_with_a_higher_limit(tmp_path: Any) -> None:
    def put(most: int) -> None:
        limits = store.Limits(value_bytes_max=most)
        with store.sync.serve(limits=limits, data_dir=tmp_path) as server, store.sync.connect(server.url) as client:
            client.put("k", b"x" * 2000)

    with pytest.raises(store.LimitExceeded, match="start the server with a higher limit"):
        put(1000)
    put(4000)


def answered(url: str, **options: Any) -> None:
    with store.sync.connect(url, timeout=3, **options) as client:
        client.ping()


TOKEN = "0123456789abcdef" * 2


def with_token(**options: Any) -> None:
    with store.sync.serve(token=TOKEN) as server:
        answered(server.url, **options)


def beside(folder: Path, name: str) -> None:
    with store.sync.serve(data_dir=folder / "data"), store.sync.serve(data_dir=folder / name):
        pass


def started(**options: Any) -> None:
    with store.sync.serve(**options):
        pass


def reached(write: Callable[[str], Any]) -> None:
    with store.sync.serve() as server:
        answered(write(server.url))


OF_A_SERVER = {
    "no token": Remedy(
        lambda _: with_token(), store.AuthenticationError, "pass token=", lambda _: with_token(token=TOKEN)
    ),
    "an empty token": Remedy(
        lambda _: started(token=""), StoreUsageError, "leave it out, or give one", lambda _: started(token=TOKEN)
    ),
    "no directory": Remedy(
        lambda _: started(data_dir=""), StoreUsageError, "name a directory", lambda at: started(data_dir=at / "data")
    ),
    "a directory in use": Remedy(
        lambda at: beside(at, "data"), StoreUsageError, "use another directory", lambda at: beside(at, "other")
    ),
    "no port": Remedy(
        lambda _: started(port=70_000), StoreUsageError, "a port from 0 to 65535", lambda _: started(port=0)
    ),
    "bytes": Remedy(
        lambda _: reached(str.encode), StoreUsageError, "must be a str; write tcp://", lambda _: reached(str)
    ),
    "a run": Remedy(
        lambda _: reached("{}/job".format), StoreUsageError, "write tcp://HOST:PORT", lambda _: reached(str)
    ),
}


@pytest.mark.parametrize("remedy", OF_A_SERVER.values(), ids=OF_A_SERVER)
def test_advice_of_a_server(remedy: Remedy, tmp_path: Path) -> None:
    with pytest.raises(remedy.error, match=remedy.advice):
        remedy.wrong(tmp_path)
    remedy.then(tmp_path)


@contextlib.contextmanager
def joined(url: str, **more: Any) -> Iterator[rdzv.sync.RendezvousInfo]:
    settings: dict[str, Any] = {"min_nodes": 1, "is_host": False, "join_timeout": 3, **more}
    with rdzv.sync.connect(url, **settings) as handler:
        yield handler.next_rendezvous()


def join(url: str, **more: Any) -> None:
    with joined(url, **more):
        pass


def of_shared_store(
    wrong: Callable[[Any], object], error: type[Exception], advice: str, then: Callable[[Any], object]
) -> Remedy:
    """Return the remedy of a call to the shared store of a round, whose key `value` has the value 1."""

    def carry_out(work: Callable[[Any], object], url: str) -> None:
        with joined(url) as info:
            info.store.set("value", "1")
            work(info.store)

    return Remedy(partial(carry_out, wrong), error, advice, partial(carry_out, then))


def read_changes(url: str, *, entered: bool) -> None:
    with rdzv.sync.connect(url, is_host=False) as handler, contextlib.ExitStack() as stack:
        changes = handler.changes()
        if entered:
            stack.enter_context(changes)
        changes.poll(0.1)


def closed(url: str, *, again: bool) -> None:
    with rdzv.sync.connect(url, is_host=False) as handler:
        pass
    if again:
        with rdzv.sync.connect(url, is_host=False) as handler:
            handler.status()
    else:
        handler.status()


def beside_a(url: str, **more: Any) -> None:
    """Let b join while a is in a round alone, and let a meet with it."""
    settings: dict[str, Any] = {"min_nodes": 1, "max_nodes": 2, "is_host": False, "last_call_timeout": 0.1}
    with rdzv.sync.connect(url, node_id="a", **settings) as a, ThreadPoolExecutor() as pool:
        a.next_rendezvous()
        joining = pool.submit(join, url, node_id="b", **{**settings, **more})
        with a.changes() as changes:
            changes.poll(1)
        again = None if joining.done() else pool.submit(a.next_rendezvous)
        joining.result()
        assert again is None or again.result().world_size == 2


def banned(url: str, *, again: bool) -> None:
    with rdzv.sync.connect(url, is_host=False, node_id="operator") as handler:
        handler.ban("a", "its disk is slow")
        if again:
            handler.unban("a")
        join(url, node_id="a")


async def looked_at(url: str, *, entered: bool) -> None:
    made = rdzv.connect(url, is_host=False)
    try:
        if not entered:
            await made.status()
    finally:
        async with made as handler:
            await handler.status()


def entered_twice(url: str, *, again: bool) -> None:
    made = rdzv.sync.connect(url, is_host=False)
    with made:
        pass
    with rdzv.sync.connect(url, is_host=False) if again else made:
        pass


def went_round(url: str, *, enters: bool = True, leaves: bool = True) -> None:
    with contextlib.ExitStack() as later:
        for number, each in enumerate(rdzv.sync.rounds(url, min_nodes=1, is_host=False, last_call_timeout=0.1)):
            with contextlib.ExitStack() as stack:
                if enters:
                    (stack if leaves else later).enter_context(each)
                if number:
                    return
                if enters and leaves:
                    with rdzv.sync.connect(url, is_host=False) as handler:
                        handler.set_closed()


OF_A_RUN = {
    "not connected": with_flag(
        lambda url, entered: asyncio.run(looked_at(url, entered=entered)),
        "entered",
        AttributeError,
        "write `async with rdzv.connect",
    ),
    "entered twice": with_flag(entered_twice, "again", rdzv.RendezvousStateError, "call it again for another node"),
    "a round not entered": with_flag(went_round, "enters", rdzv.RendezvousStateError, "enter each round"),
    "a round not left": with_flag(went_round, "leaves", rdzv.RendezvousStateError, "leave the block of"),
    "changes": with_flag(read_changes, "entered", rdzv.RendezvousStateError, "are read in"),
    "closed": with_flag(closed, "again", rdzv.RendezvousStateError, "connect again"),
    "banned": with_flag(banned, "again", rdzv.RendezvousRefusedError, "rdzv unban lets it in"),
    "no such order": Remedy(
        lambda url: join(url, rank_order="fastest"),
        rdzv.RendezvousSettingsError,
        "must be one of.* survivors_then_name",
        lambda url: join(url, rank_order="survivors_then_name"),
    ),
    "no seconds": Remedy(
        lambda url: join(f"{url}?ttl=soon"),
        rdzv.RendezvousSettingsError,
        "write for example ttl=10",
        lambda url: join(f"{url}?ttl=10"),
    ),
    "an empty queue": of_shared_store(
        lambda it: it.queue_pop("queue", block=False),
        rdzv.RendezvousError,
        "pass block=True to wait",
        lambda it: (it.queue_push("queue", "1"), it.queue_pop("queue", block=True)),
    ),
    "one key": of_shared_store(
        lambda it: it.multi_get("value"),
        TypeError,
        r"for a single one write keys=\[",
        lambda it: it.multi_get(["value"]),
    ),
    "other settings": Remedy(
        lambda url: beside_a(url, node_unit=2), rdzv.RendezvousSettingsError, "give all nodes the same", beside_a
    ),
    "no sizes": Remedy(
        lambda url: join(url, min_nodes=None),
        rdzv.RendezvousSettingsError,
        r"add \?min_nodes=2, say",
        lambda url: join(f"{url}?min_nodes=1", min_nodes=None),
    ),
    "no run": Remedy(
        lambda url: join(url.rpartition("/")[0]), rdzv.RendezvousSettingsError, "write for example .*/job-7", join
    ),
    "a typing error": Remedy(
        lambda url: join(f"{url}?join_timeuot=3"),
        rdzv.RendezvousSettingsError,
        "did you mean join_timeout",
        lambda url: join(f"{url}?join_timeout=3"),
    ),
    "keys and values": of_shared_store(
        lambda it: it.multi_set(["a", "b"], ["1"]),
        ValueError,
        "give one value for each key",
        lambda it: it.multi_set(["a", "b"], ["1", "2"]),
    ),
    "no queue": of_shared_store(
        lambda it: it.queue_push("value", "1"), ValueError, "a key of its own", lambda it: it.queue_push("queue", "1")
    ),
}


@pytest.mark.parametrize("remedy", OF_A_RUN.values(), ids=OF_A_RUN)
def test_advice_of_a_run(remedy: Remedy) -> None:
    with store.sync.serve() as server:
        url = f"{server.url}/job"
        with pytest.raises(remedy.error, match=remedy.advice):
            remedy.wrong(url)
        remedy.then(url)


# Of each command: the wrong arguments, the advice, and those that follow it. {0} is a run with node a, {1} a folder.
OF_A_COMMAND = {
    "resize {0}": ("give --min, --max or both", "resize {0} --max 2"),
    "ban {0}": ("name a NODE, or give --where", "ban {0} b"),
    "ban {0} --where rack": ("must be an attribute and its value: rack=17", "ban {0} --where rack=17"),
    "unban {0} b": ("rdzv status shows those there are", "status {0}"),
    "forget {0}": ("or forget it with --force", "forget {0} --force"),
    "reopen {0}": ("there is nothing to open", "status {0}"),
    "drain {0} b": ("`rdzv status` names those that are", "drain {0} a"),
    "check {1}/none": ("name the directory given as --data-dir", "check {1}/data"),
    "backup {1}/data {1}/taken": ("name a file that does not", "backup {1}/data {1}/copy"),
    "restore {1}/taken {1}/data": ("use another directory", "restore {1}/backup {1}/other"),
    "restore {1}/none {1}/new": ("name one that rdzv backup has made", "restore {1}/backup {1}/new"),
    "restore {1}/taken {1}/third": ("restore it from a backup", "restore {1}/backup {1}/third"),
}


def said(arguments: str, *names: object) -> int:
    try:
        return main(arguments.format(*names).split())
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(("wrong", "advice", "right"), [(one, *rest) for one, rest in OF_A_COMMAND.items()])
def test_advice_of_a_command(
    wrong: str, advice: str, right: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with store.sync.serve(data_dir=tmp_path / "data") as server:
        names = f"{server.url}/job", tmp_path
        (tmp_path / "taken").write_text("a shopping list")
        assert said("backup {1}/data {1}/backup", *names) == 0
        with rdzv.sync.connect(names[0], node_id="a", min_nodes=1, is_host=False) as handler:
            handler.next_rendezvous()
            assert said(wrong, *names) != 0
            assert advice in capsys.readouterr().err
            assert said(right, *names) == 0


def test_advice_of_the_launcher(tmp_path: Path) -> None:
    def launched(*command: str) -> str:
        whole = (sys.executable, "-m", "rdzv", "run", f"{server.url}/job?min_nodes=1", *command)
        return subprocess.run(whole, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path).stderr

    with store.sync.serve() as server:
        assert "write it at the end, after --" in launched()
        assert "write its path, or install it here" in launched("--", "work")
        (tmp_path / "work").write_text(f"#!{sys.executable}\nopen('done', 'x')")
        (tmp_path / "work").chmod(0o700)
        launched("--", "./work")
    assert (tmp_path / "done").exists()
