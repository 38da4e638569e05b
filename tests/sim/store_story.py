"""One seed, one story of a store: clients use it while it, its disk, the network and the clients themselves have
faults.

Then it is calm, and the promises must hold: every client gets answers, every watch has delivered every event, leases
without a keeper are gone, a lease without renewal ends in time on an idle store, and the clients' history is
linearizable. All the while `truth.py` checks every answer and every event. Promises S1, S2, S3, S4, S5 and S10.

    python -m tests.sim store --hours 8           story after story, from a fresh seed
    python -m tests.sim store --seed 17           one story, told step by step
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from store import when
from store.errors import (
    ConnectionLost,
    LeaseNotFound,
    LimitExceeded,
    StoreError,
    StoreReplaced,
    StoreTimeoutError,
    StoreUsageError,
    WatchCompacted,
)
from store.messages import Event, Put
from tests.sim.machines import HeardProcess, Seams
from tests.sim.store_troubles import StoreTroubles
from tests.sim.story import Story
from tests.sim.truth import HeardClient, HeardWatch
from tests.support.linearizability import (
    Add,
    CompareAndSet,
    Delete,
    Get,
    Operation,
    Presence,
    RegisterInput,
    RegisterModel,
    UndecidedError,
    carry_out,
    check,
)
from tests.support.linearizability import Put as Write

__all__ = ["StoreStory"]

TROUBLE = 200.0  # seconds with every kind of fault
CALM = 34.0  # seconds in which all effects of the faults must end; see `_calm_down`
ANSWERED_WITHIN = 20.0  # seconds: a dead connection is noticed after 15, and the client reconnects within 3
CHAPTER = 20.0  # seconds; then other keys are used, so that a history stays short enough to be checked
CONFIGURATIONS_MAX = 100_000
MONEY = 100
PROBE_TTL = 2.0
ON_ITS_WAY = 2.0  # seconds that an event may take without faults
NO_ANSWER = (ConnectionLost, StoreTimeoutError)
PROMPTLY = 0.1 + 0.01  # S5's limit, and the time of a commit on a healthy disk


class StoreStory(Story):
    """One story. Its public names are for its troubles."""

    command, dice = "store", "store story"
    histories, sessions = (64 * 1024 * 1024, 200_000, 20_000), (300.0, 300.0, 15.0)

    def __init__(
        self, seed: int, seams: Seams, trace: Callable[[str], None] | None, *, trouble: float = TROUBLE
    ) -> None:
        super().__init__(seed, seams, trace)
        self.trouble = trouble
        self.say(f"seed {seed}: {'a durable store' if self.durable else 'a store in memory'}, {self.limits}")
        self.troubles: StoreTroubles = StoreTroubles(self)
        self.history: list[Operation] = []
        self.pending: dict[int, Operation] = {}
        self.asked = 0
        self.once: Counter[bytes] = Counter()
        self.processes: dict[str, HeardProcess] = {}
        self.watches: dict[HeardWatch, None] = {}
        self.answered: set[str] = set()
        self.deleted_at: dict[str, float] = {}

    def tell(self) -> dict[str, int]:
        timeline = self.cosmos.timeline
        for number in range(self.rng.randint(2, 4)):
            self.start(f"c{number}")
        self.director.start_task(self.troubles.make())
        timeline.run_until_time(self.now + self.trouble)
        self._calm_down()
        timeline.run_until_time(self.now + CALM)
        self._check_the_end()
        return {"unanswered": sum(operation.returned is None for operation in self.history)}

    def _revision(self, events: tuple[Event, ...]) -> None:
        for event in events:
            if event.key.startswith("once/"):
                self.once[event.value] += 1
                self.truth.require(self.once[event.value] == 1, f"{event} was written twice (S2)")
            elif event.kind == "delete":
                self.deleted_at[event.key] = self.cosmos.now

    def _calm_down(self) -> None:
        """End all faults, and resume or restart the processes."""
        self.quieten()
        for name, process in list(self.processes.items()):
            process.resume()
            if not process.alive:
                self.start(name)
        probe = self.cosmos.process("probe")
        probe.host.start_task(self._look_at_leases(probe))

    async def _look_at_leases(self, process: HeardProcess) -> None:
        try:
            await asyncio.sleep(ANSWERED_WITHIN)
            async with process.client() as client:
                await self._probe(client)
        except StoreError as error:
            self.truth.fail(f"the probe was told {error!r}")
        self.answered.add("the probe")

    async def _probe(self, client: HeardClient) -> None:
        """Check that a lease without renewal ends up to 100 ms after its TTL, not before, on a nearly idle store."""
        for number in range(3):
            sent_at = self.cosmos.now
            lease = await client.grant(PROBE_TTL)
            had_at = self.cosmos.now
            key = f"probe/{number}"
            await client.put(key, b"", lease=lease)
            await asyncio.sleep(PROBE_TTL * 1.2)
            gone_at = self.deleted_at.get(key)
            self.truth.require(gone_at is not None, f"{key} has not gone with its lease (S5)")
            assert gone_at is not None
            rate = self.truth.server_rate
            self.truth.require(
                (gone_at - sent_at) * rate >= PROBE_TTL - 0.001 and (gone_at - had_at) * rate <= PROBE_TTL + PROMPTLY,
                f"{key} went after {(gone_at - sent_at) * rate:.4f} s, on a lease of {PROBE_TTL:g} s (S5)",
            )

    def _check_the_end(self) -> None:
        require = self.truth.require
        missing = {*self.processes, "the probe"} - self.answered
        require(not missing, f"{missing} have had no answer within {ANSWERED_WITHIN:g} s of quiet")
        for watch in self.watches:
            unheard = watch.unheard()
            late = unheard is not None and watch.books.time_of(unheard[0].revision) < self.cosmos.now - ON_ITS_WAY
            require(not late, f"{watch._who}, watching {watch._audit.prefix!r}, has never heard {unheard} (S4)")
        left = self.cosmos.store.books.now_under("lease/")
        require(not left, f"these have had no keeper for {CALM:g} s, and they are there: {left} (S5)")
        for operation in self.pending.values():
            self.history.append(operation)
        try:
            verdict = check(self.history, RegisterModel(), configurations_max=CONFIGURATIONS_MAX)
        except UndecidedError:
            return  # too many operations overlap to decide; the truth has checked every answer all the same
        require(verdict.linearizable, f"{verdict} (S1)")

    def start(self, name: str) -> None:
        if name in self.processes and self.processes[name].alive:
            return
        process = self.processes[name] = self.cosmos.process(name)
        self.say(f"{process.source} starts")
        process.host.start_task(self._live(process))

    async def _live(self, process: HeardProcess) -> None:
        try:
            while True:
                try:
                    client = process.client(timeout=process.rng.choice((3.0, 12.0, 30.0)))
                    client.hook = lambda request, at: self.troubles.imperil(process, request, at)
                    async with client:
                        await self._use(process, client)
                except ConnectionLost as error:
                    self.truth.require(not error.maybe_applied, f"{process.source}: nothing was asked, and yet {error}")
        except StoreError as error:
            self.truth.fail(f"{process.source} has ended with {error!r}")

    async def _use(self, process: HeardProcess, client: HeardClient) -> None:
        """Use the store until it was replaced by another."""
        host = process.host
        work = [
            host.start_task(self._until_replaced(client, job(process, client)))
            for job in (self._work, self._work, self._pay, self._watch, self._watch, self._hold, self._answer)
        ]
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        self.truth.require(
            isinstance(client.failure, StoreReplaced) and not self.durable,
            f"{process.source} has ended with {client.failure!r} (S10)",
        )

    async def _until_replaced(self, client: HeardClient, work: Any) -> None:
        try:
            await work
        except StoreError as error:
            if client.failure is None:
                self.truth.fail(f"{client.who} was told {error!r}")

    async def _answer(self, process: HeardProcess, client: HeardClient) -> None:
        """Wait until it is calm, then check that a ping is answered."""
        while not self.calm:
            await asyncio.sleep(1.0)
            if client.failure is not None:
                raise client.failure
        await client.ping(timeout=ANSWERED_WITHIN)
        self.answered.add(process.name)
        while client.failure is None:  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(1.0)

    def _place(self, client: HeardClient, name: str) -> str:
        """Return a key that belongs to one store and one chapter."""
        return f"{client.store_id}/{int(self.cosmos.now / CHAPTER)}/{name}"

    async def _work(self, process: HeardProcess, client: HeardClient) -> None:
        """Make random requests, in bursts."""
        rng = process.rng
        while client.failure is None:
            for _ in range(rng.randrange(10)):
                if rng.random() < 0.3:
                    await self._write_once(process, client)
                else:
                    await self._operate(process, client, self._choose(rng, client))
                await asyncio.sleep(rng.expovariate(20))
            await asyncio.sleep(rng.expovariate(0.1))

    def _choose(self, rng: random.Random, client: HeardClient) -> RegisterInput:
        key = self._place(client, rng.choice("abcd"))
        value = b"%d" % rng.randrange(4)
        kinds: list[RegisterInput] = [
            Get(key),
            Write(key, value),
            Delete(key),
            Add(key, rng.randrange(1, 3)),
            Add(key, 1),
            CompareAndSet(key, value, b"%d" % rng.randrange(4)),
            CompareAndSet(key, value, Presence.MISSING),
        ]
        return rng.choice(kinds)

    async def _operate(self, process: HeardProcess, client: HeardClient, wanted: RegisterInput) -> None:
        self.asked += 1
        number, call = self.asked, self.cosmos.now
        unanswered = self.pending[number] = Operation(client=process.source, call=call, input=wanted)
        timeout = process.rng.choice((0.05, 5.0, 30.0))
        try:
            output = await carry_out(client, wanted, timeout)
        except NO_ANSWER as error:
            if error.maybe_applied:
                self.history.append(unanswered)
        except LimitExceeded:
            pass  # the disk is full, and nothing was changed
        else:
            now = self.cosmos.now
            self.history.append(Operation(client=process.source, call=call, returned=now, input=wanted, output=output))
        del self.pending[number]

    async def _write_once(self, process: HeardProcess, client: HeardClient) -> None:
        """Make a write that is never repeated, so the store must not apply it twice."""
        self.asked += 1
        try:
            await client.put(f"once/{process.name}", b"%d" % self.asked)
        except (*NO_ANSWER, LimitExceeded):
            pass

    async def _pay(self, process: HeardProcess, client: HeardClient) -> None:
        """Move money between accounts. The total must not change."""
        rng, keys = process.rng, [f"bank/{client.store_id}/{name}" for name in "xyz"]
        while client.failure is None:
            await asyncio.sleep(rng.expovariate(0.15))
            try:
                entries = await client.get_many(keys)
                if None in entries:
                    await client.transact(
                        when=[when.missing(key) for key in keys], then=[Put(key, b"%d" % MONEY) for key in keys]
                    )
                    continue
                amounts = [int(entry.value) for entry in entries if entry is not None]
                self.truth.require(sum(amounts) == MONEY * 3, f"there is {amounts} on the accounts (S1)")
                giver, taker = rng.sample(range(3), 2)
                amount = rng.randrange(10)
                await client.transact(
                    when=[when.value(keys[index]) == b"%d" % amounts[index] for index in (giver, taker)],
                    then=[
                        Put(keys[giver], b"%d" % (amounts[giver] - amount)),
                        Put(keys[taker], b"%d" % (amounts[taker] + amount)),
                    ],
                )
            except (*NO_ANSWER, LimitExceeded):
                pass

    async def _watch(self, process: HeardProcess, client: HeardClient) -> None:
        """Watch random prefixes. `HeardWatch` checks the events."""
        rng = process.rng
        while client.failure is None:
            prefix = rng.choice(("", "bank/", "once/", "once/", "lease/", f"{client.store_id}/"))
            options: dict[str, Any] = {"snapshot": rng.random() < 0.6}
            if not options["snapshot"] and rng.random() < 0.5:
                options["start_revision"] = max(self.truth.books_of(client.store_id).revision - rng.randrange(50), 1)
            try:
                async with client.watch(prefix, **options) as watch:
                    self.watches[watch] = None
                    try:
                        await self._listen(rng, watch)
                    finally:
                        self.watches.pop(watch, None)
            except (WatchCompacted, *NO_ANSWER, StoreUsageError):
                await asyncio.sleep(0.1)  # for example a start revision that a replacement of the store has not reached

    async def _listen(self, rng: random.Random, watch: HeardWatch) -> None:
        seconds = 1e9 if self.calm else rng.choice((0.5, 10.0, 60.0))
        try:
            async with asyncio.timeout(seconds):
                async for _ in watch.batches():
                    if rng.random() < 0.05:
                        await asyncio.sleep(0.5)
        except TimeoutError:
            pass

    async def _hold(self, process: HeardProcess, client: HeardClient) -> None:
        """Hold leases, one after the other, and end them in different ways."""
        rng = process.rng
        dead: list[Any] = []
        number = 0
        while client.failure is None:
            await asyncio.sleep(rng.expovariate(0.5))
            if self.calm:
                continue
            number += 1
            try:
                lease = await client.grant(rng.choice((0.5, 2.0, 6.0)), disconnect_ttl=rng.choice((None, 0.4)))
                await client.put(f"lease/{process.source}/{number}", b"", lease=lease)
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(lease.ttl / 3)
                    await lease.keep_alive()
                if rng.random() < 0.3:
                    await lease.revoke()
                dead.append(lease)
                if rng.random() < 0.5:
                    await rng.choice(dead).keep_alive()  # it may have expired, and must not exist again
            except (*NO_ANSWER, LimitExceeded, LeaseNotFound):
                pass
