"""Records: constructing, comparing, packing, checking and reading them."""

import copy
import pickle
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal

import msgpack
import pytest

from store.records import CHECKED_AT_ONCE, Record, Steps, UnfitError, UnknownValueError


class Colour(IntEnum):
    RED = 0
    BLUE = 1


class Fate(IntEnum):
    SOLD = 0
    OTHER = 255


class Leaf(Record, kw_only=True):
    name: str
    colour: Colour = Colour.RED
    word: Literal["", "new"] = ""

    def why_invalid(self) -> str | None:
        return "is a red rose" if self.name == "rose" and self.colour is Colour.RED else None


class Cut(Record, code=1):
    name: str
    inches: float | None = None


class Burn(Record, code=2):
    name: str


class Plan(Record, code=3, kw_only=True):
    leaves: tuple[Leaf, ...]
    steps: tuple[Cut | Burn, ...] = ()
    first: Leaf | None = None
    seen: int | bytes | bool = 0
    counts: dict[str, int | float] = {}  # noqa: RUF012 - it is never changed
    fate: Fate = Fate.SOLD


PLAN = Plan(leaves=(Leaf(name="oak"),), steps=(Cut("oak", 2.5), Burn("oak")), first=Leaf(name="ash"), counts={"a": 1})


def travelled(record: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(record), use_list=False, strict_map_key=False)


@pytest.mark.parametrize("record", [PLAN, Leaf(name="elm", colour=Colour.BLUE), Cut("x"), Burn("x")])
def test_packed_records_are_read_unchanged(record: Any) -> None:
    found = type(record).read(travelled(record))
    assert found == record
    assert type(found) is type(record)
    assert repr(found) == repr(record)
    assert {found, record} == {record} if type(record) is not Plan else True
    assert record.check() is record or record.check() == record


def test_it_is_used_as_a_frozen_dataclass_is() -> None:
    cut = Cut("oak", inches=2.0)
    assert (cut.name, cut.inches, cut.fields, cut.code) == ("oak", 2.0, ("name", "inches"), 1)
    assert cut.replace(inches=3.0) == Cut("oak", 3.0)
    assert pickle.loads(pickle.dumps(cut)) == copy.copy(cut) == cut
    assert repr(cut) == "Cut(name='oak', inches=2.0)"
    match cut:
        case Cut("oak", inches):
            assert inches == 2.0
    with pytest.raises(AttributeError):
        cut.name = "ash"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Cut()  # type: ignore[call-arg]


def test_a_code_keeps_records_of_other_kinds_apart() -> None:
    assert len({Cut("x"), Burn("x"), Cut("x", None)}) == 2


def test_arguments_are_converted_to_the_types_that_are_sent() -> None:
    class Name(str):
        __slots__ = ()

    given: Any = Cut(Name("oak"), 2).check()
    assert (type(given.name), type(given.inches)) == (str, float)
    listed: Any = Plan(leaves=[Leaf(name="oak")], seen=memoryview(b"seen")).check()  # type: ignore[arg-type]
    assert (listed.leaves, listed.seen) == ((Leaf(name="oak"),), b"seen")


UNFIT: list[tuple[Callable[[], Any], str]] = [
    (lambda: Cut(3), "name"),  # type: ignore[arg-type]
    (lambda: Cut("x", True), "inches"),
    (lambda: Cut("x", "3"), "inches"),  # type: ignore[arg-type]
    (lambda: Burn(b"x"), "name"),  # type: ignore[arg-type]
    (lambda: Plan(leaves=3), "leaves"),  # type: ignore[arg-type]
    (lambda: Plan(leaves=(1,)), "leaves"),  # type: ignore[arg-type]
    (lambda: Plan(leaves=(Leaf(name=3),)), "name"),  # type: ignore[arg-type]
    (lambda: Plan(leaves=(), steps=("cut",)), "steps"),  # type: ignore[arg-type]
    (lambda: Plan(leaves=(), seen=2.5), "seen"),  # type: ignore[arg-type]
    (lambda: Plan(leaves=(), counts={3: 3}), "counts"),  # type: ignore[dict-item]
    (lambda: Plan(leaves=(), counts=[]), "counts"),  # type: ignore[arg-type]
    (lambda: Plan(leaves=(), fate="lost"), "fate"),  # type: ignore[arg-type]
    (lambda: Leaf(name="rose"), "red rose"),
]


@pytest.mark.parametrize(("make", "named"), UNFIT)
def test_unpackable_values_are_refused_with_the_field_name(make: Callable[[], Any], named: str) -> None:
    record = make()
    with pytest.raises(UnfitError, match=named):
        record.check()
    with pytest.raises(UnfitError, match=named):
        type(record).read(travelled(record))


def test_fields_of_a_later_release_are_ignored_and_missing_ones_have_defaults() -> None:
    assert Cut.read((1, "x", None, "new", 3)) == Cut("x")
    assert Cut.read((1, "x")) == Cut("x")
    assert Plan.read((3, (("oak", 1, "", 7),))) == Plan(leaves=(Leaf(name="oak", colour=Colour.BLUE),))
    with pytest.raises(UnfitError):
        Cut.read((1,))
    with pytest.raises(UnfitError):
        Cut.read("oak")


def test_words_of_a_later_release_are_distinguished_from_invalid_ones() -> None:
    with pytest.raises(UnknownValueError, match="colour 2"):
        Leaf.read(("oak", 2))
    with pytest.raises(UnknownValueError, match="request 9"):
        Plan.read((3, (), ((9, "x"),)))
    assert repr(Leaf.read(("oak", 0, "newer")).word) == "'newer'"
    assert Plan.read((3, (), (), None, 0, {}, 7)).fate is Fate.OTHER


def test_each_kind_reads_its_own_fields_also_if_it_is_made_of_one_that_was_read_before() -> None:
    class Base(Record):
        name: str

    class Derived(Base):
        name: str
        size: int = 0

    assert repr(Base.read(("oak",))) == "Base(name='oak')"
    assert repr(Derived.read(("oak", 3))) == "Derived(name='oak', size=3)"


def test_long_arrays_are_read_in_steps() -> None:
    many = Plan(leaves=tuple(Leaf(name=str(n)) for n in range(3 * CHECKED_AT_ONCE)), steps=(Burn("x"),))
    steps = Plan.read_in_steps(travelled(many))
    found: list[Any] = []

    def reading() -> Steps[None]:
        found.append((yield from steps))

    assert len(list(reading())) == 3
    assert found == [many]


def test_a_record_has_no_attributes_but_its_own() -> None:
    """The attribute `count` of a closing was a method of tuples, and a reader passed that on."""

    class Counted(Record):
        count: int

    class Plain(Record):
        name: str

    assert Counted(count=3).count == 3
    assert getattr(Plain(name="a"), "count", None) is None
    assert getattr(Plain(name="a"), "index", None) is None


def test_completion_offers_a_records_fields_and_none_of_what_reads_and_packs_records() -> None:
    class Ticket(Record, code=1):
        key: str
        count: int = 0

    assert [name for name in dir(Ticket("a")) if not name.startswith("_")] == ["count", "key", "replace"]
    assert dir(Ticket) == dir(Ticket("a"))
