"""`rdzv runs`, `forget`, `stats`, `ping`: commands for the operator of a store with many runs."""

import asyncio
import json
import re
from pathlib import Path

import pytest

import rdzv
import store
from rdzv.node.run.status import count_keys_by_run
from tests.rdzv.cli.test_main import run

pytestmark = pytest.mark.some_here(2)


async def test_runs_shows_keys_bytes_and_age_of_each_run_the_largest_first() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        assert await run("runs", server.url) == (0, ["there are no runs under /rdzv"])
        await client.put("/rdzv/large/x", bytes(100_000))
        await client.put("/other/not-a-run/x", bytes(200_000))
        async with rdzv.connect(f"{server.url}/small?min_nodes=1", node_id="a", is_host=False) as handler:
            await handler.next_rendezvous()
        status, output = await run("runs", server.url)
        assert status == 0
        assert [line.split()[0] for line in output] == ["run", "large", "small"]
        assert output[1].split()[1] == "1"
        status, output = await run("runs", server.url, "--json")
        shown = [json.loads(line) for line in output]
        assert [each["run_id"] for each in shown] == ["large", "small"]
        assert shown[0]["bytes"] > 100_000
        assert shown[0]["age"] < 60


async def test_control_characters_in_names_do_not_reach_the_terminal() -> None:
    """Whoever may write keys can name a run. Regression: such a name cleared the screen of "rdzv runs" and "stats"."""
    async with store.serve() as server, store.connect(server.url) as client:
        await client.put("/rdzv/\x1b[2Jjob/nodes/\x1b[2Jnode", b"", ttl=60)
        await client.put("/rdzv/job/nodes/\x1b[2Jnode", b"", ttl=60)
        for command, url in (("runs", server.url), ("stats", server.url), ("forget", f"{server.url}/job")):
            _, output = await run(command, url)
            assert "\x1b" not in "".join(output)
            assert any("\\x1b[2J" in line for line in output), output


async def test_runs_under_a_prefix_with_several_parts_are_distinguished() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        for key in ("/team/rdzv/a/1", "/team/rdzv/a/2", "/team/rdzv/b/1"):
            await client.put(key, b"")
        status, output = await run("runs", f"{server.url}?prefix=/team/rdzv", "--json")
        assert status == 0
        shown = [json.loads(line) for line in output]
        assert [(each["run_id"], each["keys"], each["bytes"]) for each in shown] == [("a", 2, None), ("b", 1, None)]


def test_receipts_on_etcd_are_not_listed_as_a_run() -> None:
    """On etcd, receipts of writes lie beside the runs. Regression: the table had a nameless row, as had `status`."""
    keys = ("/rdzv//receipts/1", "/rdzv/job/head/round", "/rdzv/job/settings", "/rdzv/stray")
    assert count_keys_by_run(keys, "/rdzv/") == {"job": 2}


async def test_forget_leaves_nothing_of_a_run_neither_keys_nor_leases() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        url = f"{server.url}/job"
        async with rdzv.connect(f"{url}?min_nodes=1", node_id="a", is_host=False) as handler:
            await handler.next_rendezvous()
            await handler.set_closed("done")
        await client.put("/rdzv/job/loose", b"on no lease")
        await client.put("/rdzv/job-2/x", b"another run")
        status, output = await run("forget", url)
        assert status == 0, output
        assert "run job is forgotten" in output[0]
        assert [entry.key for entry in await client.list("")] == ["/rdzv/job-2/x"]
        assert (await client.stats())["leases"] == 0
        assert (await run("forget", url))[0] == 1


async def test_forget_lists_the_remaining_nodes_and_with_force_closes_the_run() -> None:
    async with store.serve() as server, store.connect(server.url) as client:
        url = f"{server.url}/job"
        async with rdzv.connect(f"{url}?min_nodes=1", node_id="still-here", is_host=False) as handler:
            await handler.next_rendezvous()
            # unreadable keys do not keep a run from being forgotten
            for key in ("head/banned/z", "history", "nodes/stranger"):
                await client.put(f"/rdzv/job/{key}", b"\xc1")
            status, output = await run("forget", url)
            assert status == 1
            assert "run job has 2 nodes: still-here, stranger; close it first, or forget it with --force" in output[0]
            assert await client.count("/rdzv/job/") > 0
            told = asyncio.create_task(_until_closed(handler))
            status, output = await run("forget", url, "--force")
            assert status == 0, output
            assert "forgotten by its operator" in await told
        assert await client.count("/rdzv/job/") == 0
        assert (await client.stats())["leases"] == 0


async def _until_closed(handler: rdzv.Handler) -> str:
    """Leave as soon as the run is closed, as a job does. Return the reason."""
    async with handler.changes() as changes:
        async for change in changes:
            if isinstance(change, rdzv.Closed):
                await handler.leave()
                return change.reason
    raise AssertionError("the changes have ended")


async def test_stats_shows_the_usage_of_each_limit_and_the_run_with_the_most_keys() -> None:
    async with store.serve(limits=store.Limits(keys_max=10)) as server, store.connect(server.url) as client:
        for number in range(4):
            await client.put(f"/rdzv/job/{number}", b"")
        status, output = await run("stats", server.url)
        assert status == 0
        assert any(line.split() == ["keys", "4", "of", "10", "(40", "%)"] for line in output), output
        assert output[-1].startswith("run job holds most: 4 keys")
        status, output = await run("stats", server.url, "--json")
        assert json.loads(output[0])["keys_max"] == 10


async def test_ping_takes_parameters_without_a_run_and_measures_below_a_millisecond(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2, hunter2, hunter2")
    async with store.serve(token="hunter2, hunter2, hunter2") as server:
        status, output = await run("ping", f"{server.url}?token_file={secret}", "--count", "4")
        assert status == 0, output
        told = [re.fullmatch(rf"{server.url} answers in (\d+\.\d+) ms", line) for line in output]
    taken = [float(each[1]) for each in told if each is not None]
    assert len(taken) == 4
    assert all(milliseconds > 0 for milliseconds in taken)
    assert any(milliseconds % 1 for milliseconds in taken), "more than whole milliseconds, which is all uvloop counts"
