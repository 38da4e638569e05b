"""The step at which all members stop: the coordinator decides it, and writes it once."""

import pytest

from rdzv.core.stopping import RoundStop
from tests.guarantees.test_r21_one_loop import Trainer, a_run, until
from tests.support.runs import connected, rounds_of

pytestmark = pytest.mark.virtual_time


async def test_a_decision_about_the_step_is_never_overwritten() -> None:
    """Regression: a member that read late, after a reset of its watch, read a second decision and stopped elsewhere."""
    async with a_run() as run:
        handlers = {name: run.handler(name) for name in "ab"}
        trainers = [Trainer(name) for name in "ab"]
        keys = handlers["a"].node.keys
        for trainer in trainers:
            run.start(trainer.train(rounds_of(handlers[trainer.name])))
        await until(lambda: all(trainer.step == 5 for trainer in trainers))
        operator = run.handler("operator")
        link = await connected(operator)
        decided: list[RoundStop] = []

        async def decide_before(request: object, when: str) -> None:
            """Decide as another coordinator does, before this one has heard of it."""
            for put in getattr(request, "then", ()):
                if when == "before" and put.key == keys.stop and RoundStop.unpack(put.value).decided and not decided:
                    decided.append(RoundStop.unpack(put.value).replace(step=20))
                    await link.store.put(keys.stop, decided[0].pack())

        for client in run.clients.values():
            client.hook = decide_before
        await handlers["b"].drain(within=60)
        await until(lambda: len(trainers[0].played) == 2)
        entry = await link.store.get(keys.stop)
        assert entry is not None
        assert RoundStop.unpack(entry.value) == decided[0]
        assert [trainer.left_before[0] for trainer in trainers] == [20, 20]
