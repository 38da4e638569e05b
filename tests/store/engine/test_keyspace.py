"""Groups of keys: which key belongs to which group, and that the count of each group is exact."""

import random

import pytest

from store.engine.keyspace import ENTRY_OVERHEAD, KeyGroupTable, Keyspace, entry_answer_bytes
from store.engine.requests import GROUPS_AT_ONCE
from store.messages import Append, Delete, DeletePrefix, Entry, KeyGroupsPage, ListGroups, Put
from tests.support.by_hand import Desk


@pytest.mark.parametrize(
    ("key", "group"),
    [
        ("/rdzv/job-7/head/round", "/rdzv/job-7/"),
        ("rdzv/job-7/head", "rdzv/job-7/"),
        ("/rdzv/job-7/", "/rdzv/job-7/"),
        ("/rdzv/job-7", None),
        ("plain", None),
        ("", None),
        ("//x", None),
        ("//x/y", "//x/"),
    ],
)
def test_the_first_parts_of_a_key_name_its_group(key: str, group: str | None) -> None:
    assert KeyGroupTable().group_name_of(key) == group


def test_the_account_of_each_group_is_that_of_its_keys() -> None:
    dice = random.Random(20)
    desk = Desk()
    keys = [f"/rdzv/{run}/{number}" for run in "abc" for number in range(8)] + ["loose", "/rdzv/loose"]
    for _ in range(600):
        key = dice.choice(keys)
        match dice.randrange(5):
            case 0:
                desk.ask(Delete(key))
            case 1:
                desk.ask(DeletePrefix(prefix=key[:8]))
            case 2:
                desk.ask(Append(key, b"more"))
            case _:
                desk.ask(Put(key, bytes(dice.randrange(50))))
        page = desk.ask(ListGroups(after=""))
        assert isinstance(page, KeyGroupsPage)
        expected: dict[str, list[int]] = {}
        for entry in desk.engine._keys.entries.values():
            if entry.key.count("/") == 3:
                account = expected.setdefault(entry.key[:8], [0, 0])
                account[0] += 1
                account[1] += ENTRY_OVERHEAD + len(entry.key) + len(entry.value)
        assert {group.name: [group.keys, group.bytes] for group in page.groups} == expected


def test_groups_come_in_pages_and_have_an_age() -> None:
    desk = Desk()
    for number in range(GROUPS_AT_ONCE + 3):
        desk.ask(Put(f"/rdzv/{number:06d}/x", b""))
    desk.now += 60.0
    first = desk.ask(ListGroups(after=""))
    assert isinstance(first, KeyGroupsPage)
    assert len(first.groups) == GROUPS_AT_ONCE
    assert first.more
    assert first.groups[0].age == pytest.approx(60.0)
    rest = desk.ask(ListGroups(after=first.groups[-1].name))
    assert isinstance(rest, KeyGroupsPage)
    assert [group.name for group in rest.groups] == [f"/rdzv/{GROUPS_AT_ONCE + each:06d}/" for each in range(3)]
    assert not rest.more


def test_the_largest_group_is_known() -> None:
    groups = KeyGroupTable()
    assert groups.largest_group() is None
    groups.add_usage("a/many/c", 50, 100)
    groups.add_usage("a/heavy/c", 1, 1000)
    heavy, many = groups.largest_group(), groups.largest_group(by_keys=True)
    assert heavy is not None
    assert many is not None
    assert (heavy.name, many.name) == ("a/heavy/", "a/many/")


def test_no_entry_takes_more_in_an_answer_than_the_keyspace_says() -> None:
    rng = random.Random(7)
    keys = Keyspace()
    for revision in range(1, 300):
        key = rng.choice(["short", "a/longer/key", "\N{SNOWMAN}" * 30])
        before = keys.get(key)
        keys.put(Entry(key=key, value=bytes(rng.randrange(40)), create_revision=1, mod_revision=revision), before)
        assert max(map(entry_answer_bytes, [None, *keys.entries.values()])) <= keys.answer_bytes_max
