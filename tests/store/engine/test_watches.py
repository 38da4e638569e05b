"""The recipients of an event, and the history for watches that reconnect."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from store.engine.engine import Engine
from store.engine.watches import LENGTHS_FEW, History, Watches, event_bytes
from store.messages import Event

KEYS = st.text(alphabet="ab/", max_size=6)


def put(key: str, revision: int = 1, value: bytes = b"") -> Event:
    return Event(kind="put", revision=revision, key=key, value=value, create_revision=revision)


def hearers(watches: Watches, *events: Event) -> dict[tuple[int, int], list[str]]:
    """Return which watches get the events of which keys; each at most once."""
    heard: dict[tuple[int, int], list[str]] = {}
    for by_peer, about in watches.match_watches(events):
        for peer, watch_ids in by_peer.items():
            for watch_id in watch_ids:
                assert (peer, watch_id) not in heard
                heard[peer, watch_id] = [event.key for event in about]
    return heard


def since(history: History, revision: int, prefix: str) -> list[tuple[Event, ...]] | None:
    page = history.page(revision, prefix, most=10**6, bytes_max=10**9)
    return None if page is None else page[0]


def test_watches_of_one_prefix_are_notified_together() -> None:
    watches = Watches()
    for peer in range(1000):
        watches.add(peer, 1, "run/")
    watches.add(0, 2, "other/")
    (told,) = watches.match_watches((put("run/a"), put("run/b")))
    assert told[0] == {peer: [1] for peer in range(1000)}
    assert [event.key for event in told[1]] == ["run/a", "run/b"]


@given(
    st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 9)), KEYS, max_size=12),
    st.lists(KEYS, unique=True, max_size=6),
    st.sets(st.integers(0, 3)),
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 9))),
)
def test_a_watch_gets_exactly_the_keys_with_its_prefix_until_it_is_closed(
    prefixes: dict[tuple[int, int], str], keys: list[str], gone: set[int], closed: set[tuple[int, int]]
) -> None:
    watches = Watches(Engine(store_id="it")._keys.groups.group_name_of)
    for (peer, watch_id), prefix in prefixes.items():
        watches.add(peer, watch_id, prefix)
    for watcher in closed:
        assert watches.remove(*watcher) is (watcher in prefixes)
        assert not watches.remove(*watcher)
    for peer in gone:
        list(watches.remove_peer_in_steps(peer))
    left = {each: prefix for each, prefix in prefixes.items() if each not in closed and each[0] not in gone}
    heard = {each: [key for key in keys if key.startswith(prefix)] for each, prefix in left.items()}
    assert hearers(watches, *map(put, keys)) == {each: about for each, about in heard.items() if about}
    assert (len(watches), watches.count_of_peer(1)) == (len(left), sum(peer == 1 for peer, _ in left))
    assert watches._sorted_lengths == {group: sorted(lengths) for group, lengths in watches._lengths.items()}
    for peer in range(4):
        list(watches.remove_peer_in_steps(peer))
    assert (watches.bytes, watches.by_prefix, watches._prefixes, watches._lengths) == (0, {}, {}, {})


@given(st.lists(st.lists(KEYS, min_size=1, max_size=3), max_size=12), st.integers(0, 13), KEYS, st.integers(0, 3000))
def test_the_history_is_a_list_of_the_latest_revisions(
    revisions: list[list[str]], start: int, prefix: str, bytes_max: int
) -> None:
    history, model = History(bytes_max), list[tuple[Event, ...]]()
    for revision, keys in enumerate(revisions, 1):
        events = tuple(put(key, revision) for key in keys)
        history.append(events)
        model.append(events)
    assert history.bytes <= bytes_max
    while sum(event_bytes(event) for events in model for event in events) > bytes_max:
        model.pop(0)
    compacted = len(revisions) - len(model)
    assert history.compacted == compacted
    expected = [
        matching
        for events in model
        if events[0].revision >= start
        and (matching := tuple(event for event in events if event.key.startswith(prefix)))
    ]
    assert since(history, start, prefix) == (None if compacted and start <= compacted else expected)


def test_prefixes_of_thousands_of_lengths_slow_down_their_own_group_only() -> None:
    """2,047 of them made every client's puts twelve times as slow."""
    looked: list[str] = []

    class Looked(str):
        __slots__ = ()

        def __getitem__(self, at: Any) -> str:
            looked.append("")
            return super().__getitem__(at)

    watches = Watches(Engine(store_id="it")._keys.groups.group_name_of)
    for length in range(2000):
        watches.add(1, length, "/rdzv/mine/" + "x" * length)
        watches.add(1, 10_000 + length, "y" * length)
    watches.add(2, 1, "/rdzv/theirs/head/")
    watches.add(2, 2, "/rdzv/")
    watches.add(2, 3, "/")
    event = put("/rdzv/theirs/head/round").replace(key=Looked("/rdzv/theirs/head/round"))
    assert sorted(hearers(watches, event)) == [(1, 10_000), (2, 1), (2, 2), (2, 3)]
    assert len(looked) < 50
    list(watches.remove_peer_in_steps(1))
    list(watches.remove_peer_in_steps(2))
    assert not watches._lengths
    assert not watches._sorted_lengths


def test_a_prefix_in_any_group_gets_its_events() -> None:
    """Groups only save comparisons: a watch gets exactly the keys that begin with its prefix."""
    keys = ["/a/b/c", "/a/b/", "/a/b", "/a", "a/b/c", "a", "/a/bc/d", "//b/c", ""]
    watches = Watches(Engine(store_id="it")._keys.groups.group_name_of)
    prefixes = sorted({key[:length] for key in keys for length in range(len(key) + 1)})
    for number, prefix in enumerate(prefixes):
        watches.add(1, number, prefix)
    for key in keys:
        heard = {prefixes[watch_id] for _, watch_id in hearers(watches, put(key))}
        assert heard == {prefix for prefix in prefixes if key.startswith(prefix)}


def test_the_changes_of_a_request_are_bounded_by_the_prefix_lengths_that_its_keys_are_compared_with() -> None:
    watches = Watches()
    keys = ["k" * 100 + str(number) for number in range(2048)]
    for length in range(1, LENGTHS_FEW + 1):
        watches.add(1, length, "y" * length)
    assert watches._of_many_lengths == set()
    assert watches.changeable_key_count(keys) == len(keys)
    for length in range(LENGTHS_FEW + 1, 1000):
        watches.add(1, length, "y" * length)
    assert watches._of_many_lengths == {""}
    assert 1000 < watches.changeable_key_count(keys) < 2048
    assert watches.changeable_key_count([key * 20 for key in keys]) < 60
    assert watches.changeable_key_count(["short"] * 2048) == 2048
    assert watches.changeable_key_count(["k" * 10**6] * 2) == 1, "at least one, or nobody could ever change it"
    list(watches.remove_peer_in_steps(1))
    assert watches._of_many_lengths == set()


def test_keys_of_a_group_are_compared_with_its_own_prefixes_and_with_those_of_none() -> None:
    watches = Watches(lambda key: key[:2] if key.startswith("g") else None)
    for length in range(3, 1000):
        watches.add(1, length, "g1" + "y" * length)
    assert watches.changeable_key_count(["g1" + "k" * 1000] * 2048) < 200
    assert watches.changeable_key_count(["g2" + "k" * 1000] * 2048) == 2048
