"""Play runs to the page of a store: every state, at any size, by the product's own functions.

    python -m tools.page_states [--port 8123]     then open http://127.0.0.1:8123/#stuck-300

A run is named STATE-NODES; `STATES` has the states. The page, its policy, the reports, the changes and the history are
those of `rdzv serve`; only what the store holds is made up. `silent()` has it say nothing any more, as a dead network.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import anyio
from aiohttp import web

from rdzv.core.absent import Missing
from rdzv.core.history import Chapter, History, Incident
from rdzv.core.live.changes import report_for_page, server_sent_event, summary_of, without_jitter
from rdzv.core.report import RunStatus, run_cost, status_json
from rdzv.core.round import Participant
from rdzv.core.state import Ban, Closed, Phase
from rdzv.core.stuck.pace import StepOf
from rdzv.display.history import history_as_json, timeline
from rdzv.display.pages import live_page
from rdzv.http.app import security_policy_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["HOSTILE", "STATES", "Played", "play", "status_of"]

HOSTILE: Final = (
    "<script>document.title='hacked'</script>",
    "<img src=x onerror=document.title='hacked'>",
    "\u05e9\u05dc\u05d5\u05dd \u202eright to left",
    "x" * 500,
    "a\u200bb zero width",
    "&lt;b&gt; 'q' \"d\"",
    "{{7*7}} ${7*7} %s",
    "line\nfeed\ttab",
    "%E0%A4%A",
    "\U0001f600\u0301\u0301\u0301",
)
DONE: Final = Closed(reason="the command has succeeded on every node")
NOT_A_NUMBER: Final = Closed(reason="the loss is NaN since step 41,200", given_up=True, status=93)
PER_RACK: Final = ((48, 8), (400, 20), (2000, 40), (10**9, 64))


def names_of(count: int) -> list[str]:
    """Return the names of the nodes."""
    return [f"gpu-{number:05}" for number in range(count)]


def _participants(names: list[str], count: int) -> tuple[Participant, ...]:
    per = next(per for most, per in PER_RACK if count <= most)
    # Ranks need not follow racks: 7919 is prime to every size that is played.
    order = [names[number * 7919 % len(names)] for number in range(len(names))] if count > 48 else names
    return tuple(
        Participant(
            node_id=name,
            rank=rank,
            address=f"10.{rank >> 16}.{rank >> 8 & 255}.{rank & 255}",
            attributes={"rack": f"r{names.index(name) // per:02}" if count < 2000 else f"r{int(name[4:]) // per:03}"},
        )
        for rank, name in enumerate(order)
    )


def history_of(names: list[str], *, rounds: int, until: float) -> History:
    """Return a history in which a node is lost in each round but the last, and comes back in the next but one."""
    lengths = [(3000.0 + 400 * (number % 5), 20.0 + 90 * (number % 3)) for number in range(rounds - 1)]
    began = until - 7260.0 - sum(map(sum, lengths))
    chapters = []
    for number in range(rounds):
        trained, away = lengths[number] if number < rounds - 1 else (7260.0, 0.0)
        lost, back = names[(7 * number + 3) % len(names)], names[(7 * number - 4) % len(names)]
        members = [name for name in names if number == 0 or name != back]
        why = ("its process ended", "nothing was heard of it for its ttl")[number % 2]
        gone = Incident(kind="lost", after=trained, count=1, node_ids=(lost,), reason=why, at=began + trained)
        chapters.append(
            Chapter(
                number=number,
                size=len(members),
                node_ids=tuple(members[:64]),
                joined=len(members) if number == 0 else 1,
                joined_ids=() if number < 2 else (names[(7 * number - 11) % len(names)],),
                after=None if number == 0 else sum(lengths[number - 1]),
                incidents=(gone,) if number < rounds - 1 else (),
                at=began,
                stopped=trained if number < rounds - 1 else None,
                short=max(away - 30, 0.0),
            )
        )
        began += trained + away
    return History(chapters=tuple(chapters))


def status_of(run_id: str, *, now: float, since: float = 0.0) -> tuple[RunStatus, History]:
    """Return a played run.

    Args:
        run_id: STATE-NODES.
        now: The hour.
        since: Seconds for which it has been played.
    """
    state, _, text = run_id.rpartition("-")
    count = int(text)
    names = names_of(count)
    if state == "hostile":
        names = [*HOSTILE, *names][:count]
    history = history_of(names, rounds=4 if count <= 4 else 9, until=now - since)
    members = _participants(names, count)
    newest = 48_000 + int(2.5 * since)
    steps = {
        one.node_id: StepOf(step=newest - (one.rank % 3 == 1), age=(one.rank % 7) / 20, rate=2.5 + one.rank % 9 / 100)
        for one in members
    }
    status = RunStatus(
        run_id=run_id,
        round=len(history.chapters) - 1,
        phase=Phase.TRAINING,
        reason="",
        waits_for=f"round {len(history.chapters) - 1} stands with {count} nodes",
        members=members,
        waiting=(),
        spares=(),
        coordinator=names[0],
        world_size=count,
        settings={"min_nodes": max(1, count // 2), "max_nodes": count, "last_call_timeout": 30.0},
        bootstrap=("10.0.0.1", 29500),
        now=now,
        phase_for=7260.0 + since,
        since=dict.fromkeys(names, now - 7260.0 - since),
        steps=steps,
    )
    return STATES[state](status, history, since)


def _gather(status: RunStatus, _: History, since: float) -> tuple[RunStatus, History]:
    names = [one.node_id for one in status.members]
    absent = tuple(Missing(node_id=name, how="never seen") for name in names[2:5])
    return replace(
        status,
        phase=Phase.GATHERING,
        round=None,
        bootstrap=None,
        members=(),
        steps={},
        world_size=0,
        waiting=tuple(names[:2]),
        missing=absent,
        missing_count=3,
        waited=750.0 + since,
        phase_for=750.0 + since,
        settings={**status.settings, "min_nodes": len(names)},
        waits_for=f"2 of at least {len(names)} nodes; waiting for {', '.join(names[2:5])}",
    ), History()


def _last_call(status: RunStatus, _: History, since: float) -> tuple[RunStatus, History]:
    names = [one.node_id for one in status.members]
    return replace(
        status,
        phase=Phase.LAST_CALL,
        round=None,
        bootstrap=None,
        members=(),
        steps={},
        world_size=0,
        waiting=tuple(names[:-2]),
        last_call_left=max(0.0, 600.0 - since),
        phase_for=since,
        waits_for=f"last call; {len(names) - 2} of at most {len(names)} nodes",
    ), History()


def _train(status: RunStatus, history: History, _: float) -> tuple[RunStatus, History]:
    return status, history


def _with_steps(status: RunStatus, steps: dict[str, StepOf]) -> RunStatus:
    return replace(status, steps={**status.steps, **steps})


def _stuck(status: RunStatus, history: History, since: float) -> tuple[RunStatus, History]:
    behind = status.members[len(status.members) // 2].node_id
    steps = {one.node_id: StepOf(step=48_001, age=95.0 + since, rate=2.5) for one in status.members}
    return _with_steps(status, {**steps, behind: StepOf(step=48_000, age=95.4 + since, rate=2.5)}), history


def _stand(status: RunStatus, history: History, since: float) -> tuple[RunStatus, History]:
    return _with_steps(
        status, {one.node_id: StepOf(step=48_001, age=95.0 + since, rate=2.5) for one in status.members}
    ), history


def _slow(status: RunStatus, history: History, _: float) -> tuple[RunStatus, History]:
    newest = max(one.step or 0 for one in status.steps.values())
    behind = [status.members[at % len(status.members)].node_id for at in (3, len(status.members) // 2, -5)]
    return _with_steps(status, {name: StepOf(step=newest - 40, age=0.6, rate=1.6) for name in behind}), history


def _loss(status: RunStatus, history: History, since: float) -> tuple[RunStatus, History]:
    gone = status.members[len(status.members) // 3]
    lost = Missing(node_id=gone.node_id, how="lost", ago=4.0 + since, address=gone.address, why="its process ended")
    return replace(
        status,
        members=tuple(one for one in status.members if one is not gone),
        steps={name: one for name, one in status.steps.items() if name != gone.node_id},
        missing=(lost,),
        missing_count=1,
        attributes={gone.node_id: gone.attributes},
    ), history


def _drain(status: RunStatus, history: History, since: float) -> tuple[RunStatus, History]:
    leaving = [one.node_id for one in status.members[2:4]]
    return replace(
        status,
        draining={name: (max(90.0 - since, 0.0), "maintenance of rack 1") for name in leaving},
        waiting=("gpu-spare-1",),
        spares=("gpu-spare-1",),
        unfit={"gpu-99999": "ECC errors on GPU 3"},
        banned_where={"rack=r17": Ban(reason="switch", by="operator", ends_in=900.0 - since)},
    ), history


def _closed(status: RunStatus, history: History, _: float, verdict: Closed = DONE) -> tuple[RunStatus, History]:
    closing, reason = verdict.replace(by=status.members[0].node_id), verdict.reason
    gone = Incident(kind="closed", after=7260.0, reason=f"by {closing.by}: {reason}", at=status.now)
    last = history.chapters[-1].replace(incidents=(gone,))
    return replace(
        status,
        phase=Phase.CLOSED,
        closed=reason,
        closing=closing,
        closed_at=status.now,
        members=(),
        last_members=status.members,
        steps={},
        waits_for=f"the run is closed by {closing.by}: {reason}",
    ), history.replace(chapters=(*history.chapters[:-1], last))


def _given_up(status: RunStatus, history: History, since: float) -> tuple[RunStatus, History]:
    return _closed(status, history, since, NOT_A_NUMBER)


def _hostile(status: RunStatus, history: History, since: float) -> tuple[RunStatus, History]:
    gone = Missing(node_id=HOSTILE[0] + "2", how="lost", ago=30.0 + since, address=HOSTILE[3], why=HOSTILE[1])
    first = status.members[0]
    return replace(
        status,
        members=(first.replace(attributes={HOSTILE[1]: HOSTILE[0]}), *status.members[1:]),
        missing=(gone,),
        missing_count=1,
        waiting=(HOSTILE[2] + "2",),
        banned={HOSTILE[1] + "3": Ban(reason=HOSTILE[2], by=HOSTILE[0])},
        draining={first.node_id: (60.0, HOSTILE[1])},
        accused=((status.members[1].node_id, HOSTILE[0], HOSTILE[2]),),
        waits_for=HOSTILE[2] + HOSTILE[0],
        steps={**status.steps, first.node_id: StepOf(step=7, age=1.0, rate=1.0, busy=HOSTILE[1])},
    ), history


STATES: Final[dict[str, Callable[[RunStatus, History, float], tuple[RunStatus, History]]]] = {
    "gather": _gather,
    "lastcall": _last_call,
    "train": _train,
    "stuck": _stuck,
    "stand": _stand,
    "slow": _slow,
    "loss": _loss,
    "drain": _drain,
    "closed": _closed,
    "givenup": _given_up,
    "hostile": _hostile,
}


class Played:
    """A server that plays runs.

    Args:
        listed: The runs that the overview lists.

    Attributes:
        url: Where it is; once it listens.
        is_silent: Whether it says nothing any more, and closes nothing.
    """

    def __init__(self, listed: tuple[str, ...] = ()) -> None:
        self._listed = listed
        self._began = time.time()
        self.url: str = ""
        self.is_silent: bool = False
        self._page = live_page()

    def state(self, chosen: str, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return all that a page is told of, now."""
        runs = []
        shown = None
        for run_id in dict.fromkeys((*self._listed, *([chosen] if chosen else []))):
            try:
                status, history = self._status(run_id)
            except (KeyError, ValueError):
                continue
            full, cost = status_json(status), run_cost(run_id, history, now=status.now, waited=status.waited)
            if run_id == chosen:
                happened = sum(1 + len(one.incidents) for one in history.chapters)
                told = report_for_page(full) | {"happened": happened, "cost": cost.as_json()}
                shown = without_jitter((before or {}).get("run") or {}, told)
            runs.append(summary_of(full, cost, history.chapters, status.now) | {"steps": None})
        return {"now": time.time(), "store": "4591aeef2467c5a2", "chosen": chosen, "runs": runs, "run": shown}

    def _status(self, run_id: str) -> tuple[RunStatus, History]:
        now = time.time()
        return status_of(run_id, now=now, since=now - self._began)

    async def _show(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": security_policy_of(self._page)}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def _happened(self, request: web.Request) -> web.Response:
        run_id = request.match_info["run"]
        status, history = self._status(run_id)
        if request.match_info["what"] == "timeline":
            return web.json_response(timeline(run_id, history, now=status.now))
        return web.json_response(history_as_json(run_id, history, run_cost(run_id, history, now=status.now)))

    async def _stream_events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            before = None
            while True:
                if not self.is_silent:
                    now = self.state(request.query.get("run", ""), before)
                    await response.write(server_sent_event(before, now))
                    before = now
                await anyio.sleep(1.0)
        return response


@contextlib.asynccontextmanager
async def play(listed: tuple[str, ...] = (), *, port: int = 0) -> AsyncIterator[Played]:
    """Serve played runs on this machine."""
    played = Played(listed)
    application = web.Application()
    application.add_routes(
        [
            web.get("/", played._show),
            web.get("/api/events", played._stream_events),
            web.get("/api/runs/{run}/{what}", played._happened),
        ]
    )
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        assert site._server is not None
        played.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        yield played
    finally:
        await runner.cleanup()


async def _serve(port: int) -> None:
    listed = ("train-4", "gather-8", "lastcall-40", "drain-40", "closed-40", "givenup-40", "stuck-300", "slow-1000")
    async with play(listed, port=port) as played:
        print(played.url)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Play runs in every state to the page of a store.")
    parser.add_argument("--port", type=int, default=8123)
    asyncio.run(_serve(parser.parse_args().port))
