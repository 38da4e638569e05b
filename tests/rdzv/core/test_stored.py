"""Values of keys: packing and unpacking changes nothing; invalid values are not written, foreign bytes an error."""

import contextlib
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdzv.bootstrap_check import ReachVerdict
from rdzv.core.absent import AbsenceReport, Missing
from rdzv.core.history import Chapter, EarlierRoundTotals, History, Incident, TimeOfDayNote, TimeSpent
from rdzv.core.questions import OperatorQuestion
from rdzv.core.round import Member, Participant, Round
from rdzv.core.state import Ban, Closed, LostStore, NodeRecord, Phase, Progress, Unban, pack_settings, unpack_settings
from rdzv.core.stopping import Drain, LastBegun, Resized, RoundStop
from rdzv.core.stored import Prose, Stored
from rdzv.core.stuck.accusing import Accusation
from rdzv.core.stuck.step_log import StepNote
from rdzv.core.stuck.tally import RunCounts
from rdzv.errors import RendezvousSettingsError, RendezvousStateError

pytestmark = pytest.mark.some_here(18)

NOUNS: tuple[type[Stored], ...] = (
    Accusation,
    Ban,
    StepNote,
    LastBegun,
    Closed,
    Drain,
    History,
    TimeOfDayNote,
    Member,
    NodeRecord,
    Participant,
    LostStore,
    Progress,
    OperatorQuestion,
    Resized,
    Round,
    RoundStop,
    RunCounts,
    Unban,
    ReachVerdict,
)

text = st.text(st.characters(codec="utf-8"), max_size=12)
payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | text | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


def values_of(type_: Any) -> st.SearchStrategy[Any]:
    """A strategy for the values of a field of this type."""
    plain: dict[Any, st.SearchStrategy[Any]] = {
        Any: payloads,
        bool: st.booleans(),
        bytes: st.binary(max_size=8).map(lambda half: half + half),  # an even number of them: see `Round.arrivals`
        float: st.floats(allow_nan=False),
        int: st.integers(-(2**63), 2**64 - 1),
        str: text,
        Phase: st.sampled_from(Phase),
        type(None): st.none(),
    }
    if type_ in plain:
        return plain[type_]
    if hasattr(type_, "fields"):
        return nouns(type_)
    inner = [values_of(one) for one in get_args(type_) if one is not ...]
    if type_.__class__.__name__ == "UnionType":
        return st.one_of(inner)
    if "Mapping" in str(type_):
        return st.dictionaries(*inner, max_size=3)
    return st.tuples(*inner) if ... not in get_args(type_) else st.lists(*inner, max_size=3).map(tuple)


def nouns(kind: Any) -> st.SearchStrategy[Any]:
    types = get_type_hints(kind)
    return st.builds(kind, **{name: values_of(types[name]) for name in kind.fields})


def outside_of(noun: Stored) -> dict[str, object]:
    return {name: getattr(noun, name) for name in noun.outside}


def test_every_stored_type_is_tested() -> None:
    assert {*NOUNS} == {kind for kind in Stored.__subclasses__() if kind.__module__.startswith("rdzv.")}


@pytest.mark.parametrize("kind", NOUNS)
@settings(max_examples=20)
@given(data=st.data())
def test_a_value_is_unpacked_equal_and_with_the_types_of_its_fields(kind: type[Stored], data: Any) -> None:
    noun = data.draw(nouns(kind))
    there = kind.unpack(noun.pack(), **outside_of(noun))
    assert there == noun
    assert repr(there) == repr(noun), "an int is no bool, though they may be equal"
    if not kind.outside:
        assert kind.unpack_all(kind.pack_all([noun, noun])) == [noun, noun]


@pytest.mark.parametrize("kind", NOUNS)
@settings(max_examples=5)
@given(data=st.data())
def test_s12_fields_of_a_later_release_are_ignored_and_missing_ones_get_defaults(kind: type[Stored], data: Any) -> None:
    noun = data.draw(nouns(kind))
    plain = msgpack.unpackb(noun.pack(), strict_map_key=False)
    more = [*plain, "more"] if isinstance(plain, list) else {"more": 7, **plain}
    assert kind.unpack(msgpack.packb(more), **outside_of(noun)) == noun
    inside = [name for name in kind.fields if name not in kind.outside]
    needed = [name for name in inside if name not in kind.defaults]
    if isinstance(plain, list) and inside[: len(needed)] == needed:
        early = kind.unpack(msgpack.packb(plain[: len(needed)]), **outside_of(noun))
        assert all(getattr(early, name) == kind.defaults[name] for name in inside[len(needed) :])


WRONG: dict[Any, tuple[object, ...]] = {
    str: (None, 7, b"text", "\ud800", ValueError("as given")),
    int: (None, 4.0, True, "4", 2**70),
    int | None: (4.0, False, "4", 2**70),
    float: (None, "1.5", True),
    float | None: ("1.5", True),
    bool: (None, 1, "yes"),
    Any: (object(), {1, 2}, 2**70),
    tuple[int, int] | None: ("more", (1,), (1, None)),
}


@pytest.mark.parametrize("kind", NOUNS)
@settings(max_examples=2)
@given(data=st.data())
def test_an_unreadable_value_is_not_written_and_the_error_names_the_field(kind: type[Stored], data: Any) -> None:
    types = get_type_hints(kind)
    prose = {name for name, type_ in get_type_hints(kind, include_extras=True).items() if type_ == Prose}
    noun = data.draw(nouns(kind))
    for name in kind.fields:
        for wrong in WRONG.get(types[name], (None,) if name not in kind.outside and kind is not Round else ()):
            if name in kind.outside and wrong in ("\ud800", 2**70):
                continue  # this field is not part of the value
            if name in prose and wrong == "\ud800":
                continue  # it is escaped
            with pytest.raises(RendezvousSettingsError) as caught:
                noun.replace(**{name: wrong}).pack()
            assert name in str(caught.value) or wrong in ("\ud800", 2**70) or types[name] is Any, caught.value


def unpacking(kind: type[Stored]) -> Callable[[bytes], object]:
    return lambda value: kind.unpack(value, **{name: kind.defaults.get(name, "a") for name in kind.outside})


@pytest.mark.parametrize("unpack", [*map(unpacking, NOUNS), Member.unpack_all, unpack_settings])
@settings(max_examples=20)
@given(value=st.binary(max_size=40))
def test_unpacking_any_bytes_succeeds_or_raises_rendezvous_state_error(
    unpack: Callable[[bytes], object], value: bytes
) -> None:
    for each in (value, b"", b"\xc1", b"{}", b"\x07", b"\x81\x92\x01\x02\x03", b"\x91" * 1500):
        with contextlib.suppress(RendezvousStateError):
            assert unpack(each) is not None


@given(st.dictionaries(text, payloads, max_size=4))
def test_settings_are_unpacked_equal_and_equal_settings_have_equal_bytes(shared: dict[str, Any]) -> None:
    packed = pack_settings(shared)
    assert unpack_settings(packed) == shared
    assert pack_settings(dict(reversed(shared.items()))) == packed


def test_nested_values_are_validated_and_may_have_more_fields() -> None:
    absent = AbsenceReport(missing=(Missing(node_id="a", how="lost", ago=1.5),), count=1)
    plain = msgpack.unpackb(Progress(phase=Phase.GATHERING, absent=absent).pack())
    place = Progress.fields.index("absent")
    plain[place][0][0].append("a column of a later release")
    assert Progress.unpack(msgpack.packb(plain)).absent == absent
    plain[place][0][0][0] = 7
    with pytest.raises(RendezvousStateError):
        Progress.unpack(msgpack.packb(plain))
    with pytest.raises(RendezvousSettingsError):
        Progress(phase=Phase.GATHERING, absent=AbsenceReport(waited="long")).pack()  # type: ignore[arg-type]
    for kind in (Chapter, Incident, EarlierRoundTotals, TimeSpent):
        assert not issubclass(kind, Stored), "they stand in no key of their own"


def test_s12_an_unknown_phase_of_a_later_release_counts_as_open() -> None:
    """Regression: an unknown phase kept every node of the older release from connecting."""
    plain = msgpack.unpackb(Progress(phase=Phase.LAST_CALL, joined=3).pack())
    progress = Progress.unpack(msgpack.packb(["paused for tea", *plain[1:]]))
    assert (progress.phase, progress.joined) == (Phase.GATHERING, 3)


def test_a_minimal_record_is_small() -> None:
    plain = NodeRecord(node_id="host17", incarnation="89abcdef", address="10.0.0.17", port=29500)
    assert len(plain.pack()) < 64
