"""Reads a run's status, and the notes that its nodes send with keep-alives."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from rdzv.core.absent import NAMED_MOST, AbsenceReport
from rdzv.core.decision import wait_reason_text
from rdzv.core.history import History, TimeOfDayNote, nodes_gone_before_round
from rdzv.core.keys import Keys
from rdzv.core.report import RunStatus, find_closing_incident
from rdzv.core.round import Member, Participant, Round, rank_bucket_number
from rdzv.core.state import Ban, Head, NodeRecord, Phase, Progress, unpack_settings
from rdzv.core.stopping import Drain
from rdzv.core.stored import log_unreadable
from rdzv.core.stuck.accusing import UNKNOWN, Accusation
from rdzv.core.stuck.judging import LastStepNote
from rdzv.core.stuck.pace import StepOf
from rdzv.core.stuck.step_log import StepNote
from rdzv.errors import RendezvousStateError, RoundSupersededError, mark_run
from store import LeaseNotFound, Unsupported
from store.messages import TimeToLive
from store.printable import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from rdzv.core.stopping import Resized
    from store import Entry, Store

DRAIN_KEPT = 60.0  # the most seconds that a drain outlives its deadline, for nodes that return after an outage


class RunUsage(NamedTuple):
    """One run's size in the store; `bytes` and `age` are None if all keys were listed, as on etcd."""

    run_id: str
    keys: int
    bytes: int | None = None
    age: float | None = None  # seconds since the first key


async def read_run(store: Store, keys: Keys, head: Head, *, time_of_day: float) -> tuple[RunStatus, History]:
    """Return a run's status at `time_of_day`, its present time of day, and its history."""
    records = await read_nodes(store, keys)
    since = {node_id: record.since for node_id, record in records.items() if record.since}
    releases = Counter(record.release or "an unknown release" for record in records.values())
    addresses = {node_id: record.address for node_id, record in records.items()}
    members, ranked = await _take_live_members(store, keys, head, records)
    waiting = sorted(records.values(), key=lambda record: record.arrival)
    after = head.progress.spares_after if head.progress is not None else None
    named = head.progress.spare_ids if head.progress is not None else ()
    spares = [
        record.node_id
        for record in waiting
        if record.node_id in named or (after is not None and record.arrival > after and record.node_id not in ranked)
    ]
    settings = await _read_settings(store, keys)
    accusations = [Accusation.unpack_or_log(entry.key, entry.value) for entry in await store.list(keys.accusations)]
    elapsed = _report_age(head, store.time(), time_of_day)
    absent = _age_absence_report(head, elapsed=elapsed)
    all_bans = await _read_bans(store, keys)
    bans = {name: ban for name, ban in all_bans.items() if not ban.where}
    history = await read_history(store, keys) if head.round is not None else History()
    if head.round is not None and head.closed is None:
        known = {*addresses, *(one.node_id for one in absent.missing)}
        gone = nodes_gone_before_round(history, head.round.number, here=known, now=time_of_day)
        absent = absent.replace(missing=(*absent.missing, *gone)[:NAMED_MOST], count=absent.count + len(gone))
    counts = {"members": len(members), "waiting": len(waiting)}
    roster = await _read_last_roster(store, keys, head) if head.closed or absent.missing else {}
    outside = {record.node_id: record.attributes for record in waiting}
    outside |= {one.node_id: roster[one.node_id].attributes for one in absent.missing if one.node_id in roster}
    closing = find_closing_incident(history.chapters[-1]) if head.closed and history.chapters else None
    steps, awaits = await read_steps_and_waits(store, keys, head, {member.node_id for member in members})
    status = RunStatus(
        run_id=keys.run_id,
        round=head.round.number if head.round else None,
        now=time_of_day,
        phase=_phase_of(head),
        phase_for=_seconds_in_phase(head, history, settings, elapsed=elapsed, waited=absent.waited, at=time_of_day),
        last_call_left=_last_call_seconds_left(head, elapsed) if _phase_of(head) is Phase.LAST_CALL else None,
        closing=head.closed,
        closed_at=closing.at if closing else None,
        standstill=head.progress.standstill if head.progress and _round_after_progress(head) is None else "",
        attributes=outside,
        last_members=tuple(roster.values()) if head.closed else (),
        reason=_run_wait_reason(head, elapsed=elapsed, **counts),
        waits_for=_run_wait_reason(head, elapsed=None, **counts),
        members=tuple(sorted(members, key=lambda member: member.rank)),
        waiting=tuple(record.node_id for record in waiting),
        spares=tuple(spares),
        coordinator=head.coordinator.node_id if head.coordinator else None,
        world_size=head.round.size if head.round else 0,
        banned=bans,
        banned_where={ban.where: ban for ban in all_bans.values() if ban.where},
        settings=settings,
        bootstrap=(head.round.host, head.round.port) if head.round else None,
        closed=head.closed.reason if head.closed else None,
        unfit={
            node_id: entry.value.decode(errors="replace")
            for entry in await store.list(keys.unfits)
            if (node_id := entry.key.removeprefix(keys.unfits)) not in bans
        },
        releases=dict(releases),
        missing=absent.missing,
        missing_count=absent.count,
        waited=absent.waited,
        since=since,
        addresses={**{one.node_id: one.address for one in absent.missing if one.address}, **addresses},
        draining=await _read_drains(store, keys, addresses),
        resized=_pending_resize(head),
        accused=tuple(
            sorted(
                (one.accused, one.by, one.why)
                for one in accusations
                if one is not None and head.round and one.round == head.round.number and one.accused != UNKNOWN
            )
        ),
        steps=steps,
        awaits=awaits,
    )
    return status, history


async def _take_live_members(
    store: Store, keys: Keys, head: Head, records: dict[str, NodeRecord]
) -> tuple[list[Participant], set[str]]:
    """Return the live members of the last round, and the ids of all its members. Remove live members from `records`."""
    members: list[Participant] = []
    ranked: set[str] = set()
    if head.round is None:
        return members, ranked
    for entry in await store.list(keys.ranks(head.round.number, head.round.term)):
        try:
            bucket = Member.unpack_all(entry.value)
        except RendezvousStateError as error:
            log_unreadable(entry.key, error)
            continue
        for member in bucket:
            ranked.add(member.node_id)
            held = records.get(member.node_id)
            if held is not None and held.arrival == member.arrival:
                members.append(participant_of(records.pop(member.node_id), member.rank))
    return members, ranked


def participant_of(record: NodeRecord, rank: int) -> Participant:
    """Return the `Participant` with this record and rank."""
    return Participant(
        node_id=record.node_id, rank=rank, address=record.address, payload=record.payload, attributes=record.attributes
    )


async def _read_settings(store: Store, keys: Keys) -> dict[str, Any]:
    entry = await store.get(keys.settings)
    try:
        return unpack_settings(entry.value) if entry is not None else {}
    except RendezvousStateError as error:
        log_unreadable(keys.settings, error)
        return {}


async def _read_bans(store: Store, keys: Keys) -> dict[str, Ban]:
    bans = {}
    for entry in await store.list(keys.bans):
        ban = Ban.unpack_or_log(entry.key, entry.value)
        if ban is None:
            continue
        if ban.lasts is not None and entry.lease is not None:
            try:
                ban = ban.replace(ends_in=(await store.call(TimeToLive(lease=entry.lease))).remaining)
            except LeaseNotFound:
                continue  # the ban has just expired
        bans[entry.key.removeprefix(keys.bans)] = ban
    return bans


def drain_ttl(store: Store, within: float) -> float:
    """Return the TTL of a drain's own lease, from which readers compute the drain's age."""
    return min(within + DRAIN_KEPT, store.lease_ttl_max)


async def _read_drains(store: Store, keys: Keys, here: Collection[str]) -> dict[str, tuple[float, str]]:
    drains = {}
    for entry in await store.list(keys.drains):
        node_id, drain = entry.key.removeprefix(keys.drains), Drain.unpack_or_log(entry.key, entry.value)
        if drain is not None and node_id in here and entry.lease is not None:
            with contextlib.suppress(LeaseNotFound):  # the drain has just ended
                left = (await store.call(TimeToLive(lease=entry.lease))).remaining
                drains[node_id] = max(drain.within - drain_ttl(store, drain.within) + left, 0.0), drain.reason
    return drains


async def read_steps_and_waits(
    store: Store, keys: Keys, head: Head, members: set[str]
) -> tuple[dict[str, StepOf], dict[str, tuple[str, float]]]:
    """Return the reported steps, and the reported waits (the key, and the seconds so far), by member."""
    if head.round is None or not members:
        return {}, {}
    notes = {node_id: heard for node_id, heard in (await read_step_notes(store, keys)).items() if node_id in members}
    steps = {
        node_id: StepOf(
            step=heard.note.step,
            age=heard.note.age + heard.ago,
            report_age=heard.ago,
            rate=heard.note.rate,
            busy=(heard.note.what or "something") if heard.note.busy > heard.ago else "",
            waits=heard.note.waits,
            away=heard.note.away,
            first=heard.note.first,
        )
        for node_id, heard in notes.items()
        if heard.note.round == head.round.number
    }
    awaits = {
        node_id: ("" if heard.note.busy else heard.note.what, heard.note.waited + heard.ago)
        for node_id, heard in notes.items()
        if heard.note.waits
    }
    return steps, awaits


async def read_step_notes(store: Store, keys: Keys) -> Mapping[str, LastStepNote]:
    """Return each node's last note, if any, by node id."""
    heard = {}
    for one in await store.notes(keys.nodes):
        if one.note:
            try:
                note = StepNote.unpack(one.note)
            except RendezvousStateError:
                continue  # another program wrote the note
            heard[one.key.removeprefix(keys.nodes)] = LastStepNote(note=note, ago=one.age)
    return heard


async def read_run_time(store: Store, keys: Keys) -> float:
    """Return the run's present time of day: from the coordinator's note, or the note on the run's lease.

    If the store has neither note, as after its restart, return the time of day in the last progress, or this machine's.
    """
    for one in (*await store.notes(keys.coordinator), *await store.notes(keys.lease)):
        if one.note and (said := TimeOfDayNote.unpack_or_log(one.key, one.note)) is not None:
            return said.hour + one.age
    entry = await store.get(keys.progress)
    progress = Progress.unpack_or_log(entry.key, entry.value) if entry is not None else None
    return (progress.absent.said_at if progress is not None else 0.0) or time.time()


async def read_nodes(store: Store, keys: Keys) -> dict[str, NodeRecord]:
    """Return the records of the nodes in the run by id, without leaving ones."""
    records = {}
    for entry in await store.list(keys.nodes):
        node_id = entry.key.removeprefix(keys.nodes)
        if "/" in node_id:
            continue
        try:
            record = NodeRecord.unpack(entry.value, node_id=node_id, arrival=entry.mod_revision)
        except RendezvousStateError:
            continue  # another program wrote the record
        if not record.left:
            records[node_id] = record
    return records


async def read_nodes_of_all_runs(store: Store) -> dict[Keys, list[Entry]]:
    """Return the entries of the nodes of all runs, by run, without values; raise Unsupported on etcd."""
    found: dict[Keys, list[Entry]] = {}
    for group in await store.groups():
        # A group of one run has its nodes under `nodes/`; of a group of several runs, list all keys.
        entries = await store.list(f"{group.name}nodes/", keys_only=True)
        for entry in entries or await store.list(group.name, keys_only=True):
            root, _, node_id = entry.key.rpartition("/nodes/")
            prefix, _, run_id = root.rpartition("/")
            if run_id and node_id and not node_id.startswith("/") and entry.lease:
                found.setdefault(Keys(prefix, run_id), []).append(entry)
    return found


async def usage_by_run(store: Store, prefix: str) -> dict[str, RunUsage]:
    """Return each run's size under a prefix, by the store's count, or by listing all keys."""
    root = f"{prefix}/"
    with contextlib.suppress(Unsupported):
        groups = [group for group in await store.groups() if group.name.startswith(root)]
        if all(group.name.count("/", len(root)) == 1 for group in groups):  # each group is one run
            runs = ((group.name[len(root) : -1], group) for group in groups)
            return {run_id: RunUsage(run_id, group.keys, group.bytes, group.age) for run_id, group in runs}
    counted = count_keys_by_run((entry.key for entry in await store.list(root, keys_only=True)), root)
    return {run_id: RunUsage(run_id, keys) for run_id, keys in counted.items()}


def count_keys_by_run(keys: Iterable[str], root: str) -> Counter[str]:
    """Count keys by run id. Skip keys with an empty id: on etcd, receipts of writes."""
    parts = (key[len(root) :].partition("/") for key in keys)
    return Counter(run_id for run_id, slash, _ in parts if run_id and slash)


async def read_history(store: Store, keys: Keys) -> History:
    """Return a run's history."""
    entry = await store.get(keys.history)
    return (History.unpack_or_log(entry.key, entry.value) if entry is not None else None) or History()


async def read_round_members(store: Store, keys: Keys, round: Round) -> list[Participant]:
    """Return a round's members by rank; raise RoundSupersededError if a later round has replaced it."""
    entries = await store.list(keys.roster(round.number, round.term))
    roster = [one for entry in entries for one in Participant.unpack_all(entry.value)]
    if len(roster) != round.size:
        what = f"round {round.number} of run {keys.run_id}"
        why = f"{what} has been replaced by a later one, its roster with it; call next_rendezvous"
        raise mark_run(keys.run_id, RoundSupersededError(why))
    return sorted(roster, key=lambda participant: participant.rank)


async def find_member(store: Store, keys: Keys, round: Round, *, node_id: str, arrival: int) -> Member | None:
    """Return the round's member with this arrival, if any."""
    entry = await store.get(keys.ranks(round.number, round.term, rank_bucket_number(node_id, round.buckets)))
    members = Member.unpack_all(entry.value) if entry is not None else []  # a later round deletes the ranks of this one
    return next((one for one in members if one.node_id == node_id and one.arrival == arrival), None)


def _phase_of(head: Head) -> Phase:
    if head.closed is not None:
        return Phase.CLOSED
    if _round_after_progress(head) is not None:
        return Phase.TRAINING
    # Until a node arrives, a reopened run has the progress written at its closing.
    phase = head.progress.phase if head.progress is not None else Phase.GATHERING
    return Phase.GATHERING if phase is Phase.CLOSED else phase


def run_wait_reason(head: Head, status: RunStatus, *, now: float) -> str:
    """Return why the run waits, as in an earlier `status`, with durations as of `now`."""
    return _run_wait_reason(
        head, members=len(status.members), waiting=len(status.waiting), elapsed=_report_age(head, now, status.now)
    )


def _run_wait_reason(head: Head, *, members: int, waiting: int, elapsed: float | None) -> str:
    if head.closed is not None:
        reason = f": {head.closed.reason}" if head.closed.reason else ""
        return f"the run is closed by {head.closed.by or 'an unknown caller'}{reason}"
    if not members and not waiting:
        return "no node is here"
    if (round := _round_after_progress(head)) is not None:
        return f"round {round.number} stands with {plural(round.size)}"
    return wait_reason_text(head.progress, elapsed=elapsed)


def _last_call_seconds_left(head: Head, elapsed: float) -> float | None:
    left = head.progress.last_call_left if head.progress is not None else None
    return None if left is None else max(left - elapsed, 0.0)


def _seconds_in_phase(
    head: Head, history: History, settings: Mapping[str, Any], *, elapsed: float, waited: float | None, at: float
) -> float | None:
    last, began = history.chapters[-1] if history.chapters else None, None
    match _phase_of(head):
        case Phase.LAST_CALL:
            left, lasts = _last_call_seconds_left(head, elapsed), settings.get("last_call_timeout")
            return None if left is None or not isinstance(lasts, (int, float)) else max(lasts - left, 0.0)
        case Phase.GATHERING:
            began = None if last is None or last.at is None or last.stopped is None else last.at + last.stopped
            if waited is not None:
                return waited
        case Phase.TRAINING:
            began = None if last is None else last.at
        case Phase.CLOSED:
            closing = find_closing_incident(last) if last is not None else None
            began = None if closing is None else closing.at
    return None if began is None else max(at - began, 0.0)


async def _read_last_roster(store: Store, keys: Keys, head: Head) -> dict[str, Participant]:
    if head.round is None:
        return {}
    try:
        return {one.node_id: one for one in await read_round_members(store, keys, head.round)}
    except (RendezvousStateError, RoundSupersededError):
        return {}


def _pending_resize(head: Head) -> Resized | None:
    in_force = head.resized is None or (head.round is not None and head.round.revision > head.resized.revision)
    return None if in_force else head.resized


def _age_absence_report(head: Head, *, elapsed: float) -> AbsenceReport:
    if head.progress is None or head.closed is not None or _round_after_progress(head) is not None:
        return AbsenceReport()
    absent = head.progress.absent
    missing = tuple(one.replace(ago=None if one.ago is None else one.ago + elapsed) for one in absent.missing)
    return absent.replace(missing=missing, waited=None if absent.waited is None else absent.waited + elapsed)


def _report_age(head: Head, now: float, time_of_day: float) -> float:
    """Return the seconds since the run's progress was written, even if this node did not watch the run then."""
    since = now - head.progress_at
    said_at = head.progress.absent.said_at if head.progress is not None else 0.0
    return max(since, time_of_day - said_at) if head.progress_found and said_at else since


def _round_after_progress(head: Head) -> Round | None:
    """Return the last round if it was committed after the run's progress was written."""
    return None if head.progress and head.round and head.progress.round >= head.round.number else head.round
