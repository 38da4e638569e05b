"""`connect` and its inputs: files, certificates, environment variables."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

import pytest

import rdzv
import store
from rdzv.backends.builtin import create_etcd_handler, create_tcp_handler
from rdzv.backends.credentials import Credentials
from rdzv.backends.registry import RendezvousParameters
from rdzv.config.settings import parse
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError
from rdzv.node.handler import Handler
from tests.support.processes import require

if TYPE_CHECKING:
    from pathlib import Path


async def test_the_environment_is_read_and_keywords_beat_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_TTL", "3")
    monkeypatch.setenv("RDZV_NODE_ID", "from-environment")
    handler = create_tcp_handler(
        RendezvousParameters.from_url("tcp://127.0.0.1:1/job?node_id=from-url", {"node_id": "from-keyword"})
    )
    assert isinstance(handler, Handler)
    assert (handler.node_id, handler.settings.ttl) == ("from-keyword", 3.0)


async def test_a_client_needs_the_token_in_the_servers_file(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("s3cret-s3cret-s3cret\n")
    wrong.write_text("other")
    async with store.serve(token="s3cret-s3cret-s3cret") as server:
        url = f"{server.url}/job?min_nodes=1&is_host=false"
        async with rdzv.connect(url, token_file=str(right)) as handler:
            info = await handler.next_rendezvous()
            await info.store.set("key", "value")
        async with rdzv.connect(url, token=b"s3cret-s3cret-s3cret") as handler:
            assert (await handler.next_rendezvous()).round == 1
        with pytest.raises(RendezvousConnectionError, match="token"):
            async with rdzv.connect(url, token_file=str(wrong)):
                pass
        with pytest.raises(RendezvousConnectionError, match="token"):
            async with rdzv.connect(url):
                pass


@pytest.mark.parametrize(("mode", "warned"), [(0o600, 0), (0o640, 0), (0o644, 1)])
def test_a_token_file_that_every_user_can_read_is_warned_of_once(
    mode: int, warned: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text("a token of 16 bytes")
    path.chmod(mode)
    for _ in range(2):
        assert Credentials(parse("tcp://head/job", {"token_file": str(path)}, {})).token == b"a token of 16 bytes"
    assert [str(path) in message for message in caplog.messages] == [True] * warned


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read: No such file"), ("", "is empty; write the shared secret into it")]
)
def test_an_unusable_token_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RendezvousSettingsError, match=message):
        Credentials(parse("tcp://head/job", {"token_file": str(path)}, {}))


def test_the_error_for_a_password_that_etcd_rejects_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_bytes("straße".encode("latin-1"))
    with pytest.raises(RendezvousSettingsError, match=r"password_file=.*password' is not in UTF-8"):
        Credentials(parse("etcd://head/job", {"user": "me", "password_file": str(path)}, {}))


@pytest.mark.parametrize("given", [{"ca": "{}"}, {"cert": "{}", "key": "{}"}])
def test_unusable_certificates_are_named(tmp_path: Path, given: dict[str, str]) -> None:
    path = tmp_path / "pem"
    path.write_text("no certificate")
    settings = parse("tcps://head/job", {name: value.format(path) for name, value in given.items()}, {})
    with pytest.raises(RendezvousSettingsError, match="they must be readable PEM files"):
        Credentials(settings).client_tls()
    if "cert" in given:
        with pytest.raises(RendezvousSettingsError, match="they must be readable PEM files"):
            Credentials(settings).server_tls()


def test_a_context_given_by_keyword_is_used_as_it_is() -> None:
    context = ssl.create_default_context()
    settings = parse("tcps://head/job", {"tls": context}, {})
    assert Credentials(settings).client_tls() is context
    assert Credentials(settings).server_tls() is None
    assert Credentials(parse("tcp://head/job", {}, {})).client_tls() is None


@pytest.mark.parametrize(("ttl", "warned"), [("2", True), ("5.9", True), ("6", False), ("10", False)])
def test_a_ttl_shorter_than_an_election_of_etcd_is_warned_of(
    ttl: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    require("grpc")
    create_etcd_handler(RendezvousParameters.from_url(f"etcd://127.0.0.1:1/job?min_nodes=1&ttl={ttl}", {}))
    assert (f"ttl={ttl} s is short for etcd" in caplog.text) is warned


@pytest.mark.parametrize("way", ["connect", "rounds"])
def test_without_a_loop_of_asyncio_the_error_says_that_it_is_needed(way: str) -> None:
    """As on trio. Regression: `rounds` raised "no running event loop"."""
    url = "tcp://127.0.0.1:29555/job?min_nodes=1"
    first = rdzv.connect(url).__aenter__() if way == "connect" else rdzv.rounds(url).__anext__()
    with pytest.raises(rdzv.RendezvousStateError, match=r"runs on asyncio.*on trio, use rdzv\.sync in a thread"):
        first.__await__().send(None)


async def test_a_connection_is_entered_once() -> None:
    """Regression: the second entry replaced the handler of the first, which stayed a member and was never closed."""
    async with store.serve() as server:
        url = f"{server.url}/job?min_nodes=1"
        async with (connection := rdzv.connect(url, is_host=False)) as handler:
            with pytest.raises(rdzv.RendezvousStateError):
                await connection
            await handler.next_rendezvous()

        def block() -> None:
            with (blocking := rdzv.sync.connect(url, is_host=False)) as twin:
                with pytest.raises(rdzv.RendezvousStateError):
                    blocking.__enter__()
                twin.next_rendezvous()

        await asyncio.to_thread(block)
        async with store.connect(server.url) as client:
            assert await client.list("/rdzv/job/nodes/") == []


async def test_names_come_from_a_file(tmp_path: Path) -> None:
    listed = tmp_path / "nodes"
    listed.write_text("# the partition\ngpu-001\ngpu-002  # the slow one\n\n")
    handler = create_tcp_handler(
        RendezvousParameters.from_url("tcp://127.0.0.1/job", {"expected": "head", "expected_file": listed})
    )
    assert handler.settings.expected == ("head", "gpu-001", "gpu-002")
    with pytest.raises(rdzv.RendezvousSettingsError):
        create_tcp_handler(RendezvousParameters.from_url("tcp://127.0.0.1/job", {"expected_file": tmp_path / "none"}))
    listed.write_text("rack/7\n")
    with pytest.raises(rdzv.RendezvousSettingsError):
        create_tcp_handler(RendezvousParameters.from_url("tcp://127.0.0.1/job", {"expected_file": listed}))
