"""Random stories with events that the large simulator does not have: bans, other settings, calls that are cancelled
twice, outages of minutes, and a store with few conditions per transaction.

    RDZV_TEST_MIXED=0:1000 python -m pytest tests/sim/test_mixed_story.py
"""

import asyncio
import os
import random
from collections import defaultdict

import anyio
import pytest

from rdzv.errors import RendezvousRefusedError, RendezvousSettingsError
from rdzv.membership import RendezvousInfo
from rdzv.node.coordinator.term import CoordinatorTerm
from rdzv.node.handler import Handler
from tests.support.limits import limits_with
from tests.support.runs import VirtualRun, assert_one_round

pytestmark = pytest.mark.virtual_time

FIRST, END = (int(number) for number in os.environ.get("RDZV_TEST_MIXED", "0:8").split(":"))
NAMES = "abcd"
FEWEST = 2
CAPPED = limits_with(operations_max=6)  # with so few conditions, a commit of all four nodes needs the marker
OUTAGES = (1.0, 40.0, 290.0, 590.0)  # seconds; several outages may follow each other
QUIET = 900.0  # seconds in which all must meet after the last event


class Story:
    """One run of four nodes, and the events that happen to it."""

    def __init__(self, seed: int, run: VirtualRun) -> None:
        self.rng = random.Random(seed)
        self.run = run
        self.told: list[str] = []
        self.infos: dict[tuple[int, int], list[RendezvousInfo]] = defaultdict(list)  # by round and term
        self.last: dict[str, RendezvousInfo] = {}
        self.handlers: dict[str, Handler] = {}
        self.lives: dict[str, asyncio.Task[None]] = {}

    def begin(self, name: str) -> None:
        """Start a node."""
        self.handlers[name] = self.run.handler(name)
        self.live_on(name)

    def live_on(self, name: str) -> None:
        """Let a node take part from now on."""
        self.lives[name] = self.run.start(self._life(name), f"life of {name}")

    async def _life(self, name: str) -> None:
        handler = self.handlers[name]
        async with handler.changes() as changes:
            while True:
                try:
                    info = await handler.next_rendezvous()
                except RendezvousRefusedError:
                    await asyncio.sleep(1)  # it is banned, and tries again
                    continue
                self.last[name] = info
                self.infos[info.round, info._membership.round.term].append(info)
                while not handler.num_nodes_changed():
                    await changes.poll(1.0)

    async def ban(self) -> None:
        """Ban a node, for a while or until it is unbanned, at once or from the next round on."""
        by, name = self.rng.sample(NAMES, 2)
        lasts = self.rng.choice((None, 2.0, 20.0))
        await self.handlers[by].ban(name, "slow", now=self.rng.random() < 0.5, lasts=lasts)
        if lasts is None:
            await asyncio.sleep(self.rng.uniform(0, 10))
            await self.handlers[by].unban(name)

    async def come_with_other_settings(self) -> None:
        """Start a node with other settings. It is refused, and does not coordinate."""
        other = self.run.handler("stranger", min_nodes=1, max_nodes=1)
        with pytest.raises(RendezvousSettingsError):
            await other.next_rendezvous()
        await other.aclose()

    async def cancel(self) -> None:
        """Cancel a node's call, or its wait for changes, twice. Then it takes part again."""
        name = self.rng.choice(NAMES)
        life = self.lives[name]
        for _ in range(2):
            life.cancel()
            await asyncio.sleep(self.rng.choice((0.0, 0.0005, 0.05)))
        await asyncio.wait([life])
        with anyio.move_on_after(self.rng.choice((0.0, 0.0005, 0.002, 0.5))):
            await self.handlers[name].next_rendezvous()
        self.live_on(name)

    async def lose_the_store(self) -> None:
        """Kill the store, and restart it after seconds or minutes."""
        self.run.kill_store()
        await asyncio.sleep(self.rng.choice(OUTAGES))
        self.run.restart_store()

    async def die(self) -> None:
        """Kill a node, and start another process of its name."""
        name = self.rng.choice(NAMES)
        self.lives[name].cancel()
        self.run.crash(name)
        await asyncio.gather(*self.run._burials)
        await asyncio.sleep(self.rng.uniform(0, 5))
        self.run.network.stop_refusing(name)
        self.begin(name)

    async def tell(self) -> None:
        """Make several random events happen. Then check that all nodes meet."""
        for name in NAMES:
            self.begin(name)
        for _ in range(self.rng.randint(2, 6)):
            await asyncio.sleep(self.rng.choice((0.001, 0.1, 2.0)) * self.rng.uniform(0.5, 1.5))
            happening = self.rng.choice(
                (self.ban, self.come_with_other_settings, self.cancel, self.cancel, self.lose_the_store, self.die)
            )
            self.told.append(happening.__name__)
            await happening()
        with anyio.fail_after(QUIET):
            while not self.all_are_in_one_round():  # noqa: ASYNC110  there is no single event to wait for
                await asyncio.sleep(1)
        for infos in self.infos.values():
            assert len({(one.round, one.world_size, one.bootstrap_address) for one in infos}) == 1
            assert len({one.rank for one in infos}) == len({one.node_id for one in infos}) <= infos[0].world_size
            assert FEWEST <= infos[0].world_size <= len(NAMES), "as the run's settings say, and not the stranger's"
            assert "stranger" not in {one.node_id for one in infos}
        assert len({number for number, _ in self.infos}) == len(self.infos), "a round was completed in two terms"

    def all_are_in_one_round(self) -> bool:
        """Return True if all nodes have last joined the same round, with all of them, and it is not superseded."""
        last = [self.last[name] for name in NAMES if name in self.last]
        if len(last) < len(NAMES) or {one.world_size for one in last} != {len(NAMES)}:
            return False
        if len({one.round for one in last}) > 1 or any(one.superseded() for one in last):
            return False
        assert_one_round(last)
        return True


@pytest.mark.some_of(3)
@pytest.mark.parametrize("seed", range(FIRST, END))
async def test_r3_all_nodes_meet_after_random_events(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, marked, mark = CAPPED if seed % 2 else None, [], CoordinatorTerm._write_sync_marker

    async def counted(term: CoordinatorTerm) -> int:
        marked.append(term)
        return await mark(term)

    monkeypatch.setattr(CoordinatorTerm, "_write_sync_marker", counted)
    async with VirtualRun(
        seed=seed,
        durable=True,
        limits=limits,
        min_nodes=FEWEST,
        max_nodes=len(NAMES),
        last_call_timeout=1,
        join_timeout=3600,
        ttl=3,
        disconnect_ttl=0.6,
    ) as run:
        story = Story(seed, run)
        try:
            await story.tell()
        except BaseException as error:
            error.add_note(f"seed {seed}: {', '.join(story.told)}")
            raise
    assert bool(marked) == (limits is not None), "where the store caps conditions, commits go by the marker"
