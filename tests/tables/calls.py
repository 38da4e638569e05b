"""Rows: every public call, how it is made, and its permitted effects on other nodes. Each row is for both twins."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import rdzv
import rdzv.sync
import store
import store.sync
from rdzv.errors import RendezvousError
from store.errors import StoreError
from store.messages import Put

__all__ = ["AWAITED", "BLOCKING", "CALLS", "DOCUMENTED", "NO_ACTS", "Call", "acts_of"]

WITHIN = 1.5  # seconds: the time limit of every call that takes one, or whose handler has one

AWAITED: dict[str, type] = {
    "handler": rdzv.Handler,
    "round": rdzv.Round,
    "shared": rdzv.SharedStore,
    "changes": rdzv.Changes,
    "info": rdzv.RendezvousInfo,
    "client": store.Client,
    "watch": store.Watch,
    "lease": store.Lease,
    "kept": store.HeldLease,
}
BLOCKING: dict[str, type] = {
    "handler": rdzv.sync.Handler,
    "round": rdzv.sync.Round,
    "shared": rdzv.sync.SharedStore,
    "changes": rdzv.sync.Changes,
    "info": rdzv.sync.RendezvousInfo,
    "client": store.sync.Client,
    "watch": store.sync.Watch,
    "lease": store.BlockingLease,
    "kept": store.BlockingKeptLease,
}

OF_RENDEZVOUS = RendezvousError, ValueError, TypeError, store.LimitExceeded
DOCUMENTED: dict[str, tuple[type[BaseException], ...]] = {
    "handler": (RendezvousError,),
    "round": (RendezvousError, TypeError),
    "shared": OF_RENDEZVOUS,
    "changes": (RendezvousError,),
    "info": (RendezvousError,),
    "client": (StoreError,),
    "watch": (StoreError,),
    "lease": (StoreError,),
    "kept": (StoreError,),
    "recipes": (StoreError,),
}
"""The errors that the documentation of each object names. A `UnicodeError` is a `ValueError`, and none of them."""

NO_ACTS: dict[str, str] = {
    "handler": "call spawn open_blocking_shared_store check_usable usable_node open_blocking_store connect",  # drivers
    "round": "prepare require_left",  # of the loop
    "shared": "blocking end_calls end_waits without_wait_reports ignoring_losses reopened",  # of handlers and adapters
    "changes": "",
    "info": "count index of",  # of tuples; and of the rooms that make it
    "client": (
        "abandon_request start_request send_ping is_pending cap_retry_pauses call send_and_forget check_usable fail "
        "interrupt end_waits set_writable on_connection_change handle_bytes notify_connection_change time"
    ),  # of watches, leases, recipes and nodes
    "watch": "",
    "lease": "",
    "kept": "note_disconnect keep release renew_now",  # of `KeptLeases`
}


@dataclass(frozen=True)
class Call:
    """A call.

    Attributes:
        of: The object that has it.
        name: Its name.
        act: Makes it, with a text for each argument that takes one.
        takes_text: True if there is such an argument.
        ends: True if it may end the round, the run or the node for others, as its documentation says.
        open_ended: True if it has no time limit of its own, since it waits for other nodes.
    """

    of: str
    name: str
    act: Callable[[Any, Any], Any]
    takes_text: bool = False
    ends: bool = False
    open_ended: bool = False
    blocking_only: bool = False
    awaited_only: bool = False

    def __str__(self) -> str:
        return f"{self.of}.{self.name}"


def _rows() -> list[Call]:
    rows: list[Call] = []

    def of(owner: str) -> Callable[..., None]:
        def row(name: str, act: Callable[[Any, Any], Any], **flags: bool) -> None:
            rows.append(Call(owner, name, act, **flags))

        return row

    text = {"takes_text": True}

    handler = of("handler")
    handler("next_rendezvous", lambda it, _: it.next_rendezvous(), ends=True)
    handler("num_nodes_waiting", lambda it, _: it.num_nodes_waiting())
    handler("num_nodes_changed", lambda it, _: it.num_nodes_changed())
    handler("is_closed", lambda it, _: it.is_closed())
    handler("set_closed", lambda it, word: it.set_closed(word), ends=True, **text)
    handler("give_up", lambda it, word: it.give_up(word), ends=True, **text)
    handler("leave", lambda it, _: it.leave(), ends=True)
    handler("leaves_because", lambda it, word: it.leaves_because(word), **text)
    handler("aclose", lambda it, _: it.aclose(), ends=True, awaited_only=True)
    handler("close", lambda it, _: it.close(), ends=True, blocking_only=True)
    handler("drain", lambda it, word: it.drain(60, word), ends=True, **text)
    handler("resize", lambda it, _: it.resize(min_nodes=2, max_nodes=3))
    handler("keep", lambda it, word: it.keep(word, b"data"), **text)
    handler("restore", lambda it, word: it.restore(word), **text)
    handler("accuse", lambda it, word: it.accuse(1 - it.membership.rank if it.membership else 0, word), **text)
    handler("all_here", lambda it, _: it.all_here(timeout=WITHIN))
    handler("change_counts", lambda it, _: it.change_counts(bytes))
    handler("store_host", lambda it, _: it.store_host())
    handler("ban", lambda it, word: it.ban("stranger", word), **text)
    handler("ban", lambda it, word: it.ban(reason="why", where=("rack", word)), **text)
    handler("unban", lambda it, word: it.unban(word), **text)
    handler("unban", lambda it, word: it.unban(where=("rack", word)), **text)
    handler("answer_operator", lambda it, word: it.answer_operator("question", word), **text)
    handler("status", lambda it, _: it.status())
    handler("statuses", lambda it, _: it.statuses())
    handler("questions", lambda it, _: it.questions(), awaited_only=True, open_ended=True)
    handler("status_and_cost", lambda it, _: it.status_and_cost())
    handler("history", lambda it, _: it.history())
    handler("ping", lambda it, _: it.ping())
    handler("changes", lambda it, _: it.changes())
    handler("describe_gone_node", lambda it, word: it.describe_gone_node(word), **text)
    handler("draining_members", lambda it, _: it.draining_members())

    round = of("round")
    round("check", lambda it, _: it.check(1))
    round("beat", lambda it, _: it.beat(1))
    round("busy", lambda it, word: it.busy(1, word), **text)
    round("keep", lambda it, word: it.keep(word, b"data"), **text)
    round("restore", lambda it, word: it.restore(word), **text)
    round("accuse", lambda it, word: it.accuse(1 - it.rank, word), **text)
    round("participants", lambda it, _: it.participants())

    shared = of("shared")
    shared("set", lambda it, word: it.set(word, word), **text)
    shared("get", lambda it, word: it.get(word), **text)
    shared("add", lambda it, word: it.add(word, 1), **text)
    shared("append", lambda it, word: it.append(word, word), **text)
    shared("wait", lambda it, word: it.wait([word], WITHIN), **text)
    shared("check", lambda it, word: it.check([word]), **text)
    shared("compare_set", lambda it, word: it.compare_set(word, "", word), **text)
    shared("delete_key", lambda it, word: it.delete_key(word), **text)
    shared("num_keys", lambda it, _: it.num_keys())
    shared("list_keys", lambda it, _: it.list_keys())
    shared("multi_get", lambda it, word: it.multi_get([word, "other"]), **text)
    shared("multi_set", lambda it, word: it.multi_set([word, "other"], [word, b"x"]), **text)
    shared("queue_push", lambda it, word: it.queue_push(word, word), **text)
    shared("queue_pop", lambda it, word: it.queue_pop(word), **text)
    shared("queue_len", lambda it, word: it.queue_len(word), **text)
    shared("barrier", lambda it, word: it.barrier(word, 2, WITHIN), **text)
    shared("set_timeout", lambda it, _: it.set_timeout(WITHIN))
    shared("clone", lambda it, _: it.clone().num_keys())
    shared("close", lambda it, _: it.close(), blocking_only=True)

    of("changes")("poll", lambda it, _: it.poll(1.0))
    info = of("info")
    info("participants", lambda it, _: it.participants())
    info("superseded", lambda it, _: it.superseded())
    info("on_superseded", lambda it, _: it.on_superseded(lambda _: None))

    client = of("client")
    client("put", lambda it, word: it.put(word, b"value"), **text)
    client("get", lambda it, word: it.get(word), **text)
    client("get_many", lambda it, word: it.get_many([word, "other"]), **text)
    client("list", lambda it, word: it.list(word), **text)
    client("count", lambda it, word: it.count(word), **text)
    client("delete", lambda it, word: it.delete(word), **text)
    client("delete_prefix", lambda it, word: it.delete_prefix(word or "word"), **text)
    client("compare_and_set", lambda it, word: it.compare_and_set(word, b"v", expected_revision=0), **text)
    client("add", lambda it, word: it.add(word, 1), **text)
    client("append", lambda it, word: it.append(word, b"value"), **text)
    client("transact", lambda it, word: it.transact(when=[store.when.missing(word)], then=[Put(word, b"")]), **text)
    client("wait", lambda it, word: it.wait([word], timeout=WITHIN), **text)
    client("grant", lambda it, _: it.grant(WITHIN))
    client("kept_lease", lambda it, _: it.kept_lease(WITHIN))
    client("watch", lambda it, word: it.watch(word), **text)
    client("ping", lambda it, _: it.ping())
    client("stats", lambda it, _: it.stats())
    client("groups", lambda it, _: it.groups())
    client("notes", lambda it, word: it.notes(word), **text)
    client("aclose", lambda it, _: it.aclose(), awaited_only=True)
    client("close", lambda it, _: it.close(), blocking_only=True)

    of("watch")("batches", lambda it, _: it.batches(), open_ended=True)
    of("watch")("close", lambda it, _: it.close(), blocking_only=True)
    lease = of("lease")
    lease("keep_alive", lambda it, _: it.keep_alive())
    lease("revoke", lambda it, _: it.revoke())
    lease("time_to_live", lambda it, _: it.time_to_live())
    of("kept")("check", lambda it, _: it.check())

    recipes = of("recipes")  # over a client, as `functools.partial`s of one object
    for name in ("lock", "write_lock", "read_lock"):
        recipes(name, lambda it, word, name=name: getattr(it, name)(word, timeout=WITHIN), **text)
    recipes("leadership", lambda it, word: it.leadership(word, b"me", timeout=WITHIN), **text)
    recipes("leader", lambda it, word: it.leader(word), **text)
    recipes("leaders", lambda it, word: it.leaders(word), **text)
    return rows


CALLS: list[Call] = _rows()


def acts_of(kind: type) -> set[str]:
    """Return the names of the public methods of a class, also those that come from its bases."""
    return {
        name
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_") and not isinstance(member, property) and callable(member)
    }
