"""The nouns: they come back from the store as they went, and what is not ours is refused in words."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.keys import Keys
from rdzv.core.round import (
    ARRIVALS_MOST,
    GONE_MOST,
    RUNS_MOST,
    Arrivals,
    Member,
    Participant,
    Round,
    bucket_of,
    pack_members,
    pack_roster,
    place,
    unpack_members,
    unpack_roster,
)
from rdzv.core.state import Closed, NodeRecord, Phase, Progress, pack_settings, unpack_settings
from rdzv.errors import RendezvousStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEYS = Keys(prefix="/rdzv", run_id="job-7")

text = st.text(st.characters(codec="utf-8"), max_size=12)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
whole = st.integers(0, 2**63 - 1)
payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | text | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
attributes = st.dictionaries(text, text, max_size=3)
records = st.builds(
    NodeRecord,
    node_id=names,
    incarnation=text,
    arrived_after=st.integers(-1, 10**9),
    address=text,
    port=st.integers(0, 65535),
    payload=payloads,
    attributes=attributes,
    requested_rank=st.none() | st.integers(-(2**31), 2**31),
    left=st.booleans(),
    arrival=whole,
)
progresses = st.builds(
    Progress,
    phase=st.sampled_from(Phase),
    round=st.integers(-1, 10**9),
    joined=whole,
    needed=whole,
    capacity=whole,
    live=whole,
    waiting=whole,
    spares=whole,
    spares_after=st.none() | whole,
    last_call_left=st.none() | st.floats(0, 1e9),
    lost=whole,
    lost_ids=st.lists(names, max_size=3).map(tuple),
    departed=whole,
    departed_ids=st.lists(names, max_size=3).map(tuple),
    last_arrival=whole,
)


# Keys.


def test_the_keys_of_a_run_are_where_the_module_says() -> None:
    assert KEYS.settings == "/rdzv/job-7/settings"
    assert KEYS.node("a") == "/rdzv/job-7/nodes/a"
    assert KEYS.coordinator == "/rdzv/job-7/head/coordinator"
    assert KEYS.round == "/rdzv/job-7/head/round"
    assert KEYS.closed == "/rdzv/job-7/head/closed"
    assert KEYS.progress == "/rdzv/job-7/head/progress"
    assert KEYS.ranks(3, 17, 0) == "/rdzv/job-7/rounds/3/17/ranks/0"
    assert KEYS.roster(3, 17, 2) == "/rdzv/job-7/rounds/3/17/roster/2"
    assert KEYS.shared(3, 17) == "/rdzv/job-7/store/3/17/"


def test_prefixes_cover_what_is_under_them_and_nothing_else() -> None:
    head = (KEYS.coordinator, KEYS.round, KEYS.closed, KEYS.progress)
    assert all(key.startswith(KEYS.head) for key in head)
    assert not any(key.startswith(KEYS.head) for key in (KEYS.settings, KEYS.node("a"), KEYS.ranks(0, 1, 0)))
    assert KEYS.ranks(3, 17, 0).startswith(KEYS.ranks(3, 17))
    assert KEYS.roster(3, 17, 0).startswith(KEYS.roster(3, 17))
    assert not KEYS.attempt(30, 1).startswith(KEYS.attempt(3, 1)), "round 3 can be removed without round 30"
    assert all(key.startswith(KEYS.root) for key in (*head, KEYS.settings, KEYS.nodes, KEYS.rounds))


def test_runs_of_similar_names_share_no_key() -> None:
    assert not Keys(prefix="/rdzv", run_id="job-70").root.startswith(KEYS.root)


# Buckets.


@given(node_id=names, buckets=st.integers(1, 700))
def test_every_node_has_one_bucket_among_those_there_are(node_id: str, buckets: int) -> None:
    assert 0 <= bucket_of(node_id, buckets) < buckets


def test_a_node_has_the_same_bucket_on_every_machine() -> None:
    assert [bucket_of(name, 16) for name in ("host0", "host1", "host2")] == [3, 5, 15]


# There and back.


@given(records)
def test_a_record_comes_back_as_it_went(record: NodeRecord) -> None:
    assert NodeRecord.unpack(record.node_id, record.pack(), arrival=record.arrival) == record


@given(progresses)
def test_progress_comes_back_as_it_went(progress: Progress) -> None:
    assert Progress.unpack(progress.pack()) == progress


@given(progresses, st.lists(whole, max_size=3))
def test_progress_of_a_later_release_is_read_as_far_as_we_know_it(progress: Progress, more: list[int]) -> None:
    packed = msgpack.packb([*msgpack.unpackb(progress.pack()), *more])
    assert Progress.unpack(packed) == progress


@given(st.builds(Round, number=whole, term=whole, size=whole, buckets=whole, host=text, port=whole, revision=whole))
def test_a_round_comes_back_as_it_went(round: Round) -> None:
    assert Round.unpack(round.pack(), revision=round.revision) == round


@given(st.lists(st.builds(Member, node_id=names, rank=whole, arrival=whole), max_size=5))
def test_members_come_back_as_they_went(members: list[Member]) -> None:
    assert unpack_members(pack_members(members)) == members


@given(
    st.lists(
        st.builds(Participant, node_id=names, rank=whole, address=text, payload=payloads, attributes=attributes),
        max_size=4,
    )
)
def test_participants_come_back_as_they_went(participants: list[Participant]) -> None:
    assert unpack_roster(pack_roster(participants)) == participants


@given(st.builds(Closed, reason=text, by=text))
def test_a_closing_comes_back_as_it_went(closed: Closed) -> None:
    assert Closed.unpack(closed.pack()) == closed


@given(st.dictionaries(names, payloads, max_size=4))
def test_settings_come_back_as_they_went_and_equal_ones_are_equal_bytes(shared: dict[str, Any]) -> None:
    packed = pack_settings(shared)
    assert unpack_settings(packed) == shared
    assert pack_settings(dict(reversed(shared.items()))) == packed


def test_a_record_that_says_little_is_small() -> None:
    plain = NodeRecord(node_id="host17", incarnation="89abcdef", address="10.0.0.17", port=29500)
    assert len(plain.pack()) < 64


# What is not ours.

RECORD = {"incarnation": "1", "address": "h", "port": 1}
PROGRESS = list(msgpack.unpackb(Progress(phase=Phase.COMPLETE).pack()))
ROUND: dict[str, Any] = {"number": 0, "term": 1, "size": 1, "buckets": 1, "host": "h", "port": 1}


def without(plain: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in plain.items() if key != name}


def with_progress(index: int, value: object) -> list[Any]:
    return [*PROGRESS[:index], value, *PROGRESS[index + 1 :]]


def unpack_record(value: bytes) -> object:
    return NodeRecord.unpack("host3", value, arrival=1)


def unpack_round(value: bytes) -> object:
    return Round.unpack(value, revision=1)


@pytest.mark.parametrize(
    ("unpack", "plain"),
    [
        *((unpack_record, without(RECORD, name)) for name in RECORD),
        (unpack_record, {**RECORD, "port": "29500"}),
        (unpack_record, {**RECORD, "port": True}),
        (unpack_record, {**RECORD, "arrived_after": None}),
        (unpack_record, {**RECORD, "requested_rank": "first"}),
        (unpack_record, {**RECORD, "requested_rank": 0.5}),
        (unpack_record, {**RECORD, "attributes": ["rack"]}),
        (unpack_record, {**RECORD, "attributes": {"rack": 7}}),
        (unpack_record, {**RECORD, "attributes": {7: "rack"}}),
        (unpack_record, {**RECORD, "left": 1}),
        (unpack_record, ["a", "list"]),
        (unpack_record, 7),
        (Progress.unpack, PROGRESS[:16]),
        (Progress.unpack, with_progress(19, [("a", 7)])),
        (Progress.unpack, with_progress(20, 7)),
        (Progress.unpack, with_progress(17, ([("a", 7, None, "")], 1, None, ()))),
        (Progress.unpack, with_progress(18, 7)),
        (Progress.unpack, {}),
        (Progress.unpack, with_progress(0, 7)),
        *((Progress.unpack, with_progress(index, "1")) for index in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)),
        (Progress.unpack, with_progress(9, 3)),
        (Progress.unpack, with_progress(11, [7])),
        *((unpack_round, without(ROUND, name)) for name in ROUND),
        *((unpack_round, {**ROUND, name: None}) for name in ROUND),
        (Closed.unpack, {"reason": "done"}),
        (Closed.unpack, {"reason": 7, "by": ""}),
        (unpack_members, [("a", 0)]),
        (unpack_members, [("a", "0", 1)]),
        (unpack_roster, [("a", 0, "h", None)]),
        (unpack_roster, [("a", 0, "h", None, {"rack": 1})]),
        (unpack_settings, 7),
    ],
)
def test_what_is_not_ours_is_refused(unpack: Callable[[bytes], object], plain: object) -> None:
    with pytest.raises(RendezvousStateError, match="cannot be read"):
        unpack(msgpack.packb(plain))


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x92\x01", b"{}", b"\x01\x01", msgpack.packb(7)])
@pytest.mark.parametrize(
    "unpack", [unpack_record, Progress.unpack, unpack_round, Closed.unpack, unpack_members, unpack_roster]
)
def test_garbage_is_refused(unpack: Callable[[bytes], object], value: bytes) -> None:
    with pytest.raises(RendezvousStateError):
        unpack(value)


@given(st.binary(max_size=40))
def test_no_bytes_at_all_raise_anything_else(value: bytes) -> None:
    for unpack in (unpack_record, Progress.unpack, unpack_round, Closed.unpack, unpack_members, unpack_roster):
        try:
            read = unpack(value)
        except RendezvousStateError:
            continue
        assert read is not None


def test_a_refusal_names_what_could_not_be_read_and_what_may_have_happened() -> None:
    with pytest.raises(RendezvousStateError) as caught:
        unpack_record(b"not ours")
    message = str(caught.value)
    assert "the record of node host3" in message
    assert "another release of rdzv" in message
    assert caught.value.__cause__ is not None


@given(st.lists(st.integers(1000, 1000 + 0xFFFF), unique=True, min_size=1, max_size=ARRIVALS_MOST))
def test_a_round_says_which_arrival_has_which_rank(arrivals: list[int]) -> None:
    round = Round(**ROUND, arrivals=Arrivals.of(arrivals))
    told = Round.unpack(round.pack(), revision=0)
    assert told == round
    assert [told.rank_of(arrival) for arrival in arrivals] == list(range(len(arrivals)))
    assert told.rank_of(999) is None


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(5, 300)), min_size=1, max_size=8))
def test_a_round_of_any_number_that_came_one_after_the_other_says_so_in_few_bytes(steps: list[tuple[int, int]]) -> None:
    """Of more than 512 nodes that came at once each read its rank: a request more, in the moment that all are busy."""
    arrivals: list[int] = []
    for gap, count in steps:
        first = (arrivals[-1] if arrivals else 1 << 40) + 1 + gap
        arrivals.extend(range(first, first + count))
    round = Round(**ROUND, arrivals=Arrivals.of(arrivals))
    told = Round.unpack(round.pack(), revision=0)
    assert told == round
    assert len(round.pack()) <= len(Round(**ROUND).pack()) + 10 + 14 * len(steps)
    assert [told.rank_of(arrival) for arrival in arrivals] == list(range(len(arrivals)))
    gaps = set(range(arrivals[0] - 1, arrivals[-1] + 2)).difference(arrivals)
    assert {told.rank_of(arrival) for arrival in gaps} == {None}


@given(st.data())
def test_members_of_the_last_round_know_their_rank_by_the_one_they_had(data: st.DataObject) -> None:
    """Above 512 members each read its rank from the store at each round, though most had but kept the one they had."""
    size = data.draw(st.integers(1, 40))
    last = Round(**{**ROUND, "size": size}, revision=500)
    before = {f"n{rank}": Member(node_id=f"n{rank}", rank=rank, arrival=100 + rank) for rank in range(size)}
    names = data.draw(st.lists(st.sampled_from([*before, "x", "y", "z"]), unique=True, min_size=1))
    anew = data.draw(st.sets(st.sampled_from([*before]), max_size=3))  # in another process
    if data.draw(st.booleans()):
        names.sort(key=lambda name: before[name].rank if name in before else size)
    arrivals = data.draw(st.permutations(range(600, 600 + len(names))))
    members = [
        Member(node_id=name, rank=rank, arrival=arrival)
        for rank, (name, arrival) in enumerate(zip(names, arrivals, strict=True))
    ]
    kept, others = place(members, last, before, before.keys() - anew)
    round = Round(**{**ROUND, "size": len(members)}, kept=kept, arrivals=others)
    told = Round.unpack(round.pack(), revision=0)
    assert told == round
    for member in members:
        there = before.get(member.node_id) if member.node_id not in anew else None
        assert told.rank_of(member.arrival, last=(500, there.rank) if there else None) == member.rank
    if kept is None:
        return
    for there in (one for name, one in before.items() if name not in names or name in anew):
        assert told.rank_of(599, last=(500, there.rank)) is None
        assert told.names_all(last=(500, there.rank))
    for stranger in (None, (499, 0)):
        assert told.rank_of(599, last=stranger) is None
        assert not told.names_all(last=stranger), "a node that was a member may have come in another process"


def test_a_round_that_lost_many_or_follows_one_of_which_not_all_is_known_keeps_nobody() -> None:
    before = {f"n{rank}": Member(node_id=f"n{rank}", rank=rank, arrival=1) for rank in range(GONE_MOST + 2)}
    members = [Member(node_id="n0", rank=0, arrival=9)]
    last = Round(**{**ROUND, "size": len(before)}, revision=5)
    assert place(members, last, before, before)[0] is None
    assert place(members, None, before, before)[0] is None
    del before["n1"]
    assert place(members, last, before, before)[0] is None
    assert place(members, replace(last, size=len(before)), before, {"n1"})[0] is None
    kept, _ = place(members, replace(last, size=len(before)), before, before)
    assert kept is not None
    assert kept.rank_of(0) == 0


@pytest.mark.parametrize(
    "arrivals", [(), range(0, 2 * ARRIVALS_MOST + 2, 2), (1, 70_000), [n + n // 4 for n in range(4 * RUNS_MOST + 4)]]
)
def test_a_round_of_many_or_of_arrivals_far_apart_names_none(arrivals: Sequence[int]) -> None:
    round = Round(**ROUND, arrivals=Arrivals.of(arrivals))
    assert not Round.unpack(round.pack(), revision=1).arrivals


def test_nouns_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Closed(reason="").reason = "other"  # type: ignore[misc]
    record = NodeRecord(node_id="a", incarnation="1", attributes={})
    assert replace(record, left=True).left
    assert not record.left


# ------------------------------------------------------------------------------------------------ other releases


def test_s12_a_phase_that_only_later_releases_know_says_that_the_run_goes_on() -> None:
    """An unknown word kept every node of the older release from connecting at all."""
    plain = msgpack.unpackb(Progress(phase=Phase.LAST_CALL, joined=3).pack())
    progress = Progress.unpack(msgpack.packb(["paused for tea", *plain[1:], "one more column"]))
    assert (progress.phase, progress.joined) == (Phase.GATHERING, 3)


def test_s12_the_record_of_a_node_names_its_release_and_may_have_more_fields_or_none() -> None:
    record = NodeRecord(node_id="a", incarnation="x", release="0.1.0")
    plain = msgpack.unpackb(record.pack())
    assert plain["release"] == "0.1.0"
    assert NodeRecord.unpack("a", msgpack.packb({**plain, "mood": "fine"}), arrival=0) == record
    del plain["release"]
    assert NodeRecord.unpack("a", msgpack.packb(plain), arrival=0).release == ""
