"""`rdzv doctor`: each problem is found, named and given a remedy; a healthy store passes."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

import rdzv
import store
from rdzv.cli import doctor
from store.net.address import Address
from store.net.dialing import TcpDialer
from tests.rdzv.cli.test_main import run
from tests.support.processes import free_port

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.some_here(2)


async def examined(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit status, and the checks by name."""
    status, output = await run("doctor", *arguments, "--json")
    told = json.loads(output[0])
    assert told["version"] == doctor.VERSION
    assert told["good"] is (status == 0) is all(check["good"] for check in told["checks"])
    return status, {check["name"]: check for check in told["checks"]}


@pytest.mark.in_ci
async def test_a_healthy_run_passes_and_one_with_an_expected_node_missing_fails(tmp_path: Path) -> None:
    expected = tmp_path / "nodes"
    async with store.serve() as server:
        url = f"{server.url}/job"
        status, checks = await examined(server.url)
        assert status == 0, checks
        assert list(checks) == ["name", "port", "store", "time", "clock"]
        async with rdzv.connect(f"{url}?min_nodes=1", node_id="a", is_host=False) as node:
            await node.next_rendezvous()
            expected.write_text("a\n")
            status, checks = await examined(f"{url}?expected_file={expected}")
            assert status == 0, checks
            assert checks["expected"]["found"] == "all 1 are here"
            assert "rank 0" in checks
            assert rdzv.__version__ in checks["versions"]["found"]
            expected.write_text("a\nb  # on the broken rack\n")
            status, checks = await examined(url, "--expected", str(expected))
            assert status == 1
            assert checks["expected"]["found"] == "missing: b (never seen)"
            status, output = await run("doctor", url)
            assert status == 0
            assert all(line.startswith(f"{socket.gethostname()}: good") for line in output)


@pytest.mark.parametrize("scheme", ["tcp", "etcd"])
async def test_for_a_port_without_a_listener_the_remedy_is_the_command_to_start_there(scheme: str) -> None:
    status, checks = await examined(f"{scheme}://127.0.0.1:{free_port()}/job", "--timeout", "5")
    assert (status, list(checks)) == (1, ["name", "port"])
    assert "nobody listens there" in checks["port"]["found"]
    assert ("rdzv serve" in checks["port"]["remedy"]) is (scheme == "tcp")


@pytest.mark.parametrize("greeting", [b"220 mail.example ESMTP, and some more that no store would say\r\n", b""])
async def test_a_server_that_is_no_store_or_stays_silent_is_reported_within_the_timeout(greeting: bytes) -> None:
    """Regression: if a path drops large packets, each step waited for 10 s of its own, 30 s in all."""
    over = asyncio.Event()

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        if not greeting:
            await over.wait()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        status, checks = await examined(f"tcp://127.0.0.1:{port}/job", "--timeout", "5")
        over.set()
    assert (status, list(checks)) == (1, ["name", "port", "store"])
    assert not checks["store"]["good"]


async def test_of_several_hosts_doctor_warns_of_names_that_make_refusals_lie() -> None:
    """A candidate serves once all others refuse: two names of one store, or another machine's refusal, deceive it."""
    async with store.serve() as server:
        own, free = f"127.0.0.1:{server.port}", f"127.0.0.1:{free_port()}"
        status, checks = await examined(f"tcp://{own},{free}/job")
        assert status == 0, checks
        assert "unless a proxy, a load balancer or a firewall has answered" in checks["host"]["found"]
        status, checks = await examined(f"tcp://{own},localhost:{server.port}/job")
        assert status == 1
        assert "at once: these names share a store" in checks["hosts"]["found"]
        assert "of no proxy, Service or load balancer" in checks["hosts"]["remedy"]
        async with store.serve() as lost:  # it was said to be lost, and was only cut off
            dialer = TcpDialer(Address(host="127.0.0.1", port=lost.port), None)
            async with store.Client(dialer, name="", generation=2):
                status, checks = await examined(f"tcp://{own},127.0.0.1:{lost.port}/job")
        assert status == 1
        assert f"{own} serves (generation 1) and" in checks["hosts"]["found"]
        assert f":{lost.port} serves (generation 2) at once: each has a store of its own" in checks["hosts"]["found"]
        assert "said to be lost" in checks["hosts"]["remedy"]
        with socket.create_server(("127.0.0.1", 0)) as silent:
            status, checks = await examined(f"tcp://{own},127.0.0.1:{silent.getsockname()[1]}/job")
    assert status == 1
    assert "does not answer" in checks["host"]["found"]
    assert "which must not reject packets; if the machine is off: rdzv lost URL" in checks["host"]["remedy"]


async def test_a_wrong_token_is_named(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("not the store's, though long enough")
    token.chmod(0o600)
    async with store.serve(token="the one that the store has") as server:
        status, checks = await examined(f"{server.url}/job?token_file={token}")
    assert status == 1
    assert "token" in checks["store"]["remedy"]


async def test_a_name_that_resolves_to_loopback_or_not_at_all_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Debian, a machine's own name is 127.0.1.1 in /etc/hosts."""

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        if host == "head":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    checks: list[doctor.Check] = []
    assert await doctor._check_dns("head", 29400, checks, timeout=5.0) == ["127.0.1.1"]
    assert await doctor._check_dns("nowhere", 29400, checks, timeout=5.0) == []
    trap, unknown = checks
    assert not trap.passed
    assert "/etc/hosts" in trap.remedy
    assert not unknown.passed
    assert "Name or service not known" in unknown.found


async def test_a_name_that_stands_for_several_machines_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of those machines would start a store of its own."""
    own, foreign = (int(socket.AF_INET), ("127.0.0.1", 29400)), (int(socket.AF_INET), ("192.0.2.7", 29400))
    resolve = "rdzv.backends.bind_address._resolve_host"
    monkeypatch.setattr(resolve, lambda host, _: [own, foreign][: 1 + (host == "pods")])
    checks: list[doctor.Check] = []
    for host in ("head", "pods"):
        await doctor._check_single_machine(host, 29400, checks)
    (check,) = checks
    assert "192.0.2.7" in check.found
    assert "is_host=1 on one node and is_host=0 on the others" in check.remedy


async def test_an_error_in_the_last_check_does_not_hide_the_earlier_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def hangs(*_: object, **__: object) -> float:
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(doctor, "_check_answer_time", hangs)
    monkeypatch.setattr(doctor, "STEPS", 1)
    async with store.serve() as server:
        options = argparse.Namespace(url=f"{server.url}/job", timeout=3.0, expected=None, json=True)
        assert await doctor._run_doctor.run(options) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [(check["name"], check["good"]) for check in checks] == [
        ("name", True),
        ("port", True),
        ("store", True),
        ("timeout", False),
    ]


@pytest.mark.parametrize(("timeout", "words", "count"), [(3.0, "does not answer", 3), (0.0, "no port was reached", 1)])
async def test_each_host_whose_packets_are_lost_is_named(
    timeout: float, words: str, count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anyio.connect_tcp", lambda *_: asyncio.sleep(3600))
    url = "etcd://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3/job"
    assert await doctor._run_doctor.run(argparse.Namespace(url=url, timeout=timeout, expected=None, json=False)) == 1
    assert capsys.readouterr().out.count(words) == count


def test_gloo_is_checked_against_the_addresses_of_the_hosts_own_name() -> None:
    good = doctor.check_gloo_listens_at("gpu-1", ["10.0.0.1", "fd00::1"], "10.0.0.1", chosen=None)
    assert good.passed
    assert doctor.check_gloo_listens_at("gpu-1", ["127.0.1.1"], "10.0.0.1", chosen="eth0").passed
    for own, why in (
        (["127.0.1.1"], "stands for 127.0.1.1"),
        (["192.168.0.1", "10.0.0.1"], "192.168"),
        ([], "no address"),
    ):
        bad = doctor.check_gloo_listens_at("gpu-1", own, "10.0.0.1", chosen=None)
        assert not bad.passed
        assert why in bad.found
        assert "GLOO_SOCKET_IFNAME to the interface of 10.0.0.1" in bad.remedy


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("3.4.21", False),
        ("3.4.22", True),
        ("3.4.44", True),
        ("3.5.0", False),
        ("3.5.1", False),
        ("3.5.5", False),
        ("3.5.6", True),
        ("3.6.0", True),
        ("3.6.0-rc.1", True),
        ("main", True),
    ],
)
def test_a_release_of_etcd_that_loses_data_is_named(version: str, good: bool) -> None:
    check = doctor.check_etcd_release(version)
    assert check.passed is good
    assert version in check.found
