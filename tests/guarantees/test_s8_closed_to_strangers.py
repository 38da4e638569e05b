"""S8: closed to strangers, over real sockets.

"Mutual TLS, and/or a shared token proven by an HMAC-SHA256 challenge both ways: the token never crosses the wire".
"Binding anything but loopback without either is refused, with a message naming both remedies, unless `insecure` ..."
"""

import asyncio
import datetime
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import store
from store import AuthenticationError, ConnectionLost, StoreUsageError
from tests.support.processes import Child, require, start_python
from tests.support.proxy import Proxy

pytestmark = pytest.mark.some_here(12)

TOKEN = "correct horse battery staple"


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.1", "example.com"])
async def test_s8_listening_beyond_loopback_is_refused_naming_both_remedies(host: str) -> None:
    with pytest.raises(StoreUsageError) as caught:
        async with store.serve(host):
            raise AssertionError("it served")
    assert "token" in str(caught.value)
    assert "TLS" in str(caught.value)
    assert "insecure" in str(caught.value)


async def test_s8_tls_that_asks_for_no_certificate_is_no_remedy() -> None:
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with pytest.raises(StoreUsageError):
        async with store.serve("0.0.0.0", tls=anybody):
            raise AssertionError("it served")


@pytest.mark.parametrize("options", [{"token": TOKEN}, {"insecure": True}], ids=["token", "insecure"])
async def test_s8_with_a_token_or_the_word_insecure_it_listens_beyond_loopback(options: dict[str, Any]) -> None:
    async with store.serve("0.0.0.0", **options) as server:
        assert server.port


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
async def test_s8_loopback_needs_nothing(host: str) -> None:
    async with store.serve(host) as server, store.connect(server.url) as client:
        await client.put("a", b"1")
        assert await client.get("a") is not None


async def test_s8_an_empty_token_is_a_mistake_not_a_token() -> None:
    with pytest.raises(StoreUsageError):
        async with store.serve(token=""):
            raise AssertionError("it served")


def connect_blocking(url: str, token: str | None = None, **options: Any) -> int:
    with store.sync.connect(url, token=token, **options) as client:
        return client.add("count", 1)


async def test_s8_a_client_with_the_token_is_accepted() -> None:
    async with store.serve(token=TOKEN) as server:
        async with store.connect(server.url, token=TOKEN) as client:
            assert await client.add("count", 1) == 1
        async with store.connect(server.url, token=TOKEN.encode()) as client:
            assert await client.add("count", 1) == 2
        assert await asyncio.to_thread(connect_blocking, server.url, TOKEN) == 3


@pytest.mark.parametrize(
    ("token", "reason"), [("another", "not the server's"), (None, "wants a token, and none was given")]
)
async def test_s8_a_client_without_the_token_is_refused_at_once_with_the_reason(
    token: str | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with store.serve(token=TOKEN) as server:
        with pytest.raises(AuthenticationError, match=reason):
            async with store.connect(server.url, token=token):
                raise AssertionError("it was let in")
        with pytest.raises(AuthenticationError, match=reason):
            await asyncio.to_thread(connect_blocking, server.url, token)
        assert server.figures()["keys"] == 0
    assert TOKEN not in caplog.text


async def test_s8_a_client_with_a_token_refuses_a_server_that_asks_for_none() -> None:
    async with store.serve() as server:
        with pytest.raises(AuthenticationError):
            async with store.connect(server.url, token=TOKEN):
                raise AssertionError("it trusted the server")
        with pytest.raises(AuthenticationError):
            await asyncio.to_thread(connect_blocking, server.url, TOKEN)


def listed(*processes: Child) -> str:
    """Return the command lines of these processes, as a process list shows them, if the system permits."""
    lines = [Path(f"/proc/{process.pid}/cmdline") for process in processes]
    return "\n".join(line.read_text() for line in lines if line.exists())


async def test_s8_the_token_is_in_no_process_list_and_no_log(tmp_path: Path) -> None:
    """ "the token never crosses the wire or appears in a process list or log": neither the server's nor a client's."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "wrong").write_text("wrong horse")
    options = ("serve", "--host", "127.0.0.1", "--port", "0", "-v", "--token-file", str(tmp_path / "token"))
    async with start_python("-m", "rdzv", *options) as server:
        line = await server.says("listens on")
        url = f"tcp://{line.partition('listens on ')[2].partition(',')[0]}"
        async with (
            start_python("-m", "rdzv", "ping", f"{url}/run?token_file={tmp_path / 'token'}") as friend,
            start_python("-m", "rdzv", "ping", f"{url}/run?token_file={tmp_path / 'wrong'}") as stranger,
        ):
            shown = listed(server, friend, stranger)
            assert TOKEN not in shown
            assert "wrong horse" not in shown
            assert await friend.wait() == 0
            assert await stranger.wait() != 0
        server.terminate()
        assert await server.wait() == 0
        for process in (server, friend, stranger):
            assert not any(secret in "\n".join(process.output) for secret in (TOKEN, "wrong horse"))
        assert any("the client's token is not the server's" in line for line in server.output)


class Certificates:
    """An authority, and contexts that trust it."""

    def __init__(self) -> None:
        require("trustme")
        import trustme

        self.authority = trustme.CA()
        self.another = trustme.CA()
        self.issued = self.authority.issue_cert("127.0.0.1", "localhost")

    def server(
        self,
        *,
        mutual: bool = True,
        newest: ssl.TLSVersion | None = None,
        names: Sequence[str] = ("127.0.0.1", "localhost"),
        **certified: Any,
    ) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert(*names, **certified).configure_cert(context)
        self.authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE
        if newest is not None:
            context.maximum_version = newest
        return context

    def client(self, *, certificate: bool | str = True, trusts: str = "ours") -> ssl.SSLContext:
        context = ssl.create_default_context()
        (self.authority if trusts == "ours" else self.another).configure_trust(context)
        if certificate == "another's":
            self.another.issue_cert("127.0.0.1").configure_cert(context)
        elif certificate:
            self.issued.configure_cert(context)
        return context


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    return Certificates()


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_s8_a_client_with_a_certificate_is_accepted(
    certificates: Certificates, newest: ssl.TLSVersion, host: str
) -> None:
    async with store.serve(host, tls=certificates.server(newest=newest)) as server:
        url = f"tcps://127.0.0.1:{server.port}"
        async with store.connect(url, tls=certificates.client(), timeout=60.0) as client, client.watch("") as watch:
            await client.put("a", bytes(1_000_000))
            assert len((await anext(aiter(watch))).value) == 1_000_000
            assert await asyncio.to_thread(connect_blocking, url, None, tls=certificates.client(), timeout=60.0) == 1
        assert server.url.startswith("tcps://")


async def test_s8_tls_and_a_token_go_together(certificates: Certificates) -> None:
    async with store.serve(tls=certificates.server(mutual=False), token=TOKEN) as server:
        bare = certificates.client(certificate=False)
        async with store.connect(server.url, tls=bare, token=TOKEN) as client:
            assert await client.add("count", 1) == 1
        with pytest.raises(AuthenticationError):
            async with store.connect(server.url, tls=bare, token="another"):
                raise AssertionError("it was let in")


@dataclass(frozen=True)
class Stranger:
    """A client that is refused: its error, and the line in the server's log."""

    told: str
    logged: str
    server: dict[str, Any]
    client: dict[str, Any]
    token: str | None = None
    error: type[store.StoreError] = AuthenticationError
    scheme: str = "tcps"


YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
OLDER = ssl.TLSVersion.TLSv1_2
NEWER = ssl.TLSVersion.TLSv1_3
NO_CERTIFICATE = "wants a client's certificate"
DISTRUSTS_US = (
    "TLS failed: it (hung up in mid-handshake|does not trust|rejects|says that this server's certificate has expired)"
)
PLAIN: dict[str, Any] = {"plain": True}

STRANGERS = {
    "a wrong token": Stranger(
        "the client's token is not the server's", "the client's token is not the server's", PLAIN, PLAIN,
        token="another", scheme="tcp",
    ),
    "no token": Stranger(
        "wants a token, and none was given: pass token=, or a run's token_file=",
        "wants a token, and the client has none",
        PLAIN, PLAIN, token="", scheme="tcp",
    ),
    "no TLS": Stranger(
        "this port speaks TLS, and the client does not: use tcps://",
        "it sends nothing: a client without TLS waits for the server to begin", {"mutual": False}, PLAIN,
        error=store.ProtocolError, scheme="tcp",
    ),
    "TLS at a port without": Stranger(
        "TLS failed: it does not speak TLS: use tcp://", "a TLS hello on a port without TLS", PLAIN, {},
        error=ConnectionLost,
    ),
    "no certificate, TLS 1.2": Stranger(
        NO_CERTIFICATE, "TLS failed: it has no certificate, and this server requires one", {"newest": OLDER},
        {"certificate": False}, error=ConnectionLost,
    ),
    "no certificate, TLS 1.3, which refuses late": Stranger(
        NO_CERTIFICATE, "TLS failed: it has no certificate, and this server requires one", {"newest": NEWER},
        {"certificate": False}, error=ConnectionLost,
    ),
    "another authority's certificate": Stranger(
        "does not trust the authority of this client's certificate",
        "TLS failed: its certificate is none that this server trusts: unable to get", {},
        {"certificate": "another's"}, error=ConnectionLost,
    ),
    "a server of another authority": Stranger(
        "has no certificate that we trust: self-signed certificate", DISTRUSTS_US, {}, {"trusts": "another"}
    ),
    "a server's expired certificate": Stranger(
        "has no certificate that we trust: certificate has expired", DISTRUSTS_US, {"not_after": YESTERDAY}, {}
    ),
    "a server's certificate for another name": Stranger(
        "certificate is not valid for '127.0.0.1'", DISTRUSTS_US, {"names": ["elsewhere"]}, {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["async", "blocking"])
@pytest.mark.parametrize("who", STRANGERS)
async def test_s8_each_stranger_reads_one_sentence_and_each_attempt_is_one_line(
    certificates: Certificates, who: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = STRANGERS[who]
    served: dict[str, Any] = {} if case.server is PLAIN else {"tls": certificates.server(**case.server)}
    if case.token is not None:
        served["token"] = TOKEN
    limits = store.Limits(handshake_timeout=0.3)
    async with store.serve(limits=limits, **served) as server, Proxy("127.0.0.1", server.port) as proxy:
        url = f"{case.scheme}://127.0.0.1:{proxy.port}"
        # If a refusal may be temporary, such as that of a server that is leaving, the client tries until its time is
        # up.
        options: dict[str, Any] = {
            "timeout": 0.25 if case.error is ConnectionLost else 10.0,
            "token": case.token or None,
        }
        if case.client is not PLAIN:
            options["tls"] = certificates.client(**case.client)
        told = ""
        for _ in range(5):
            with pytest.raises(case.error) as caught:
                if kind == "async":
                    async with store.connect(url, **options):
                        raise AssertionError("it was let in")
                await asyncio.to_thread(connect_blocking, url, **options)
            # On a busy machine its last attempt may be under way when its time is up: then the error says that.
            told = str(caught.value)
            if case.told in told:
                break
        assert case.told in told
        assert "\n" not in told
        if case.error is ConnectionLost:
            proxy.cut()  # asyncio may leave a connection open whose handshake was given up
        await proxy.until(lambda: proxy.open_connections == 0)
        attempts = proxy.connections
        assert server.figures()["keys"] == 0
        assert server.connections == 0
    said = [record.getMessage() for record in caplog.records]
    assert len(said) <= attempts, "one line for each attempt"
    assert all("127.0.0.1:" in line for line in said), "it says who"
    as_told = [line for line in said if re.search(case.logged, line)]
    assert as_told
    if case.error is not ConnectionLost:
        assert len(as_told) == attempts
    # A client that gives up in the middle of an attempt has hung up, or sent nothing at all.
    gave_up = ("hung up in mid-handshake", "no hello within", "no handshake within", "it says nothing")
    assert all(any(what in line for what in gave_up) for line in said if line not in as_told), said
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("kind", ["async", "blocking"])
@pytest.mark.parametrize(
    ("scheme", "hangs_up", "told"),
    [
        ("tcp", False, "accepts connections and sends nothing.*write tcps://"),
        ("tcp", True, "without a word.*write tcps://"),
        ("tcps", False, "does not answer in the TLS handshake.*write tcp://"),
    ],
)
async def test_s8_the_error_for_a_silent_port_names_the_protocols_it_may_speak(
    kind: str, scheme: str, hangs_up: bool, told: str
) -> None:
    """A server with TLS is silent, too, until its own time is up, which is longer than the timeout of most clients."""
    met: list[asyncio.StreamWriter] = []

    async def mute(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(writer)
        if hangs_up:
            writer.close()

    listener = await asyncio.start_server(mute, "127.0.0.1")
    url = f"{scheme}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    with pytest.raises(ConnectionLost, match=told):
        if kind == "async":
            async with store.connect(url, timeout=0.25):
                raise AssertionError("it was let in")
        await asyncio.to_thread(connect_blocking, url, timeout=0.25)
    listener.close()
    for writer in met:
        writer.close()


async def test_s8_uvloop_tells_the_same(certificates: Certificates, tmp_path: Path) -> None:
    """Handshakes have another implementation there."""
    require("uvloop")
    certificates.authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificates.issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificates.issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    files = [str(tmp_path / f"{name}.pem") for name in ("cert", "key", "ca")]
    async with start_python("-c", UVLOOP_SERVER, *files) as child:
        port = int(await child.line())
        url = f"tcps://127.0.0.1:{port}"
        async with store.connect(url, tls=certificates.client(), timeout=60.0) as client:
            assert await client.put("a", bytes(3_000_000)) > 0
            entry = await client.get("a")
            assert entry is not None
            assert len(entry.value) == 3_000_000
        with pytest.raises(ConnectionLost, match=NO_CERTIFICATE):
            async with store.connect(url, tls=certificates.client(certificate=False), timeout=0.3):
                raise AssertionError("it was let in")
        await child.says("TLS failed: it has no certificate, and this server requires one")
        with pytest.raises(store.ProtocolError):
            async with store.connect(f"tcp://127.0.0.1:{port}"):
                raise AssertionError("it was let in")
        await child.says("it sends nothing: a client without TLS waits for the server to begin")
        child.terminate()
        assert await child.wait() == 0
        assert "Traceback" not in "".join(child.output)


async def test_s8_wrong_tokens_do_not_block_clients_with_the_right_one_from_the_same_address() -> None:
    """With eight attempts per second from one address, 2 of 37 clients with the right token got in."""
    async with store.serve(token=TOKEN) as server:

        async def guess() -> None:
            with pytest.raises(AuthenticationError):
                async with store.connect(server.url, token="not the token, but as long", timeout=30.0):
                    raise AssertionError("it was let in")

        guessing = [asyncio.create_task(guess()) for _ in range(100)]
        for _ in range(5):
            async with store.connect(server.url, token=TOKEN, timeout=30.0) as client:
                assert await client.count("") == 0
        await asyncio.gather(*guessing)
        assert server.figures()["strangers"] == 0


UVLOOP_SERVER = """
import asyncio, logging, signal, ssl, sys
import uvloop
import store


async def main():
    logging.basicConfig()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[1], sys.argv[2])
    context.load_verify_locations(sys.argv[3])
    context.verify_mode = ssl.CERT_REQUIRED
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with store.serve(tls=context, limits=store.Limits(handshake_timeout=0.6)) as server:
        print(server.port, flush=True)
        await stop.wait()


uvloop.run(main())
"""


FIRST, SECOND = b"the first token of some length", b"the second token of some length"


async def test_s8_a_servers_token_may_be_a_function_whose_last_answer_counts_if_it_fails() -> None:
    answers: list[bytes | None] = [FIRST]

    def token() -> bytes | None:
        return answers[-1]

    async def may_come(secret: bytes | None) -> bool:
        try:
            async with store.connect(server.url, token=secret, timeout=10) as client:
                await client.ping()
        except AuthenticationError:
            return False
        return True

    async with store.serve(token=token) as server:
        assert await may_come(FIRST)
        answers.append(SECOND)
        assert (await may_come(FIRST), await may_come(SECOND)) == (False, True)
        for failing in ([None], [b""], []):  # the last one raises IndexError
            answers[:] = failing
            assert (await may_come(None), await may_come(FIRST), await may_come(SECOND)) == (False, False, True)
    for none in (None, b""):
        with pytest.raises(StoreUsageError, match="the token is empty"):
            async with store.serve(token=lambda answer=none: answer):
                pass


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, LookupError])
def test_s8_any_error_of_the_function_for_a_token_leaves_the_last_token(error: type[BaseException]) -> None:
    """Regression: SystemExit or KeyboardInterrupt ended the server's thread."""
    answers = [FIRST]

    def token() -> bytes:
        if not answers:
            raise error
        return answers.pop()

    with store.sync.serve(token=token) as server:
        for _ in range(3):
            with store.sync.connect(server.url, token=FIRST, timeout=10) as client:
                client.ping()
