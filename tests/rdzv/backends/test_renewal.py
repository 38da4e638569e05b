"""Certificates and tokens that are replaced while a node runs: new connections use the current files."""

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rdzv
import store
import store.sync
from rdzv.backends.builtin import _TcpConnector, make_client
from rdzv.backends.credentials import Credentials
from rdzv.backends.monitoring import serve_embedded
from rdzv.config.settings import Settings, parse
from store.net.certificates import client_context
from tests.support.processes import free_port, require
from tests.support.twins import InThreads

OLD, NEW = b"the old token, of 32 random bytes", b"the new token, of 32 random bytes"


class Authority:
    """A certificate authority, and the files of one server and one client that it has certified."""

    def __init__(self) -> None:
        require("trustme")
        import trustme

        self.made = trustme.CA()
        pem = self.made.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.bytes()
        self.files = {"ca": self.made.cert_pem.bytes(), "pem": pem}

    def serving(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.made.issue_cert("127.0.0.1").configure_cert(context)
        self.made.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        return context


def write_in_place(folder: Path, files: dict[str, bytes]) -> Iterator[None]:
    """Write files, and pause in the middle of each."""
    for name, content in files.items():
        with (folder / name).open("wb", buffering=0) as file:
            yield
            file.write(content[: len(content) // 2])
            yield
            file.write(content[len(content) // 2 :])
        yield


def rename(folder: Path, files: dict[str, bytes]) -> Iterator[None]:
    for name, content in files.items():
        (folder / f"{name}.new").write_bytes(content)
        yield
        (folder / f"{name}.new").rename(folder / name)
        yield


def swap_link(folder: Path, files: dict[str, bytes]) -> Iterator[None]:
    """Replace all files at once, as Kubernetes does with a mounted secret."""
    target = folder / f"data-{len(list(folder.iterdir()))}"
    target.mkdir()
    for name, content in files.items():
        (target / name).write_bytes(content)
        yield
        if not (folder / name).is_symlink():
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(folder / "data" / name)
    (folder / "data.new").symlink_to(target)
    (folder / "data.new").rename(folder / "data")


def settle(folder: Path) -> None:
    """Make the files look as if they had not changed for a minute."""
    for path in folder.iterdir():
        if path.is_file():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 60))


def credentials_in(folder: Path, port: int = 1) -> tuple[Settings, Credentials]:
    names = {"ca": "ca", "cert": "pem", "key": "pem", "token_file": "token"}
    given = {name: str(folder / file) for name, file in names.items()}
    settings = parse(f"tcps://127.0.0.1:{port}/job", given, {})
    return settings, Credentials(settings)


@pytest.mark.parametrize("write", [write_in_place, rename, swap_link])
def test_new_files_are_used_once_they_are_complete_and_match(
    write: Callable[[Path, dict[str, bytes]], Iterator[None]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Authority(), Authority()
    for _ in write(tmp_path, {**old.files, "token": OLD}):
        pass
    _, credentials = credentials_in(tmp_path)
    first = credentials.client_tls()
    assert credentials.renew is not None
    assert credentials.renew() is first
    stages = 0
    for _ in write(tmp_path, {**new.files, "token": NEW}):
        stages += 1
        for _ in range(3):
            assert credentials.renew() is not None
            assert credentials.token in (OLD, NEW)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) <= stages
    settle(tmp_path)
    last = credentials.renew()
    assert last is not first
    assert last is not None
    assert last.get_ca_certs()[0]["serialNumber"] != first.get_ca_certs()[0]["serialNumber"]  # type: ignore[union-attr]
    assert credentials.token == NEW
    assert credentials.renew() is last, "unchanged files are not loaded again"


def test_a_token_file_that_is_dated_in_the_future_is_complete(tmp_path: Path) -> None:
    """After the clock was set back, a new token was not used until the clock had reached the file's date."""
    for _ in write_in_place(tmp_path, {**Authority().files, "token": OLD}):
        pass
    settle(tmp_path)
    _, credentials = credentials_in(tmp_path)
    assert credentials.renew is not None
    (tmp_path / "token").write_bytes(NEW)
    os.utime(tmp_path / "token", (time.time() + 7200,) * 2)
    credentials.renew()
    assert credentials.token == NEW


def test_an_unusable_change_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {**Authority().files, "token": OLD}
    for _ in write_in_place(tmp_path, files):
        pass
    _, credentials = credentials_in(tmp_path)
    assert credentials.renew is not None
    first = credentials.renew()
    for broken in (b"", b"nonsense", None):
        for name in ("pem", "token"):
            (tmp_path / name).unlink()
            if broken is not None:
                (tmp_path / name).write_bytes(broken)
        for _ in range(3):
            assert credentials.renew() in (None, first)
            assert credentials.token == OLD
    told = [record.getMessage() for record in caplog.records if "as last read" in record.getMessage()]
    assert len(told) == 3


@pytest.mark.parametrize("loop", ["its own", "asyncio"])
async def test_a_hosted_store_shows_the_current_certificate(loop: str, tmp_path: Path) -> None:
    """Regression: it showed the certificate of its start for ever, also after that had expired."""
    old, new = Authority(), Authority()
    for _ in write_in_place(tmp_path, {**old.files, "token": OLD}):
        pass
    settings, credentials = credentials_in(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        if loop == "asyncio":
            server = await stack.enter_async_context(store.serve(tls=credentials.server_tls(renews=True), token=OLD))
        else:
            serving, server = await asyncio.to_thread(serve_embedded, settings, credentials, "127.0.0.1", 0)
            stack.push_async_callback(asyncio.to_thread, serving.close)

        async def is_shown(authority: Authority) -> bool:
            tls = ssl.create_default_context()
            authority.made.configure_trust(tls)
            authority.made.issue_cert("client").configure_cert(tls)
            try:
                async with store.connect(f"tcps://127.0.0.1:{server.port}", tls=tls, token=OLD, timeout=5.0) as client:
                    await client.put("a", b"")
            except store.StoreError:
                return False
            return True

        assert await is_shown(old)
        for _ in write_in_place(tmp_path, {"pem": new.files["pem"][:100]}):
            assert await is_shown(old), "half-written files are not used"
        for _ in write_in_place(tmp_path, new.files):
            pass
        assert await is_shown(new)
        assert not await is_shown(old)


@pytest.mark.parametrize("where", ["inside", "process"])
async def test_a_hosted_store_and_its_page_want_the_current_token(where: str, tmp_path: Path) -> None:
    """Regression: the store kept the token of its start, and members that had read the new one did not come back."""
    aiohttp = pytest.importorskip("aiohttp")
    file, http_port = tmp_path / "token", free_port()
    file.write_bytes(OLD)
    url = f"tcp://127.0.0.1:{free_port()}"
    async with rdzv.connect(f"{url}/job?min_nodes=1&host={where}&http_port={http_port}", token_file=str(file)):

        async def is_wanted(token: bytes) -> bool:
            try:
                async with store.connect(url, token=token, timeout=5.0) as client:
                    await client.put("a", b"")
            except store.AuthenticationError:
                is_accepted = False
            else:
                is_accepted = True
            headers = {"Authorization": f"Bearer {token.decode()}"}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.get(f"http://127.0.0.1:{http_port}/api/runs") as answer,
            ):
                assert (answer.status == 200) == is_accepted
            return is_accepted

        assert [await is_wanted(token) for token in (OLD, NEW)] == [True, False]
        file.write_bytes(NEW)
        settle(tmp_path)
        assert [await is_wanted(token) for token in (NEW, OLD)] == [True, False]


async def test_the_metrics_of_a_node_that_hosts_no_store_want_the_current_token(tmp_path: Path) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    file, port = tmp_path / "token", free_port()
    file.write_bytes(OLD)
    async with (
        store.serve(token=OLD) as server,
        rdzv.connect(
            f"{server.url}/job?min_nodes=1&metrics_port={port}", is_host=False, token_file=str(file)
        ) as handler,
    ):
        await handler.next_rendezvous()

        async def is_wanted(token: bytes) -> bool:
            headers = {"Authorization": f"Bearer {token.decode()}"}
            async with aiohttp.ClientSession(headers=headers) as session, asyncio.timeout(20):
                while True:
                    with contextlib.suppress(aiohttp.ClientConnectionError):  # until it listens
                        async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                            return bool(answer.status == 200)

        assert [await is_wanted(token) for token in (OLD, NEW)] == [True, False]
        file.write_bytes(NEW)
        settle(tmp_path)
        assert [await is_wanted(token) for token in (NEW, OLD)] == [True, False]


def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Authority(), Authority()
    for _ in write_in_place(tmp_path, {**old.files, "token": OLD}):
        pass
    _, credentials = credentials_in(tmp_path)
    first, load = credentials.client_tls(), client_context
    assert credentials.renew is not None

    def interrupted(*files: Any) -> ssl.SSLContext:
        loaded = load(*files)
        (tmp_path / "ca").write_bytes(new.files["ca"])
        (tmp_path / "pem").write_bytes(new.files["pem"])
        return loaded

    (tmp_path / "ca").write_bytes(old.files["ca"] + b"\n")
    monkeypatch.setattr("rdzv.backends.credentials.client_context", interrupted)
    assert credentials.renew() is first, "what was loaded is no longer in the files"
    monkeypatch.setattr("rdzv.backends.credentials.client_context", load)
    last = credentials.renew()
    assert last is not None
    assert last.get_ca_certs() != first.get_ca_certs()  # type: ignore[union-attr]


def test_a_blocking_caller_finds_the_serving_host_of_several_with_renewed_certificates(tmp_path: Path) -> None:
    """Regression: it asked the hosts with the certificates of its start, and found none."""
    old, new = Authority(), Authority()
    for _ in write_in_place(tmp_path, {**old.files, "token": OLD}):
        pass
    with store.sync.serve(tls=new.serving(), token=NEW) as server:
        names = {"ca": "ca", "cert": "pem", "key": "pem", "token_file": "token"}
        given = {name: str(tmp_path / file) for name, file in names.items()}
        url = f"tcps://127.0.0.1:{free_port()},127.0.0.1:{server.port}/job"
        made = _TcpConnector(parse(url, given, {}))
        for _ in write_in_place(tmp_path, {**new.files, "token": NEW}):
            pass
        settle(tmp_path)
        client = made.blocking_client()
        client.put("a", b"1", timeout=20.0)
        client.close()


@pytest.mark.parametrize("twin", ["awaited", "blocking"])
async def test_a_client_reconnects_to_a_server_with_new_certificates_and_a_new_token(twin: str, tmp_path: Path) -> None:
    """Regression: a node whose certificate had been renewed in time did not reconnect after a cut."""
    secrets, data = tmp_path / "secrets", tmp_path / "data"
    secrets.mkdir()
    old, new = Authority(), Authority()
    for _ in write_in_place(secrets, {**old.files, "token": OLD}):
        pass
    async with contextlib.AsyncExitStack() as stack:
        async with store.serve(data_dir=data, tls=old.serving(), token=OLD) as server:
            port = server.port
            settings, credentials = credentials_in(secrets, port)
            client: Any
            if twin == "blocking":
                blocking = _TcpConnector(settings).blocking_client()
                stack.push_async_callback(asyncio.to_thread, blocking.close)
                client = InThreads(blocking, stack.enter_context(ThreadPoolExecutor(1)))
            else:
                client = await stack.enter_async_context(make_client(settings, credentials))
            await client.put("a", b"1")
        for _ in write_in_place(secrets, {**new.files, "token": NEW}):
            pass
        settle(secrets)
        async with store.serve(port=port, data_dir=data, tls=new.serving(), token=NEW):
            assert (await client.get("a", timeout=20.0)).value == b"1"
