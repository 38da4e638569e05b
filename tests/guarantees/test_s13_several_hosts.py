"""S13: "a URL may list several hosts: at most one of them serves, and the survivors of its death meet at the next".

With real processes that are really killed, stopped and drained. All hosts of the list are addresses of this machine.
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import rdzv
import store
from tests.support.processes import Child, free_port, require, start_python

pytestmark = pytest.mark.some_here(3)

LOGS = "import logging; logging.basicConfig(level=logging.INFO)\n"
AWAITED = """
import asyncio, sys
import rdzv

async def main():
    step = 0
    async for round in rdzv.rounds(sys.argv[1], node_id=sys.argv[2]):
        async with round:
            print("round", round.number, "of", round.world_size, "rank", round.rank, "from step", step)
            step = max(step, round.number * 10_000)  # the same for all, newcomers too
            while True:
                await round.check(step)
                step += 1
                await asyncio.sleep(0.01)
    print("ended at step", step)

asyncio.run(main())
"""

BLOCKING = """
import sys, time
import rdzv.sync

step = 0
for round in rdzv.sync.rounds(sys.argv[1], node_id=sys.argv[2]):
    with round:
        print("round", round.number, "of", round.world_size, "rank", round.rank, "from step", step)
        step = max(step, round.number * 10_000)
        while True:
            round.check(step)
            step += 1
            time.sleep(0.01)
print("ended at step", step)
"""

KILLS = int(os.environ.get("RDZV_KILLS", "4"))
SOON = 10.0  # seconds, on a busy machine; benchmarks measure


class Job:
    """Nodes of a run whose URL lists three hosts, all of them this machine."""

    def __init__(self, stack: contextlib.AsyncExitStack, program: str, parameters: str) -> None:
        self.hosts = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        self.store = f"tcp://{','.join(self.hosts)}/job"
        self._url = f"{self.store}?min_nodes=2&last_call_timeout=60&{parameters}"
        self._stack, self._program = stack, program
        self.nodes: dict[str, Child] = {}

    async def start(self, *names: str) -> None:
        for name in names:
            child = start_python("-u", "-c", self._program, self._url, name)
            self.nodes[name] = await self._stack.enter_async_context(child)

    async def round_of(self, size: int, *, above: int = -1) -> int:
        """Wait until all nodes are in one round of this size above a number; return its number."""
        numbers = set()
        for node in self.nodes.values():
            while True:
                number, members = map(int, re.findall(r"round (\d+) of (\d+)", await node.line("round "))[0])
                if number > above and members == size:
                    break
            numbers.add(number)
        assert len(numbers) == 1, numbers
        return numbers.pop()

    async def host(self) -> str:
        """Return the name of the node whose process serves the store."""
        (name,) = [name for name, node in self.nodes.items() if any("hosts the store" in it for it in node.output)]
        return name

    async def stores(self) -> set[str]:
        """Return the ids of the stores that serve at the listed hosts."""
        ids = set()

        async def look(host: str) -> None:
            with contextlib.suppress(store.StoreError):
                async with store.connect(f"tcp://{host}", timeout=2.0) as client:
                    ids.add(str(client.store_id))

        await asyncio.gather(*map(look, self.hosts))
        return ids


@contextlib.asynccontextmanager
async def job(program: str, names: str, parameters: str = "") -> AsyncIterator[Job]:
    async with contextlib.AsyncExitStack() as stack:
        it = Job(stack, LOGS + program, f"max_nodes={len(names)}{parameters}")
        await it.start(*names)
        yield it


@pytest.mark.some_of(1)
@pytest.mark.parametrize("program", [AWAITED, BLOCKING], ids=["awaited", "blocking"])
@pytest.mark.in_ci
async def test_s13_survivors_of_the_hosts_death_go_on_again_and_again(program: str) -> None:
    async with job(program, "abcd") as it:
        number = await it.round_of(4)
        for kill in range(KILLS):
            it.nodes.pop(await it.host()).kill()
            began = time.monotonic()
            number = await it.round_of(3, above=number)
            assert time.monotonic() - began < SOON
            assert len(await it.stores()) == 1
            await it.start(f"new{kill}")
            number = await it.round_of(4, above=number)
        assert [node.returncode for node in it.nodes.values()] == [None] * 4


@pytest.mark.in_ci
async def test_s13_a_drained_host_costs_no_step() -> None:
    async with job(AWAITED, "abc") as it:
        number = await it.round_of(3)
        host = await it.host()
        async with contextlib.AsyncExitStack() as stack:
            drain = start_python("-m", "rdzv", "drain", it.store, host, "--reason", "maintenance")
            assert await (await stack.enter_async_context(drain)).wait() == 0
        left = it.nodes.pop(host)
        stopped_at = (await left.line("ended at step")).split()[-1]
        assert await left.wait() == 0
        await it.round_of(2, above=number)
        for node in it.nodes.values():
            assert f"from step {stopped_at}" in node.stdout[-1]


@pytest.mark.in_ci
async def test_s13_a_host_that_is_stopped_is_waited_for_and_no_second_store_begins() -> None:
    async with job(AWAITED, "abc", "&ttl=3") as it:
        number = await it.round_of(3)
        host = await it.host()
        (served,) = await it.stores()
        it.nodes[host].stop()
        until = time.monotonic() + 3 * 3.0  # three times the TTL
        for name, node in it.nodes.items():
            if name != host:
                await node.says("it may be at work", timeout=30)
        while time.monotonic() < until:
            assert await it.stores() == set()
        it.nodes[host].resume()
        rejoined = asyncio.create_task(it.round_of(3, above=number))
        while not rejoined.done():
            assert await it.stores() <= {served}
        assert await rejoined > number
        assert [node.returncode for node in it.nodes.values()] == [None] * 3
        assert await it.host() == host


async def test_s13_a_list_in_another_order_is_another_list_and_the_error_names_both() -> None:
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    parameters = "min_nodes=1&max_nodes=2&last_call_timeout=0.1"
    async with rdzv.connect(f"tcp://{first},{second}/job?{parameters}") as node:
        await node.next_rendezvous()
        async with rdzv.connect(f"tcp://{second},{first}/job?{parameters}") as other:
            with pytest.raises(rdzv.RendezvousSettingsError) as refused:
                await other.next_rendezvous()
    assert f"{first},{second}" in str(refused.value)
    assert f"{second},{first}" in str(refused.value)


async def test_s13_the_last_port_of_the_list_holds_for_hosts_without_one() -> None:
    port, other = free_port(), free_port()
    short, long = (
        f"127.0.0.1,127.0.0.2:{other},127.0.0.3:{port}",
        f"127.0.0.1:{port},127.0.0.2:{other},127.0.0.3:{port}",
    )
    parameters = "min_nodes=2&max_nodes=2"
    async with rdzv.connect(f"tcp://{short}/job?{parameters}") as one:
        async with rdzv.connect(f"tcp://{long}/job?{parameters}") as two, asyncio.timeout(SOON):
            infos = await asyncio.gather(one.next_rendezvous(), two.next_rendezvous())
        assert [info.world_size for info in infos] == [2, 2]


@pytest.mark.in_ci
async def test_s13_a_lost_machine_is_given_up_by_an_operators_word() -> None:
    async with job(AWAITED, "abc", "&ttl=3") as it:
        number = await it.round_of(3)
        stopped = it.nodes.pop(await it.host())
        place = re.search(r"at tcp://(\S+)", await stopped.says("hosts the store"))
        assert place is not None
        stopped.stop()  # a machine that is off is as silent
        for node in it.nodes.values():
            await node.says("it may be at work", timeout=30)
        async with contextlib.AsyncExitStack() as stack:
            other = next(one for one in it.hosts if one != place[1])
            refused = await stack.enter_async_context(start_python("-m", "rdzv", "lost", it.store, other))
            assert await refused.wait() == 1
            assert "so its machine is not lost" in refused.output[-1]
            word = await stack.enter_async_context(start_python("-m", "rdzv", "lost", it.store, place[1]))
            assert await word.wait() == 0, word.output
            assert any("two runs go on" in line for line in word.output)
        number = await it.round_of(2, above=number)
        stopped.resume()  # it was at work: its store gives way, and its node comes
        it.nodes["back"] = stopped
        await it.round_of(3, above=number)
        assert "a later store serves at" in stopped.written()
        assert len(await it.stores()) == 1


@pytest.mark.parametrize(("in_steps", "where"), [(True, "inside"), (False, "inside"), (True, "process")])
@pytest.mark.in_ci
async def test_s13_the_others_meet_at_the_next_host_at_once_if_the_node_that_hosts_leaves(
    in_steps: bool, where: str
) -> None:
    """They met in its store, and were dropped 30 s later, when it ended."""
    leaving = "asyncio.get_running_loop().add_signal_handler(15, asyncio.current_task().cancel)\n    step = 0"
    program = AWAITED.replace("step = 0", leaving, 1)
    if not in_steps:
        program = program.replace("await round.check(step)", "pass")
    async with job(program, "abc", f"&host={where}") as it:
        number = await it.round_of(3)
        (served,) = await it.stores()
        leaves = it.nodes.pop(await it.host())
        leaves.terminate()
        await it.round_of(2, above=number)
        assert served not in await it.stores()
        assert await leaves.wait(timeout=SOON) == 1


@pytest.mark.in_ci
async def test_s13_nobody_waits_for_a_killed_host_whose_store_had_its_own_process() -> None:
    """The store's process told nobody that its parent was dead: the others waited for that node for `ttl`."""
    async with job(AWAITED, "abc", "&host=process&ttl=60") as it:
        number = await it.round_of(3)
        it.nodes.pop(await it.host()).kill()
        began = time.monotonic()
        await it.round_of(2, above=number)
        assert time.monotonic() - began < SOON


async def test_s13_the_store_of_a_process_stays_if_another_of_its_nodes_leaves() -> None:
    """The node said that the store ends, and the others waited 30 s for the next one."""
    url = f"tcp://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/job?min_nodes=2&max_nodes=3&last_call_timeout=60"
    async with rdzv.connect(url) as first, rdzv.connect(url) as second, asyncio.timeout(SOON):
        async with rdzv.connect(url) as third:
            await asyncio.gather(*(node.next_rendezvous() for node in (first, second, third)))
            assert first.hosts_store
        async with first.changes() as changes:
            assert isinstance(await anext(changes), rdzv.NodesLeft)
        infos = await asyncio.gather(first.next_rendezvous(), second.next_rendezvous())
        assert [info.world_size for info in infos] == [2, 2]


async def test_s13_a_node_whose_close_has_begun_serves_no_next_store(caplog: pytest.LogCaptureFixture) -> None:
    """Its store would end with it at once, and the nodes that met there would have to move again."""
    caplog.set_level(logging.INFO, "rdzv")
    hosts = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    url = f"tcp://{hosts}/job?min_nodes=2&max_nodes=2"
    async with start_python("-u", "-c", LOGS + AWAITED, url, "host") as host:
        await host.says("hosts the store")
        async with rdzv.connect(url, node_id="closes") as node:
            await node.next_rendezvous()
            caplog.clear()
            host.kill()
            await host.wait()
            await node.aclose()
    assert "hosts the store" not in caplog.text


@pytest.mark.parametrize("prefix", ["", "&prefix=/another"])
async def test_s13_a_run_that_begins_while_its_store_ends_begins_at_the_next_host(prefix: str) -> None:
    """A run without a node when the end of the store was announced began there, beside the store of the next host."""
    hosts = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(rdzv.connect(f"tcp://{hosts}/first?min_nodes=1"))
        await first.next_rendezvous()
        url = f"tcp://{hosts}/second?min_nodes=2&max_nodes=2{prefix}"
        late = [await stack.enter_async_context(rdzv.connect(url)) for _ in range(2)]
        leaving = asyncio.create_task(first.aclose())
        await asyncio.sleep(2.0)  # the end is announced
        async with asyncio.timeout(SOON):
            infos = await asyncio.gather(*(node.next_rendezvous() for node in late))
            await leaving
        assert [info.world_size for info in infos] == [2, 2]
        assert any(node.hosts_store for node in late)
        await asyncio.gather(*(node.aclose() for node in late))


async def test_s13_the_second_host_dies_as_soon_as_it_serves_while_the_first_is_away() -> None:
    async with job(AWAITED, "abcd", "&ttl=3") as it:
        number = await it.round_of(4)
        it.nodes.pop(await it.host()).kill()
        serving = {asyncio.create_task(node.says("hosts the store")): name for name, node in it.nodes.items()}
        done, waiting = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
        it.nodes.pop(serving[done.pop()]).kill()
        for task in waiting:
            task.cancel()
        await it.round_of(2, above=number)
        assert len(await it.stores()) == 1


@pytest.mark.in_ci
async def test_s13_a_candidate_that_dies_leaves_a_silent_host_its_store() -> None:
    async with job(AWAITED, "abcd", "&ttl=3") as it:
        number = await it.round_of(4)
        host = await it.host()
        (served,) = await it.stores()
        it.nodes[host].stop()
        waiting = {name: node for name, node in it.nodes.items() if name != host}
        for node in waiting.values():
            await node.says("it may be at work", timeout=30)
        candidates = [name for name, node in waiting.items() if "waits for it to refuse" not in node.written()]
        it.nodes.pop((candidates or [*waiting])[0]).kill()
        await it.start("new")
        await it.nodes["new"].says("it may be at work", timeout=30)
        assert await it.stores() == set()
        it.nodes[host].resume()
        await it.round_of(4, above=number)
        assert await it.stores() == {served}


async def test_s13_a_fork_of_the_dead_host_does_not_hold_the_store_up() -> None:
    """A worker of a DataLoader has the files of its parent. With the listening socket, the death would be silence."""
    fork = "\n            if step == 0 and os.fork() == 0: [os.close(it) for it in (1, 2)]; time.sleep(40); os._exit(0)"
    program = AWAITED.replace("import asyncio, sys", "import asyncio, os, sys, time")
    printed = '"from step", step)'
    assert printed in program
    async with job(program.replace(printed, printed + fork), "abc") as it:
        number = await it.round_of(3)
        await asyncio.sleep(0.5)
        it.nodes.pop(await it.host()).kill()
        began = time.monotonic()
        await it.round_of(2, above=number)
        assert time.monotonic() - began < SOON


async def test_s13_a_host_that_does_not_answer_is_named_in_the_status_and_the_error_and_the_remedy_with_it() -> None:
    async with contextlib.AsyncExitStack() as stack:
        it = Job(stack, AWAITED, "max_nodes=2&join_timeout=8")
        with socket.create_server(("127.0.0.1", 0)) as silent:
            name = f"127.0.0.1:{silent.getsockname()[1]}"
            it._url = it._url.replace(it.hosts[0], name)
            await it.start("a")
            said = f"{name} does not answer.*it may be at work. If it is off: rdzv lost URL {name}"
            status = start_python("-m", "rdzv", "status", it.store.replace(it.hosts[0], name), "--timeout", "4")
            asked = await stack.enter_async_context(status)
            assert await asked.wait(timeout=30) != 0
            assert re.search(said, asked.written()), asked.output
            assert await it.nodes["a"].wait(timeout=60) == 1
            error = it.nodes["a"].output[-1]
            assert "RendezvousConnectionError" in error and re.search(said, error), error


async def test_s13_nodes_on_no_listed_machine_end_after_the_store_gone_timeout() -> None:
    async with contextlib.AsyncExitStack() as stack:
        it = Job(stack, AWAITED, "max_nodes=2&is_host=0&store_gone_timeout=3")
        serve = start_python("-m", "rdzv", "serve", "--hosts", ",".join(it.hosts))
        server = await stack.enter_async_context(serve)
        await server.says("serves the store")
        await it.start("a", "b")
        await it.round_of(2)
        server.kill()
        for node in it.nodes.values():
            assert await node.wait(timeout=30) == 1
            assert "RendezvousConnectionError" in node.output[-1] and "nobody listens there for 3 s" in node.output[-1]
        assert await it.stores() == set()


async def test_s13_nothing_is_left_listening_when_all_have_left() -> None:
    async with job(AWAITED, "ab") as it:
        await it.round_of(2)
        for node in it.nodes.values():
            node.terminate()
        await asyncio.gather(*(node.wait() for node in it.nodes.values()))
        assert await it.stores() == set()


@pytest.mark.in_ci
async def test_s13_stores_outside_the_job_take_turns_and_one_that_is_told_to_leave_costs_no_step() -> None:
    async with contextlib.AsyncExitStack() as stack:
        it = Job(stack, AWAITED, "max_nodes=2&is_host=0")
        hosts = ",".join(it.hosts)
        first, second = [
            await stack.enter_async_context(start_python("-m", "rdzv", "serve", "--hosts", hosts)) for _ in range(2)
        ]
        for server in (first, second):
            await server.says("rdzv serve: ")
        serving, waiting = sorted((first, second), key=lambda one: "waits" in one.output[0])
        await it.start("a", "b")
        number = await it.round_of(2)
        doctor = await stack.enter_async_context(start_python("-m", "rdzv", "doctor", it.store))
        assert await doctor.wait() == 0, doctor.output
        assert sum("refuses" in line for line in doctor.output) == 2
        serving.terminate()
        await waiting.says("serves the store")
        number = await it.round_of(2, above=number)
        steps = {node.stdout[-1].split()[-1] for node in it.nodes.values()}
        assert len(steps) == 1, "they have left at one step"
        assert await serving.wait(timeout=10) == 0
        status = await stack.enter_async_context(start_python("-m", "rdzv", "status", it.store))
        assert await status.wait() == 0
        (of_each,) = [line for line in status.output if line.startswith("hosts: ")]
        assert (of_each.count(" serves"), of_each.count(" refuses")) == (1, 2)
        assert of_each.endswith("; store 2 of this run")
        waiting.kill()
        for node in it.nodes.values():
            assert await node.says("no process listens", timeout=30)


@pytest.mark.parametrize("launcher", ["run", "torchrun"])
async def test_s13_launchers_move_to_the_next_host_before_the_store_ends(launcher: str) -> None:
    """They did not hear of it: their members were dropped 5 s later, when the store ended."""
    if launcher == "torchrun":
        require("torch")
    hosts = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    # Workers of torchrun lead sessions of their own, and its log has their command.
    work = ("-u", "-c", "import os, time\nprint('at', 'work')\nwhile os.getppid() > 1: time.sleep(0.1)")
    run: tuple[str, ...] = ("-m", "rdzv", "-v", "run", "--max-restarts", "0")
    run += (f"tcp://{hosts}/job?min_nodes=2&max_nodes=2&is_host=0", "--", sys.executable, *work)
    torchrun: tuple[str, ...] = (
        "-m",
        "rdzv.torchrun",
        "--rdzv-backend=rdzv",
        f"--rdzv-endpoint={hosts}",
        "--rdzv-id=job",
        "--nnodes=2",
    )
    torchrun += (
        "--nproc-per-node=1",
        "--max-restarts=0",
        "--rdzv-conf=is_host=0",
        "--no-python",
        sys.executable,
        *work,
    )
    async with contextlib.AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(start_python("-m", "rdzv", "serve", "--hosts", hosts)) for _ in range(2)
        ]
        for server in (first, second):
            await server.says("rdzv serve: ")
        serving, waiting = sorted((first, second), key=lambda one: "waits" in one.output[0])
        nodes = [
            await stack.enter_async_context(
                start_python(*(run if launcher == "run" else torchrun), env={"LOGLEVEL": "INFO"})
            )
            for _ in range(2)
        ]
        for node in nodes:
            await node.line("at work")
        serving.terminate()
        for node in nodes:
            await node.line("at work")
            assert not any("dropped" in line for line in node.output), node.output
        # Who hears of it second may see only that the other has left its round.
        assert any("the host of the store leaves" in line for node in nodes for line in node.output)
        await waiting.says("serves the store")
        assert await serving.wait() == 0


WORK = """
import os, sys, time
print("at", "work", flush=True)
while os.getppid() > 1:
    time.sleep(0.05)
    try:
        os.unlink(sys.argv[1])
    except OSError:
        continue
    sys.exit(3)
"""


async def test_s13_restarts_that_were_counted_before_the_hosts_death_count_after_it(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        it = Job(stack, "", "max_nodes=3")
        fail = tmp_path / "fail"
        words = ("-m", "rdzv", "-v", "run", "--max-restarts", "1")
        for name in "abc":
            child = start_python(*words, f"{it._url}&node_id={name}", "--", sys.executable, "-c", WORK, str(fail))
            it.nodes[name] = await stack.enter_async_context(child)
        for node in it.nodes.values():
            await node.line("at work")
        fail.write_text("")
        for node in it.nodes.values():
            await node.line("at work")
        assert sum("restart 1 of 1" in node.written() for node in it.nodes.values()) == 1
        it.nodes.pop(await it.host()).kill()
        for node in it.nodes.values():
            await node.line("at work")
        fail.write_text("")
        said = {asyncio.create_task(node.says("allows no restart")) for node in it.nodes.values()}
        _, waiting = await asyncio.wait(said, return_when=asyncio.FIRST_COMPLETED)  # the other node waits for a second
        for task in waiting:
            task.cancel()
        assert sum("--max-restarts 1 allows no restart" in node.written() for node in it.nodes.values()) == 1


GROUPS = """
import logging, sys
import torch, torch.distributed as dist
import rdzv.torch

logging.basicConfig(level=logging.INFO)
rdzv.torch.register_init_method()
while True:
    dist.init_process_group("gloo", init_method=sys.argv[1])
    try:
        for step in range(10**9):
            total = torch.ones(1)
            dist.all_reduce(total)
            if not step:
                print("group", "of", int(total), flush=True)
    except RuntimeError:
        dist.destroy_process_group()
"""


async def test_s13_process_groups_of_an_init_method_form_again_at_the_next_host() -> None:
    require("torch")
    hosts = f"127.0.0.1,127.0.0.2,127.0.0.3:{free_port()}"  # the last port holds for all
    url = f"rdzv://{hosts}/job?min_nodes=2&max_nodes=3&last_call_timeout=60"
    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(start_python("-c", GROUPS, url)) for _ in range(3)]
        for node in nodes:
            await node.line("group of 3", timeout=60)
        (host,) = [node for node in nodes if "hosts the store" in node.written()]
        nodes.remove(host)
        host.kill()
        for node in nodes:
            await node.line("group of 2", timeout=60)
