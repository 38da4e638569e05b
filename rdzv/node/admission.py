"""Shell: who may join: a node's health check and the bans on it (promise R17), the settings all must come with (R18).

A ban is a key under the head, so that every node hears of it; a node's arrival is conditional on there being none for
it. Why a node failed its health check lies beside the run, for `status` to show.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING

from rdzv.config.config_errors import refuse, shown
from rdzv.config.settings import describe_difference
from rdzv.config.value_types import NAME
from rdzv.core.state import Ban, Round, pack_settings, unpack_settings
from rdzv.errors import RendezvousRefusedError, RendezvousSettingsError
from rdzv.node.status import find_member, read_nodes
from store import ConditionFailed, when

if TYPE_CHECKING:
    from rdzv.config.settings import Settings
    from rdzv.core.keys import Keys
    from store import Entry, Store

__all__ = ["agree_on_settings", "check_health", "check_node_id", "put_ban"]


def check_node_id(node_id: str) -> None:
    """Refuse what no node can be called; a ban of it would look as if it did something.

    Raises:
        RendezvousSettingsError: It says what a node may be called.
    """
    try:
        NAME.convert(node_id)
    except (TypeError, ValueError):
        refuse(f"node_id={shown(node_id)} must be {NAME.limit}")


async def check_health(store: Store, keys: Keys, settings: Settings, *, node_id: str) -> None:
    """Run the user's health check, if there is one; a node that fails it stays out, and everybody can read why.

    Raises:
        RendezvousRefusedError: It failed: it raised, or returned anything but None and True.
    """
    check = settings.health_check
    if check is None:
        return
    try:
        verdict = check()
        if inspect.isawaitable(verdict):
            verdict = await verdict
    except Exception as error:  # noqa: BLE001  whatever goes wrong in a health check is a failed one
        verdict = f"{type(error).__name__}: {error}"
    if verdict is None or verdict is True:
        await store.delete(keys.unfit(node_id))  # it may have failed before
        return
    reason = f"failed its health check: {verdict}" if isinstance(verdict, str) else "failed its health check"
    await store.put(keys.unfit(node_id), reason.encode(), ttl=settings.closed_ttl)
    raise RendezvousRefusedError(f"run {keys.run_id}: node {node_id} {reason}")


async def agree_on_settings(store: Store, keys: Keys, settings: Settings, *, node_id: str, there: Entry | None) -> None:
    """See to it that the run has this node's settings; if nobody else is in it, they are rewritten.

    Args:
        store: The store.
        keys: The run's keys.
        settings: This node's.
        node_id: This node.
        there: Those of the run, as they were a moment ago.

    Raises:
        RendezvousSettingsError: Others are in it, with other settings.
    """
    ours = pack_settings(settings.shared())
    if there is None:
        await store.compare_and_set(keys.settings, ours, expected_revision=0)
    elif there.value != ours:
        others = (await read_nodes(store, keys)).keys() - {node_id}
        if others:
            difference = describe_difference(settings.shared(), unpack_settings(there.value))
            raise RendezvousSettingsError(f"run {keys.run_id} was started with other settings: {difference}")
        await store.compare_and_set(keys.settings, ours, expected_revision=there.mod_revision)


async def put_ban(store: Store, keys: Keys, node_id: str, ban: Ban, *, keep: float) -> None:
    """Ban a node. If it waits, or the ban says now, its record goes at once; else it finishes its round.

    Args:
        store: The store.
        keys: The run's keys.
        node_id: Who is banned.
        ban: Why, and how.
        keep: Seconds for which the ban is kept if there is no round yet whose lease it could be on.
    """
    round = await _last_round(store, keys)
    lease = round.lease if round is not None and round.lease is not None else (await store.grant(keep)).id
    await store.put(keys.banned(node_id), ban.pack(), lease=lease)
    key = keys.node(node_id)
    while (there := await store.get(key)) is not None:
        if not ban.now and await _is_live_member(store, keys, node_id, there.mod_revision):
            return
        with contextlib.suppress(ConditionFailed):  # it has just arrived again, or left: look again
            await store.delete(key, when=(when.mod_revision(key) == there.mod_revision,))


async def _is_live_member(store: Store, keys: Keys, node_id: str, arrival: int) -> bool:
    round = await _last_round(store, keys)
    return round is not None and await find_member(store, keys, round, node_id=node_id, arrival=arrival) is not None


async def _last_round(store: Store, keys: Keys) -> Round | None:
    entry = await store.get(keys.round)
    return Round.unpack(entry.value, revision=entry.mod_revision) if entry is not None else None
