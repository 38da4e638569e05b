"""The undocumented names of PyTorch that we use exist in the installed release if our list says so."""

from __future__ import annotations

import ast
import functools
import importlib
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.rdzv.torch.private_names import PRIVATE, Private
from tests.support.processes import require, start_python

require("torch")  # the imports below need it

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure  # noqa: E402

import rdzv.torch.pytorch as it  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize("private", PRIVATE, ids=lambda private: private.name)
def test_every_private_name_exists_since_the_listed_release(private: Private) -> None:
    present = True
    try:
        where = private.within or private.name
        found = functools.reduce(getattr, where.split("."), importlib.import_module(private.module))
        if private.within:
            present = private.name in found.__code__.co_names + found.__code__.co_varnames
    except AttributeError:
        present = False
    assert present is (private.since <= it.RELEASE), f"{private.module}.{private.name}: {private.used_for}"


TAKEN_AWAY = """
import functools, importlib, sys
from tests.rdzv.torch.private_names import PRIVATE
for private in PRIVATE:
    if private.within:
        continue  # it is in nobody's hands to take that away: see the test below
    *path, last = private.name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(private.module))
    kept = getattr(owner, last, None)
    try:
        delattr(owner, last)
    except (AttributeError, TypeError):  # this release does not have it, or it is C's
        continue
    for room in [room for room in sys.modules if room.startswith("rdzv.torch")]:
        del sys.modules[room]
    import rdzv.torch
    from rdzv.torch import pytorch
    assert pytorch.signal_name_of_error(ValueError()) is None
    assert pytorch.find_agent_end().why == "an agent has ended"
    assert pytorch.underlying_store(pytorch.dist.HashStore()) is not None
    assert pytorch.find_agent() is None
    assert not pytorch.runs_under_torchrun()
    pytorch.reset_group_count()
    setattr(owner, last, kept)
    print("without", private.name)
"""


async def test_without_each_private_name_the_rest_still_works() -> None:
    async with start_python("-c", TAKEN_AWAY) as program:
        assert await program.wait(timeout=60) == 0, program.written()
        assert len(program.stdout) >= 7  # as many as PyTorch 2.4 has


def test_no_other_module_uses_private_names_of_pytorch() -> None:
    taken = {
        f"{path.name}: {name}"
        for path in Path(it.__file__).parent.rglob("*.py")
        if path.name != "pytorch.py"
        for name in names_of_torch(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert taken == set()


def names_of_torch(tree: ast.AST) -> Iterator[str]:
    """Yield the modules imported from torch, and the names of `dist` and `torch_api` that begin with an underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch" and "." in alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            yield str(node.module)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("dist._", "dist.dist", "torch_api._")):
            yield ast.unparse(node)


def test_the_launcher_is_known_by_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import run as launcher

    seen: list[bool] = []

    def launch(*_: Any, **__: Any) -> Any:
        return lambda *_: seen.append(it.runs_under_torchrun())

    monkeypatch.setattr(launcher, "elastic_launch", launch)
    launcher.main(["--rdzv-backend=rdzv", "train.py"])
    launch()()
    assert seen == [True, False]


def test_the_calling_agent_is_found_with_the_failures_of_its_workers() -> None:
    from torch.distributed.elastic.agent.server import api

    killed, failed = (
        ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="") for rank, code in ((0, -9), (1, 1))
    )
    killed.timestamp, failed.timestamp = 1, 2
    code = "def _invoke_run(run_result, call):\n    return call()"
    agent: dict[str, Any] = {"__name__": api.__name__}
    exec(code, agent)
    run = functools.partial(agent["_invoke_run"], call=it.find_agent)
    assert run(SimpleNamespace(failures={})) == it.Agent("")
    assert run(None) == it.Agent("")
    both = SimpleNamespace(failures={5: failed, 4: killed})
    assert run(both) == it.Agent("worker 0 was killed by signal 9")
    assert it.describe_failure(failed) == "worker 1 ended with status 1"
    assert it.find_agent() is None


@pytest.mark.parametrize(
    ("run_result", "of_agent"),
    [
        (SimpleNamespace(), SimpleNamespace()),
        (SimpleNamespace(failures={0: object()}), SimpleNamespace(_worker_group=1)),
    ],
)
def test_an_agent_with_other_variable_names_counts_as_unknown(run_result: object, of_agent: object) -> None:
    agent: dict[str, Any] = {"__name__": "torch.distributed.elastic.agent.server.api"}
    exec("def _invoke_run(self, run_result, call):\n    return call()", agent)
    found = agent["_invoke_run"](of_agent, run_result, it.find_agent)
    assert found.problem == ""
    assert found.next_pids_reader()() == {}
    unnamed = it.SignalException("got a signal", signal.SIGINT)
    del unnamed.sigval
    assert it.signal_name_of_error(unnamed) == "SIGTERM"


def test_the_reason_of_an_agents_end_is_known_during_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = ChildFailedError("train.py", {3: ProcessFailure(local_rank=3, pid=1, exitcode=-9, error_file="")})

    def end_by(error: BaseException) -> it.AgentEnd:
        try:
            raise error  # noqa: TRY301
        except BaseException:  # noqa: BLE001  as PyTorch does on its way out
            return it.find_agent_end()

    assert it.find_agent_end() == it.AgentEnd(None, "an agent has ended", has_failed=False, has_no_result=False)
    assert end_by(failure).why == "an agent has failed: worker 3 was killed by signal 9"
    assert end_by(it.SignalException("told", signal.SIGHUP)).signal == "SIGHUP"
    assert end_by(KeyboardInterrupt()).signal == "SIGINT"
    assert [end_by(error).has_failed for error in (failure, SystemExit(1), SystemExit(0))] == [True, True, False]
    assert end_by(AttributeError("'NoneType' object has no attribute 'is_failed'")).has_no_result
    monkeypatch.delattr(ChildFailedError, "get_first_failure")
    assert end_by(failure).why.startswith("an agent has failed: ")


def test_an_agent_that_shuts_down_before_it_raises_the_failure_has_failed() -> None:
    """That of PyTorch 2.4. Regression: its run was closed as a success, and spares ended with 0."""
    agent: dict[str, Any] = {"__name__": "torch.distributed.elastic.agent.server.api"}
    exec("def _invoke_run(run_result, call):\n    return call()", agent)
    failed = ProcessFailure(local_rank=3, pid=1, exitcode=7, error_file="")
    end = agent["_invoke_run"](SimpleNamespace(failures={3: failed}), it.find_agent_end)
    assert end == it.AgentEnd(None, "an agent has failed: worker 3 ended with status 7", True, False)
    assert not agent["_invoke_run"](SimpleNamespace(failures={}), it.find_agent_end).has_failed


def test_an_agents_workers_are_known_once_all_are_started() -> None:
    from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

    group = WorkerGroup(SimpleNamespace(local_world_size=2))
    for ended in (None, 11, 12):
        for worker in group.workers:
            worker.id = ended  # workers of the previous round
        pids = it.Agent("", group).next_pids_reader()
        assert pids() == {}
        group.workers = [Worker(local_rank=rank) for rank in range(2)]
        assert pids() == {}
        group.workers[0].id = 21
        assert pids() == {}
        group.workers[1].id = 22
        assert pids() == {0: 21, 1: 22}
    assert it.Agent("").next_pids_reader()() == {}


def test_an_agent_is_done_once_its_workers_have_succeeded() -> None:
    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerState

    group = WorkerGroup(SimpleNamespace(local_world_size=1))
    done = []
    for group.state in WorkerState:
        done.extend([group.state] if it.Agent("", group).has_succeeded else [])
    assert done == [WorkerState.SUCCEEDED]
    assert not it.Agent("").has_succeeded


def test_a_group_is_released_once_its_threads_and_its_last_error_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: before 2.8, a group whose last reference went right after a barrier and one of its threads waited for
    each other, for ever.

    Later, the caller waited 10 ms for the group's threads, because its error held the last reference to the group.
    """

    class Group:
        def __del__(self) -> None:
            done.append("gone")

    done: list[object] = []
    world = SimpleNamespace(pg_map={Group(): None})
    monkeypatch.setattr(it, "world_of_groups", world)
    monkeypatch.setattr(it, "time", SimpleNamespace(sleep=done.append))
    monkeypatch.setattr(it.dist, "destroy_process_group", world.pg_map.clear)
    it.destroy_process_groups()
    for ending in [thread for thread in threading.enumerate() if thread.name == "rdzv group end"]:
        ending.join()
    assert done == [it.LETS_GO_AFTER, "gone"]


def test_a_group_that_ends_slowly_does_not_delay_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    class Group:
        def __del__(self) -> None:
            may_end.wait(60)

    world = SimpleNamespace(pg_map={Group(): None})
    monkeypatch.setattr(it, "world_of_groups", world)
    monkeypatch.setattr(it.dist, "destroy_process_group", world.pg_map.clear)
    it.destroy_process_groups()
    assert not may_end.is_set()
    may_end.set()
