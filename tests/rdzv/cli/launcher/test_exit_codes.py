"""`rdzv run --exit-codes`: the exit status tells what started a node whether to replace it, restart it or stop."""

import os
import signal

import pytest

import rdzv
from rdzv.cli.main import main
from tests.support.launched import SUCCEED, node, started, tell
from tests.support.processes import free_port

pytestmark = pytest.mark.some_here(2)

RESTART, REPLACE, OVER = 80, 81, 82
CODES = ("--exit-codes", f"restart={RESTART},replace={REPLACE},over={OVER}")
ALONE = "job?min_nodes=1&max_nodes=2&last_call_timeout=0.1"


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 93", OVER), ("exit 7", REPLACE), ("kill -9 $$", REPLACE)],
    ids=["it has succeeded", "it gives the run up", "it has failed once too often", "it was killed"],
)
async def test_the_exit_status_follows_from_how_the_command_ended(server: str, script: str, status: int) -> None:
    async with node(f"{server}/{ALONE}", "a", *CODES, command=("sh", "-c", script)) as a:
        assert await a.wait(timeout=20) == status, a.written()


async def test_a_node_that_leaves_is_to_be_replaced(server: str) -> None:
    """Regression: it exited with 0. Kubernetes then counts its index as completed and starts no other node."""
    async with node(f"{server}/{ALONE}", "a", *CODES, "--drain-on", "TERM") as a:
        await started(a)
        os.kill(a.pid, signal.SIGTERM)
        assert await a.wait(timeout=20) == REPLACE, a.written()


async def test_a_banned_node_is_to_be_replaced_and_a_closed_run_is_over_for_all(server: str) -> None:
    async with node(f"{server}/{ALONE}", "a", *CODES) as a, rdzv.connect(f"{server}/job") as observer:
        process = await started(a)
        await observer.ban("b", "its memory fails")
        async with node(f"{server}/{ALONE}", "b", *CODES) as b:
            assert await b.wait(timeout=20) == REPLACE, b.written()
        await observer.set_closed("enough")
        assert await a.wait(timeout=20) == OVER, a.written()
        async with node(f"{server}/{ALONE}", "late", *CODES) as late:
            assert await late.wait(timeout=20) == OVER, late.written()
        assert process["RANK"] == "0"


async def test_if_no_round_completes_the_node_is_to_be_restarted(server: str) -> None:
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    for url in (f"{server}/job?min_nodes=2", f"{nowhere}/job?is_host=0&min_nodes=1"):
        async with node(f"{url}&join_timeout=1", "a", *CODES) as a:
            assert await a.wait(timeout=20) == RESTART, a.written()


async def test_ends_without_a_chosen_status_keep_their_usual_one(server: str) -> None:
    async with node(f"{server}/{ALONE}", "a", "--exit-codes", "over=82", command=("sh", "-c", "exit 7")) as a:
        assert await a.wait(timeout=20) == 7, a.written()
    async with node(f"{server}/{ALONE}", "a", *CODES) as a:
        tell(await started(a), SUCCEED)
        assert await a.wait(timeout=20) == 0, a.written()


@pytest.mark.parametrize(
    "codes", ["", "80", "restart=0", "restart=x", "restart=8_0", "later=80", "over=128", "over=82,,"]
)
def test_invalid_exit_codes_are_refused(codes: str) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["run", "--exit-codes", codes, "tcp://127.0.0.1/job?min_nodes=1", "--", "true"])
    assert exit.value.code == 121


@pytest.mark.parametrize("status", ["0", "256", "-9", "x"])
def test_a_give_up_status_that_is_zero_or_impossible_is_refused(
    status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a run that was given up with `--give-up-status 256` exited with 0."""
    with pytest.raises(SystemExit) as exit:
        main(["run", "--give-up-status", status, "tcp://127.0.0.1/job?min_nodes=1", "--", "true"])
    assert exit.value.code == 121
    assert "255" in capsys.readouterr().err


@pytest.mark.some_of(2)
@pytest.mark.parametrize(("given", "status"), [(7, 7), (256, 1), (-9, 137), (0, 122)])
async def test_no_node_of_a_run_that_was_given_up_exits_with_0(server: str, given: int, status: int) -> None:
    """Regression: a spare exited with 0, and every node did if the reason given was the text of a success."""
    url = f"{server}/job?min_nodes=1&max_nodes=1&last_call_timeout=0"
    async with node(url, "a") as a, node(url, "b") as b, rdzv.connect(f"{server}/job") as observer:
        async for seen in observer.statuses():
            if seen.spares and seen.members:
                break
        await observer.give_up("the command has succeeded on every node", status=given)
        assert [await one.wait(timeout=30) for one in (a, b)] == [status, status], a.written() + b.written()
