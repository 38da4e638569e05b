"""S4, as far as the engine and a watch's cursor alone can show it, without sockets."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from store.errors import WatchCompacted
from store.messages import Delete, DeletePrefix, Event, Ping, Put, Transact
from tests.support.by_hand import Post, Reader, Stream, Town

KEYS = ("a/1", "a/2", "b/1")


class World:
    """A watching client whose connections break, and another that writes meanwhile."""

    def __init__(self, **limits: Any) -> None:
        self.town = Town(**limits)
        self.post = Post()
        self.log: dict[int, tuple[Event, ...]] = {}  # every revision, as a watch of everything was told of it
        self.states: dict[int, dict[str, bytes]] = {0: {}}

    def write(self, number: int) -> None:
        key, value = KEYS[number % 3], b"%d" % number
        request: Any = {
            0: Put(key, value),
            1: Delete(key),
            2: DeletePrefix(prefix="a/"),
            3: Transact(when=(), then=tuple(Put(each, value) for each in KEYS)),
            4: Transact(when=(), then=(Put("a/1", value), Delete("a/2"))),
        }[number % 5]
        before = self.town.engine.revision
        self.town.ask(request, peer=999)
        if self.town.engine.revision > before:
            past = self.town.engine._history.since(self.town.engine.revision, "")
            if past is not None:
                (self.log[self.town.engine.revision],) = past
            self.states[self.town.engine.revision] = {
                each.key: each.value for each in self.town.engine._keys.entries.values()
            }

    def step(self, what: str, detail: int) -> None:
        post = self.post
        if what == "write":
            self.write(detail)
        elif what == "dial" and post.link is None:
            post.dial(self.town)
        elif post.link is not None:
            if what == "to server":
                post.link.carry_to_server(detail)
            elif what == "to client":
                post.carry_to_client(detail)
            elif what == "settle":
                post.settle()
            elif what == "cut":
                post.cut()

    def settle(self) -> None:
        if self.post.link is None:
            self.post.dial(self.town)
        self.post.settle()
        assert self.post.failure is None

    def since(self, revision: int, prefix: str) -> Stream:
        """All that happened under a prefix after a revision."""
        found = (
            tuple(event for event in events if event.key.startswith(prefix))
            for at, events in sorted(self.log.items())
            if at > revision
        )
        return [events for events in found if events]

    def under(self, prefix: str) -> dict[str, bytes]:
        entries = self.town.engine._keys.entries.values()
        return {each.key: each.value for each in entries if each.key.startswith(prefix)}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "to server", "to client", "settle", "cut", "dial", "dial"]),
        st.integers(1, 90),
    ),
    max_size=60,
)
PREFIXES = st.sampled_from(["", "a/", "b/1", "c"])


@settings(max_examples=200)
@given(STEPS, PREFIXES)
def test_s4_every_change_once_in_order_whole_and_across_reconnects(steps: list[tuple[str, int]], prefix: str) -> None:
    """ "Watches are ordered, unique, atomic per revision, reliable and resumable: ... every later change, no gap,
    across reconnects".
    """
    world = World()
    world.post.meet(world.town)
    world.write(0)
    reader = world.post.watch(prefix)
    world.post.settle()
    opened = world.town.engine.revision
    for what, detail in steps:
        world.step(what, detail)
    world.settle()
    assert reader.batches == world.since(opened, prefix)


@settings(max_examples=200)
@given(STEPS, PREFIXES, st.integers(0, 6))
def test_s4_a_watch_from_a_revision_on_has_no_gap_at_its_beginning(
    steps: list[tuple[str, int]], prefix: str, start: int
) -> None:
    """ "resumable: ... every later change, no gap"."""
    world = World()
    for number in (0, 3, 5, 9, 10, 13):
        world.write(number)
    reader = world.post.watch(prefix, start_revision=start)
    for what, detail in steps:
        world.step(what, detail)
    world.settle()
    assert reader.batches == world.since(start - 1, prefix)


def check_against_states(world: World, reader: Reader, prefix: str) -> None:
    """Follow a watch that began with a snapshot: at every revision it was told of it knows what was there then."""
    state: dict[str, bytes] = {}
    synced_at: int | None = None
    revisions: list[int] = []
    for events in reader.batches:
        for event in events:
            match event.kind:
                case "put":
                    state[event.key] = event.value
                case "delete":
                    del state[event.key]  # of what it was told
                case "reset":
                    state, synced_at, revisions = {}, None, []
                case "synced":
                    assert synced_at is None, "one snapshot after each reset"
                    synced_at = event.revision
        if synced_at is None:
            continue
        at = events[-1].revision
        assert not revisions or at > revisions[-1], "ordered, and unique"
        revisions.append(at)
        assert state == {key: value for key, value in world.states[at].items() if key.startswith(prefix)}


@settings(max_examples=300)
@given(STEPS, PREFIXES, st.sampled_from([64 * 2**20, 2000, 300]))
def test_s4_a_snapshot_then_every_change_or_an_explicit_reset(
    steps: list[tuple[str, int]], prefix: str, history_bytes_max: int
) -> None:
    """ "snapshot, then every later change, no gap, across reconnects; or, when history is gone, an explicit reset
    (forget everything, a new snapshot follows), never silence."
    """
    world = World(history_bytes_max=history_bytes_max)
    reader = world.post.watch(prefix, snapshot=True)
    for what, detail in steps:
        world.step(what, detail)
    world.settle()
    assert reader.ended is None
    assert reader.state == world.under(prefix)
    check_against_states(world, reader, prefix)


def test_s4_a_reset_comes_when_history_is_gone() -> None:
    """ "when history is gone, an explicit reset (forget everything, a new snapshot follows)"."""
    world = World(history_bytes_max=1000)
    reader = world.post.watch("a/", snapshot=True)
    world.post.meet(world.town)
    world.town.ask(Put("a/1", b"before"), peer=999)
    world.post.settle()
    world.post.cut()
    for number in range(20):
        world.town.ask(Put("a/2", b"%d" % number), peer=999)
    world.town.ask(Delete("a/1"), peer=999)
    world.post.meet(world.town)
    assert [[event.kind for event in events] for events in reader.batches] == [
        ["synced"],
        ["put"],
        ["reset"],
        ["put", "synced"],
    ]
    assert reader.state == {"a/2": b"19"}


def test_s4_without_a_snapshot_a_gap_is_an_error_and_not_silence() -> None:
    """ "never silence"."""
    world = World(history_bytes_max=1000)
    reader = world.post.watch("a/")
    world.post.meet(world.town)
    world.post.cut()
    for number in range(20):
        world.town.ask(Put("a/2", b"%d" % number), peer=999)
    world.post.meet(world.town)
    assert isinstance(reader.ended, WatchCompacted)
    assert reader.batches == []


def test_s4_an_idle_watch_is_not_reset_for_what_happened_elsewhere() -> None:
    """ "resumable": an answer to anything at all tells how far a watch has come that saw nothing."""
    world = World(history_bytes_max=1000)
    reader = world.post.watch("a/", snapshot=True)
    world.post.meet(world.town)
    for number in range(20):
        world.town.ask(Put("b/1", b"%d" % number), peer=999)
    world.post.ask(Ping())
    world.post.settle()
    reader.cursor.nothing_before(world.town.engine.revision)  # as the client does with a pong
    world.post.cut()
    world.post.meet(world.town)
    world.town.ask(Put("a/1", b""), peer=999)
    world.post.settle()
    assert [[event.kind for event in events] for events in reader.batches] == [["synced"], ["put"]]


def test_s4_a_transaction_reaches_a_watch_in_one_piece() -> None:
    """ "atomic per revision"."""
    world = World()
    reader = world.post.watch("")
    world.post.meet(world.town)
    writes = tuple(Put(f"k{number}", b"") for number in range(1000))
    world.town.ask(Transact(when=(), then=writes), peer=999)
    world.town.ask(DeletePrefix(prefix=""), peer=999)
    world.post.settle()
    assert [len(events) for events in reader.batches] == [1000, 1000]
