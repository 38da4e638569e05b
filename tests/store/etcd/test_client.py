"""Behaviour of etcd only: lost answers, compaction, several members, identity, users, certificates, a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import time
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import trustme

import rdzv
import store
from rdzv.errors import RendezvousError
from store import when
from store.errors import (
    AuthenticationError,
    ConditionFailed,
    ConnectionLost,
    LeaseNotFound,
    LimitExceeded,
    StoreError,
    StoreReplaced,
    StoreUsageError,
    WatchCompacted,
)
from store.etcd import member_choice as choice_room
from store.etcd import members as members_room
from store.etcd.client import Client
from store.etcd.codec import Endpoints, Failure, FailureKind
from store.messages import CHOSEN_LEASE_LEAST, Create, Event, Grant, Guarded, Revoke, TransactionResult
from store.net.certificates import client_context
from tests.rdzv.cli.test_main import run
from tests.store.etcd.test_members import time_is_over
from tests.support.etcd import Etcd, encoded, serve_etcd
from tests.support.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator
    from pathlib import Path

    from store.etcd.rpc.connection import Connection
    from store.etcd.watch import Watch

pytestmark = pytest.mark.some_here(4)

T = TypeVar("T")

SEEDS = int(os.environ.get("RDZV_ETCD_SEEDS", "2"))
"""The number of seeds with which answers are lost."""

_names = iter(range(10**6))


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make attempts without the pauses that spare a cluster in trouble."""
    monkeypatch.setattr(choice_room, "PAUSE_FIRST", 0.0005)
    monkeypatch.setattr(choice_room, "PAUSE_MOST", 0.002)


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with serve_etcd() as served:
        yield served


@pytest.fixture
def at() -> str:
    """Return a prefix that no other test has."""
    return f"etcd-{next(_names)}/"


def make_client(url: str, **options: Any) -> Client:
    return Client(Endpoints.parse(url), **options)


@pytest.fixture
async def client(etcd: Etcd) -> AsyncIterator[Client]:
    async with make_client(etcd.url) as connected:
        yield connected


class Losses:
    """Loses requests and answers of a client at random, as a network does.

    Attributes:
        fates: The possible fates of an attempt. "pass": it succeeds. "unsent": it never arrives. "unheard": its answer
            is lost. "late": it takes long, and arrives after some of the next attempts. "held": it arrives when it is
            released.
    """

    def __init__(self, client: Client, *, seed: int = 1, fates: tuple[str, ...] = ("pass",)) -> None:
        self._members = client.members
        self._send = client.members._send
        client.members._send = self.send  # type: ignore[assignment, method-assign]  # it plays the network's part
        self._rng = random.Random(seed)
        self._late: list[tuple[int, tuple[Any, ...]]] = []  # with the number of attempts that arrive before it
        self._news = asyncio.Event()
        self._held: list[tuple[Any, ...]] = []
        self.fates = fates
        self.lost = 0
        self.asked: list[str] = []

    @contextlib.asynccontextmanager
    async def of(
        self, work: Coroutine[Any, Any, T], *, times: int = 1, fate: str = "unheard"
    ) -> AsyncIterator[asyncio.Task[T]]:
        """Lose attempts of some work: the block begins after so many losses, and nothing more is lost after its end."""
        until = self.lost + times
        self.fates = (fate,)
        task = asyncio.create_task(work)
        async with asyncio.timeout(30):
            while self.lost < until:
                self._news.clear()
                await self._news.wait()
        yield task
        self.fates = ("pass",)

    async def let_go(self) -> None:
        """Let the held attempts arrive now."""
        for copy in self._held:
            await self._arrive(copy)

    async def _arrive(self, copy: tuple[Any, ...]) -> None:
        """Let a copy arrive, over the connection that exists by then."""
        await self._send(await self._members._get_connection(math.inf, 1.0, "a copy", None), *copy)

    async def send(self, connection: Connection, method: str, *rest: Any) -> Any:
        """Stands in for `Members._send`."""
        self.asked.append(method)
        fate = self._rng.choice(self.fates) if method == "KV/Txn" or method.startswith("Lease/") else "pass"
        reply = await self._send(connection, method, *rest) if fate in ("pass", "unheard") else None
        arriving = [copy for wait, copy in self._late if not wait]
        self._late = [(wait - 1, copy) for wait, copy in self._late if wait]
        for copy in arriving:
            with contextlib.suppress(Failure, StoreError):  # the result of a late attempt reaches no caller
                await self._arrive(copy)
        if fate == "late":
            self._late.append((self._rng.randrange(4), (method, *rest)))
        if fate == "held":
            self._held.append((method, *rest))
        if fate != "pass":
            self.lost += 1
            self._news.set()
            raise Failure("lost", FailureKind.DOUBT)
        return reply


DICE = ("pass", "pass", "unsent", "unheard", "late")


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_s2_after_any_loss_every_write_is_applied_once_with_its_original_answer(
    etcd: Etcd, at: str, seed: int
) -> None:
    async with make_client(etcd.url) as client:
        losses = Losses(client, seed=seed, fates=DICE)
        lease = await client.grant(60)
        total, text = 0, b""
        for number in range(12):
            total += number
            text += b"ab"
            assert await client.add(at + "n", number) == total
            assert await client.append(at + "s", b"ab") == len(text)
            revision = await client.put(at + "p", b"%d" % number, lease=lease)
            entry = await client.get(at + "p")
            assert entry is not None
            assert (entry.mod_revision, entry.value) == (revision, b"%d" % number)
            won = await client.compare_and_set(at + "c", b"%d" % number, expected_revision=0)
            assert (won.succeeded, won.entry and won.entry.value) == (True, b"%d" % number)
            lost = await client.compare_and_set(at + "c", b"", expected_revision=0)
            assert (lost.succeeded, lost.entry) == (False, won.entry)
            result = await client.transact(
                when=[when.exists(at + "c")],
                then=[store.Get(at + "c"), store.Delete(at + "c"), store.Delete(at + "none"), store.Put(at + "d", b"")],
            )
            assert result.results[:3] == (won.entry, True, False)
            assert result.results[3] == result.revision
            other = await client.transact(
                when=[when.exists(at + "c")], otherwise=[store.Put(at + "e", b"1"), store.Get(at + "e")]
            )
            assert not other.succeeded
            assert isinstance(other.results[1], store.Entry)
            assert other.results[1].mod_revision == other.results[0] == other.revision
            with pytest.raises(ConditionFailed):
                await client.put(at + "never", b"", when=[when.exists(at + "c")])
            assert await client.delete(at + "e") is True
            assert await client.delete(at + "e") is False
            assert await client.delete_prefix(at + "d") == 1
        await lease.revoke()
        assert [entry.key.removeprefix(at) for entry in await client.list(at)] == ["n", "s"]
        assert losses.lost > 50


def chosen() -> int:
    """Choose a lease's id, for a transaction that grants it."""
    return CHOSEN_LEASE_LEAST + random.getrandbits(60)


async def arrive(client: Client, at: str, name: str, *, own: int, shared: int) -> TransactionResult:
    """Put one key on a new lease, and others on one that all share, as a node does at its arrival."""
    return await client.transact(
        when=[when.value_if_any(at + "settings") == b"x", when.missing(at + name)],
        then=[
            store.Put(at + name, b"", lease=own),
            store.Put(at + "settings", b"x", lease=shared),
            Create(at + "lease", name.encode(), lease=shared),
        ],
        otherwise=[store.Get(at + "settings")],
        grants=[Grant(ttl=60, id=own), Grant(ttl=60, id=shared)],
    )


async def test_simultaneous_first_clients_all_connect(etcd: Etcd, at: str) -> None:
    shared = chosen()
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(make_client(etcd.url)) for _ in range(5)]
        arriving = (arrive(one, at, f"n{n}", own=chosen(), shared=shared) for n, one in enumerate(clients))
        results = await asyncio.gather(*arriving)
        assert all(result.succeeded for result in results)
        assert sum(result.results[2] == result.revision for result in results) == 1


async def test_a_value_that_may_be_missing_is_one_condition_and_the_else_branch_may_write(etcd: Etcd, at: str) -> None:
    async with make_client(etcd.url) as client:

        async def write() -> TransactionResult:
            return await client.transact(
                when=[when.missing(at + "none"), when.value_if_any(at + "s") == b"x"],
                then=[store.Put(at + "then", b"")],
                otherwise=[store.Get(at + "s"), store.Put(at + "otherwise", b"")],
            )

        assert (await write()).succeeded
        await client.put(at + "s", b"x")
        assert (await write()).succeeded
        assert await client.get(at + "otherwise") is None
        await client.put(at + "s", b"y")
        refused = await write()
        assert not refused.succeeded
        assert isinstance(refused.results[0], store.Entry)
        assert refused.results[0].value == b"y"
        assert await client.get(at + "otherwise") is not None
        read = store.Get(at + "then")
        assert (await client.call(Guarded(when=(when.value_if_any(at + "s") == b"y",), request=read))).entry
        with pytest.raises(ConditionFailed):
            await client.call(Guarded(when=(when.value_if_any(at + "s") == b"x",), request=read))


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_s2_after_any_loss_a_node_arrives_once(etcd: Etcd, at: str, seed: int) -> None:
    shared = chosen()
    async with make_client(etcd.url) as client:
        losses = Losses(client, seed=seed, fates=DICE)
        revisions = {}
        for number in range(8):
            result = await arrive(client, at, f"n{number}", own=chosen(), shared=shared)
            assert result.succeeded
            revisions[f"{at}n{number}"] = result.revision
            created = result.results[2]
            assert created.value == b"n0" if isinstance(created, store.Entry) else created == result.revision
            assert isinstance(created, store.Entry) is (number > 0)
        losses.fates = ("pass",)
        assert {entry.key: entry.mod_revision for entry in await client.list(at + "n")} == revisions
        assert losses.lost > 10


async def test_s2_a_write_on_a_lost_lease_is_refused_or_its_outcome_is_unknown(
    etcd: Etcd, client: Client, at: str
) -> None:
    """The receipt is deleted with the lease: if the answer was lost, the outcome can no longer be known."""
    await arrive(client, at, "a", own=(own := chosen()), shared=chosen())
    async with Losses(client).of(client.put(at + "a", b"1", lease=own)) as writing:
        etcd.members[0].ask("lease/revoke", ID=str(own))
    with pytest.raises(ConnectionLost) as caught:
        await writing
    assert caught.value.maybe_applied
    with pytest.raises(LeaseNotFound):
        await client.put(at + "a", b"2", lease=own)


async def test_s5_a_lease_that_a_refused_attempt_has_granted_begins_anew_with_the_next(client: Client, at: str) -> None:
    """Regression: it was taken for as fresh as the attempt that used it, and could expire long before a renewal."""
    asked, own = Losses(client).asked, chosen()
    for condition, succeeds in ((when.exists(at + "no"), False), (when.missing(at + "no"), True)):
        put = store.Put(at + "a", b"", lease=own)
        result = await client.transact(when=[condition], then=[put], grants=[Grant(ttl=60, id=own)])
        assert result.succeeded is succeeds
    assert asked == ["Lease/LeaseGrant", "KV/Txn", "Lease/LeaseGrant", "Lease/LeaseKeepAlive", "KV/Txn"]


async def test_s2_an_attempt_that_arrives_after_its_answer_does_nothing(client: Client, etcd: Etcd, at: str) -> None:
    """The answer was that another client has it. This must stay true, also when that client has gone."""
    await client.put(at + "mine", b"")  # so that it has a receipt
    async with make_client(etcd.url) as other:
        await other.put(at + "lock", b"another")
        losses = Losses(client)
        async with losses.of(client.compare_and_set(at + "lock", b"mine", expected_revision=0), fate="held") as taking:
            pass
        assert not (await taking).succeeded
        await other.delete(at + "lock")
        await losses.let_go()
        assert await client.get(at + "lock") is None


async def test_s2_a_grant_whose_answer_was_lost_is_not_made_twice(client: Client, etcd: Etcd) -> None:
    losses = Losses(client)
    before = len(etcd.members[0].ask("lease/leases").get("leases", []))
    async with losses.of(client.grant(60), times=3) as granting:
        pass
    lease = await granting
    assert lease.ttl == 60
    assert len(etcd.members[0].ask("lease/leases")["leases"]) == before + 1
    async with losses.of(lease.revoke()) as revoking:
        pass
    await revoking


async def test_s2_without_the_receipt_the_error_says_maybe_applied(client: Client, etcd: Etcd, at: str) -> None:
    await client.put(at + "a", b"0")
    async with Losses(client).of(client.put(at + "a", b"1")) as writing:
        etcd.members[0].ask("lease/revoke", ID=str(client._receipts.lease))
    with pytest.raises(ConnectionLost) as caught:
        await writing
    assert caught.value.maybe_applied


async def test_a_client_whose_receipts_have_lapsed_while_it_slept_goes_on(client: Client, etcd: Etcd, at: str) -> None:
    await client.put(at + "a", b"0")
    etcd.members[0].ask("lease/revoke", ID=str(client._receipts.lease))
    await client.put(at + "a", b"1")
    assert await client.add(at + "n", 1) == 1


async def test_a_request_that_is_never_answered_says_whether_it_may_have_been_done(client: Client, at: str) -> None:
    await client.put(at + "a", b"0")  # so that it has a receipt
    async with Losses(client).of(client.put(at + "a", b"1", timeout=600), times=2) as writing:
        time_is_over(client.members)
        with pytest.raises(ConnectionLost, match="not answered in time: lost") as caught:
            await writing
    assert caught.value.maybe_applied


async def test_s2_a_write_that_was_under_way_when_its_client_was_closed_may_have_been_done(etcd: Etcd, at: str) -> None:
    """Regression: the error said that it had not been applied, but it had."""
    done = asyncio.Event()
    async with make_client(etcd.url) as client:
        await client.put(at + "a", b"0")  # so that it has a receipt
        send = client.members._send

        async def send_and_never_hear(connection: Connection, method: str, *rest: Any) -> Any:
            reply = await send(connection, method, *rest)
            if method == "KV/Txn":
                done.set()
                await asyncio.Event().wait()
            return reply

        client.members._send = send_and_never_hear  # type: ignore[assignment, method-assign]
        writing = asyncio.create_task(client.put(at + "a", b"1"))
        await done.wait()
    with pytest.raises(ConnectionLost, match="is closed") as caught:
        await writing
    assert caught.value.maybe_applied


async def test_s4_a_watch_that_has_been_overtaken_by_compaction_begins_anew_or_says_so(
    client: Client, etcd: Etcd, at: str
) -> None:
    async with client.watch(at, snapshot=True) as watch, client.watch(at) as plain:
        first = await client.put(at + "old", b"")
        seen = await read_until(watch, kind="put")
        watch._close_stream()  # as if its member had gone
        plain._close_stream()
        await client.delete(at + "old")
        etcd.compact(await client.put(at + "new", b"1"))
        seen += await read_until(watch, kind="synced")
        assert [event.kind for event in seen] == ["synced", "put", "reset", "put", "synced"]
        revision = await client.put(at + "new", b"2")
        (event,) = await read_until(watch, kind="put")
        assert (event.revision, event.value) == (revision, b"2")
        for overtaken in (plain, client.watch(at, start_revision=first)):
            with pytest.raises(WatchCompacted):
                async with overtaken:
                    await read_until(overtaken, kind="put")


async def until(watch: Watch, *, kind: str, key: str | None = None) -> list[Event]:
    """Open a watch, and read it up to an event of this kind."""
    async with watch:
        return await read_until(watch, kind=kind, key=key)


async def read_until(watch: Watch, *, kind: str, key: str | None = None) -> list[Event]:
    """Read a watch up to an event of this kind; of this key, if one is given."""
    read = []
    async with asyncio.timeout(30):
        async for event in watch:
            read.append(event)
            if event.kind == kind and key in (None, event.key):
                break
    return read


async def test_s4_a_quiet_watch_goes_on_through_compaction_unless_something_has_happened_to_its_keys(
    etcd: Etcd, at: str
) -> None:
    async with make_client(etcd.url) as client, make_client(etcd.url) as writer:
        await writer.put(at + "a", b"1")
        await writer.put(at + "b", b"1")
        async with client.watch(at, snapshot=True) as watch, client.watch(at) as plain:
            events, others = aiter(watch), aiter(plain)
            assert [(await anext(events)).kind for _ in range(3)] == ["put", "put", "synced"]
            waiting = [asyncio.ensure_future(anext(each)) for each in (events, others)]
            for _ in range(20):
                await writer.put("elsewhere", b"")
            revision = await writer.put("elsewhere", b"")
            etcd.compact(revision)
            await client.members.drop_failed_connection(client.members._current, Failure("lost", FailureKind.UNDONE))  # type: ignore[arg-type]
            async with asyncio.timeout(30):
                quiet = (watch, plain)
                while any((it._cursor.opening_request()[0].start_revision or 0) <= revision for it in quiet):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # until they have seen that nothing has happened
                put = await writer.put(at + "c", b"1")
                assert [(event.kind, event.revision) for event in await asyncio.gather(*waiting)] == [("put", put)] * 2
            watch._close_stream()  # a key that is deleted meanwhile is only noticed by its absence
            await writer.delete(at + "b")
            etcd.compact(await writer.put("elsewhere", b""))
            kinds = [event.kind for event in await read_until(watch, kind="synced")]
            assert kinds == ["reset", "put", "put", "synced"]


async def test_s4_a_watch_whose_member_falls_silent_goes_on_at_another(
    etcd: Etcd, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_room, "IDLE", 0.3)
    async with Proxy("127.0.0.1", etcd.members[0].client_port) as proxy, make_client(etcd.url) as writer:
        url = f"etcd://127.0.0.1:{proxy.port},127.0.0.1:{etcd.members[0].client_port}"
        async with make_client(url, rng=AlwaysFirst()) as client, client.watch(at, snapshot=True) as watch:
            waiting = asyncio.create_task(client.wait([at + "b"]))
            async with asyncio.timeout(30):
                while not (client.members._current and client.members._current.has_watches):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # until it watches
            assert proxy.open_connections > 0
            proxy.black_hole()
            await writer.put(at + "a", b"1")
            assert [event.key for event in await read_until(watch, kind="put")] == ["", at + "a"]
            assert client.connected
            proxy.heal()
            proxy.cut()
            await writer.put(at + "b", b"1")
            async with asyncio.timeout(30):
                await waiting


class AlwaysFirst(random.Random):
    """A source of randomness for a client that begins with the first member."""

    def randrange(self, *_: Any) -> int:
        """Return the first."""
        return 0


async def test_s4_events_of_many_megabytes_come_whole(client: Client, at: str) -> None:
    async with client.watch(at) as watch:
        for number in range(3):
            await client.put(f"{at}{number}", bytes([number]) * 1_200_000)
        events = aiter(watch)
        for number in range(3):
            assert (await anext(events)).value == bytes([number]) * 1_200_000


async def test_a_snapshot_of_more_keys_than_one_page_holds_is_whole(client: Client, at: str) -> None:
    names = [f"{at}{number:05}" for number in range(2_500)]
    for first in range(0, len(names), 125):
        await client.transact(then=[store.Put(name, b"") for name in names[first : first + 125]])
    assert [entry.key for entry in await client.list(at)] == names
    assert [event.key for event in await until(client.watch(at, snapshot=True), kind="synced")] == [*names, ""]


async def test_credentials_of_the_other_kind_of_store_are_refused(etcd: Etcd) -> None:
    with pytest.raises(StoreUsageError, match="etcd knows no token"):
        async with store.connect(etcd.url, token="secret"):
            pass
    with pytest.raises(StoreUsageError, match="knows no users"):
        async with store.connect("tcp://127.0.0.1:1", user="me", password="secret"):
            pass
    for url in ("tcp://127.0.0.1:1", etcd.url):
        with pytest.raises(StoreUsageError, match="is without TLS"), store.sync.connect(url, tls=client_context()):
            pass


@pytest.mark.in_ci
async def test_s8_certificates_users_and_passwords(tmp_path: Path) -> None:
    """One etcd that demands everything: mutual TLS, and a user who may only write below their own prefix."""
    authority, stranger = trustme.CA(), trustme.CA()
    for name, issuer in (("server", authority), ("client", authority), ("stranger", stranger)):
        issued = issuer.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    stranger.cert_pem.write_to_path(tmp_path / "other-ca.pem")
    (tmp_path / "password").write_text("s3cret\n")
    (tmp_path / "wrong").write_text("guess\n")
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "client.pem", "client.key"))
    tls = client_context(ca, cert, key)
    options = [
        *("--cert-file", str(tmp_path / "server.pem"), "--key-file", str(tmp_path / "server.key")),
        *("--trusted-ca-file", ca, "--client-cert-auth"),
    ]
    with serve_etcd(scheme="https", tls=tls, options=options) as served:
        member = served.members[0]
        for user in ("root", "rdzv"):
            member.ask("auth/user/add", name=user, password="s3cret")
            member.ask("auth/role/add", name=user)
            member.ask("auth/user/grant", user=user, role=user)
        mine = {"permType": "READWRITE", "key": encoded("/torchelastic/"), "range_end": encoded("/torchelastic0")}
        member.ask("auth/role/grant", name="rdzv", perm=mine)
        member.ask("auth/enable")

        url = f"{served.url}/job?min_nodes=1&ca={ca}&cert={cert}&key={key}&join_timeout=30"
        who = f"&user=rdzv&password_file={tmp_path}"
        async with rdzv.connect(url + who + "/password") as handler:
            info = await handler.next_rendezvous()
            await info.store.set("key", "value")
            assert await info.store.get("key") == b"value"
            for command in ("status", "runs"):  # they once read another key, and were refused
                done, output = await run(command, url + who + "/password")
                assert done == 0, output
            _, output = await run("doctor", url + who + "/password")
            assert "round 0 stands with 1 node" in "\n".join(output), (
                "whatever it finds wrong with this release of etcd"
            )
        for wrong, sentence in (
            (url + who + "/wrong", "refused the user or the password"),
            (url, "does not permit this user"),  # etcd takes the user from the certificate: its common name
            (url.replace("ca.pem", "other-ca.pem") + who + "/password", "no certificate that we trust"),
            (url.replace("etcds:", "etcd:").partition("&ca=")[0], "speaks TLS; write etcds://"),
            (f"{served.url}/job?min_nodes=1&ca={ca}" + who + "/password", "give a client certificate that it trusts"),
        ):
            with pytest.raises(RendezvousError, match=sentence):
                async with rdzv.connect(wrong):
                    pass

        cluster = Endpoints.parse(served.url)
        async with Client(cluster, tls=tls, user="rdzv", password="s3cret", receipts="/torchelastic/r/") as client:
            await client.put("/torchelastic/a", b"1")
            with pytest.raises(AuthenticationError, match=r"does not (permit|let)"):
                await client.put("/elsewhere", b"1")
            async with client.watch("/torchelastic/a", snapshot=True) as watch:
                member.kill()  # tokens are in its memory only
                member.start()
                served.wait_until_ready_to_listen()
                await client.put("/torchelastic/a", b"2")
                events = await read_until(watch, kind="synced") + await read_until(watch, kind="put")
                assert events[-1].value == b"2"
            with pytest.raises(AuthenticationError):
                async with client.watch("/elsewhere", snapshot=False):
                    pass


@pytest.mark.parametrize("tokens", ["simple", "jwt"])
async def test_s8_a_running_client_logs_in_again_when_users_or_authentication_change(
    tokens: str, tmp_path: Path
) -> None:
    """A running client hung until its token expired, then failed for good, or with an error that it had no user."""
    issued = trustme.CA().issue_cert("localhost")
    issued.private_key_pem.write_to_path(tmp_path / "key")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    how = f",pub-key={tmp_path}/cert,priv-key={tmp_path}/key,sign-method=ES256,ttl=2s" if tokens == "jwt" else ""
    with serve_etcd(options=["--auth-token", tokens + how]) as served:
        ask = served.members[0].ask
        ask("auth/user/add", name="root", password="root")
        ask("auth/role/add", name="root")
        ask("auth/user/grant", user="root", role="root")
        ask("auth/enable")
        async with store.connect(served.url, user="root", password="root", timeout=20) as client:
            lease = await client.grant(60)
            async with client.watch("a") as watch:
                told = aiter(watch)
                for change in (
                    lambda: ask("auth/user/add", as_user="root", name="another", password="secret"),
                    lambda: ask("auth/role/add", as_user="root", name="another"),
                    lambda: ask("auth/disable", as_user="root"),
                    lambda: ask("auth/enable"),
                    lambda: ask("auth/user/delete", as_user="root", name="another"),
                    lambda: time.sleep(3),  # the token has expired by then
                ):
                    await asyncio.to_thread(change)
                    assert await client.put("a", b"1") == (await anext(told)).revision
                    await lease.keep_alive()
                    assert len(await client.wait(["a"])) == 1


async def test_a_full_cluster_says_so_in_one_sentence_and_still_reads_and_deletes_and_a_wiped_one_is_another() -> None:
    with serve_etcd(options=["--quota-backend-bytes", str(600_000)]) as served:
        url = f"{served.url}/job?min_nodes=1&join_timeout=30"
        member = served.members[0]
        async with make_client(served.url) as client, client.watch("a", snapshot=True) as watch:
            await client.put("a", b"1")
            lease = await client.grant(60)
            with pytest.raises(LimitExceeded, match=r"reached its quota \(NOSPACE.*compact and defragment"):
                for number in range(400):  # it looks at its size ten times a second
                    await client.put(f"big/{number}", bytes(100_000))
            with pytest.raises(LimitExceeded, match="NOSPACE"):
                await client.grant(10)
            with pytest.raises(RendezvousError, match="NOSPACE"):
                async with rdzv.connect(url) as handler:
                    await handler.next_rendezvous()
            await lease.keep_alive(note=b"at step 7")  # the member's record is lost, but not its lease
            assert (await client.get("a")) is not None
            assert await client.delete("a") is True
            assert await client.delete_prefix("big/") > 3
            assert [event.kind for event in await read_until(watch, kind="delete")] == ["synced", "put", "delete"]
            # The operator's repair.
            served.compact((await client.stats())["revision"])
            member.ask("maintenance/defragment")
            for alarm in member.ask("maintenance/alarm", action="GET")["alarms"]:
                member.ask("maintenance/alarm", action="DEACTIVATE", **alarm)
            await client.put("a", b"2")
            member.kill()
            member.forget()
            member.start()
            served.wait_until_ready()
            with pytest.raises(StoreReplaced, match="revision"):
                await client.get("a")
            with pytest.raises(StoreReplaced):
                async for _ in watch:
                    pass


async def test_another_cluster_at_the_same_place_is_another_one(etcd: Etcd, at: str) -> None:
    with serve_etcd() as second:
        async with (
            Proxy("127.0.0.1", etcd.members[0].client_port) as proxy,
            make_client(f"etcd://127.0.0.1:{proxy.port}") as client,
        ):
            waiting = asyncio.create_task(client.wait([at + "never"]))
            await client.put(at + "a", b"")
            proxy._target = ("127.0.0.1", second.members[0].client_port)
            proxy.cut()
            with pytest.raises(StoreReplaced, match="has been replaced by"):
                await client.put(at + "a", b"")
            with pytest.raises(StoreReplaced):
                await waiting
            with pytest.raises(ConnectionLost):
                await client.call(Revoke(lease=1))


@pytest.mark.in_ci
async def test_a_use_in_another_event_loop_is_refused(client: Client, at: str) -> None:
    with pytest.raises(StoreUsageError, match="outside the event loop that it was opened in"):
        await asyncio.to_thread(asyncio.run, client.put(f"{at}word", b"v"))
    assert await client.get(f"{at}word") is None
