"""Shell: one client's requests to an etcd cluster, through the JSON gateway of whichever member answers.

Each attempt has a time limit of its own. One that fails moves this client on to the next member, and there it stays
until that one fails, too. A failure says whether the request may have been carried out: a connection that was refused,
or a member without a leader, has done nothing; an answer that did not come may have been lost on its way back. What to
make of that is for whoever asked.

Every request asks for a member that has a leader (`hasleader`). So one that is cut off from the others says so, where
it would otherwise keep a watch open for ever without a word.

With a user, the first request logs in, and a token that etcd does not take any more is fetched anew.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import random
import ssl
from typing import TYPE_CHECKING, Any

import anyio

from store.errors import (
    AuthenticationError,
    ConnectionLost,
    ProtocolError,
    StoreError,
    StoreReplaced,
    StoreTimeoutError,
    StoreUsageError,
)
from store.etcd.codec import FailureKind, classify
from store.net.dialing import describe

try:
    import aiohttp
except ImportError as error:
    raise ImportError(f"etcd needs aiohttp ({error}); pip install 'rdzv[etcd]'") from error

from store.net.sockets import prepare

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from store.etcd.codec import Cluster, Json

__all__ = ["Failure", "Gateway", "RetryState", "Stream"]

log = logging.getLogger(__name__)

ATTEMPT_FIRST = 1.0  # seconds for the first attempt, if there is another member to ask; each further one has twice ...
ATTEMPT_MOST = 8.0  # ... the time, up to this: etcd itself gives up after 7
ATTEMPT_ALONE = 2.0  # seconds for the first attempt, where there is only one member
PAUSE_FIRST = 0.02  # seconds; the pauses between attempts are up to so long, each up to twice as long as the last ...
PAUSE_MOST = 0.5  # ... up to this
AT_ONCE = 64  # requests under way, those about leases aside; each has a connection of its own meanwhile
IDLE = 5.0  # seconds of silence of a stream after which its member is asked whether it is still there ...
REOPEN = 60.0  # ... and after which the stream is opened again, whatever the member says
TOKENS_MOST = 3  # logins for one request; more of them would not help
BODY_AT_ONCE = 256 * 1024  # bytes of a request that are sent in one go
LINE_BYTES_MAX = 256 * 1024 * 1024  # one message of a watch; etcd's own are below 1.5 MiB per change


class Failure(Exception):
    """An attempt failed; another one may do better.

    Attributes:
        trouble: Whether it may have been carried out, or why it could not be.
        silent: Whether nothing at all came back.
    """

    def __init__(self, reason: str, trouble: FailureKind, *, silent: bool = False) -> None:
        super().__init__(reason)
        self.trouble = trouble
        self.silent = silent


class RetryState:
    """Whether some attempt at a request may have been carried out without our hearing of it."""

    def __init__(self) -> None:
        self.any = False


class Gateway:
    """The members of a cluster.

    Args:
        cluster: Where they are.
        tls: A client-side context for `etcds`; without it the system's certificates are trusted.
        probe: A read that is allowed, and goes through the consensus: to ask whether a member is still there.
        user: Whom to log in as, if anybody.
        password: The user's.
        rng: For the member to begin with, and for the jitter of pauses.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        probe: Json,
        tls: ssl.SSLContext | None = None,
        user: str | None = None,
        password: str | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.name = str(cluster)
        self.cluster_id: str | None = None
        self.revision = 0  # the latest one that was heard of
        self.failed: Callable[[StoreError], None] = lambda _: None  # whom to tell that the cluster was replaced
        self._cluster = cluster
        self._probe = probe
        self._tls = (tls or ssl.create_default_context()) if cluster.secure else None
        self._user, self._password = user, password
        self._rng = rng or random.Random()
        self._here = self._rng.randrange(len(cluster.urls))
        self._failing: set[int] = set()  # members that have not answered since they last failed
        self._problem = "it has never answered"
        self._token: str | None = None
        self._logging_in = asyncio.Lock()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._session: aiohttp.ClientSession | None = None
        self._streams: set[Stream] = set()  # those that are open

    async def start(self) -> None:
        """Be ready to ask; nothing is asked yet."""
        connector = aiohttp.TCPConnector(
            limit=0,  # every watch and every wait has a connection of its own
            ssl=True if self._tls is None else self._tls,
            ttl_dns_cache=10,
            happy_eyeballs_delay=0.25,
        )
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), headers={"Grpc-Metadata-hasleader": "true"}
        )

    async def aclose(self) -> None:
        """Hang up."""
        session, self._session = self._session, None
        for stream in tuple(self._streams):
            stream.close()
        if session is not None:
            await session.close()

    @property
    def here(self) -> tuple[str, int]:
        """The member that is asked now."""
        return self._cluster.hosts[self._here]

    @property
    def connected(self) -> bool:
        """Whether some member has answered since it last failed, or has not been asked."""
        return len(self._failing) < len(self._cluster.urls)

    # ------------------------------------------------------------------------------------------ requests

    async def ask(
        self,
        path: str,
        body: Json | Callable[[], Json],
        *,
        deadline: float = math.inf,
        what: str = "",
        doubt: RetryState | None = None,
        once: bool = False,
    ) -> Json:
        """Ask until a member answers.

        Args:
            path: Below `/v3/`.
            body: What to ask; a function is called before each attempt.
            deadline: Until when, on the loop's clock.
            what: What is asked, for error messages.
            doubt: Noted here is whether an attempt that failed may have been carried out. None: that does not matter.
            once: Not to be asked again after an attempt that may have been carried out.

        Raises:
            Failure: With `COMPACTED` or `LEASE_EXISTS`, which only who asked can judge.
            ConnectionLost: No member could be reached in time.
            StoreTimeoutError: The answer did not come in time.
            StoreError: The request was refused.
        """
        failures = tokens = 0
        while True:
            left = deadline - self._time()
            if left <= 0:
                raise self.late(what or path, doubt)
            here = self._here
            floor = self.revision
            try:
                reply = await self._attempt(here, path, body if isinstance(body, dict) else body(), failures, left)
            except Failure as failure:
                if failure.trouble in (FailureKind.COMPACTED, FailureKind.LEASE_EXISTS):
                    self._answered(here)
                    raise
                tokens += failure.trouble is FailureKind.TOKEN
                self._may_log_in_again(failure, tokens)
                failures += 1
                self.moved_on(here, failure)
                if doubt is not None and failure.trouble is FailureKind.DOUBT:
                    doubt.any = True
                    if once:
                        raise self.late(what or path, doubt) from None
                await self.pause(failures, deadline)
            except StoreError:
                self._answered(here)
                raise
            else:
                self._answered(here)
                self.met(reply["header"], floor=floor if path.startswith("kv/") else 0)
                return reply

    async def _attempt(self, here: int, path: str, body: Json, failures: int, left: float) -> Json:
        limit = min(self.attempt_limit(failures), left)
        token = await self._logged_in(here, limit)
        if path.startswith("lease/"):  # what must be renewed in time does not stand in line
            reply = await self._post(here, path, body, token, limit)
        else:
            async with self._room:
                reply = await self._post(here, path, body, token, limit)
        # Renewing a lease is a stream in gRPC, of which this is the one message.
        return self._message(reply) if "result" in reply or "header" not in reply else reply

    def attempt_limit(self, failures: int) -> float:
        """Return seconds for the next attempt, after so many that failed."""
        first = ATTEMPT_FIRST if len(self._cluster.urls) > 1 else ATTEMPT_ALONE
        return min(first * 2.0 ** min(failures // 2, 8), ATTEMPT_MOST)

    async def _post(self, here: int, path: str, body: Json, token: str | None, limit: float) -> Json:
        """Make one request to one member, and return its answer."""
        try:
            with anyio.fail_after(limit):
                async with self._open(here, path, [body], token) as response:
                    content = await response.read()
                    status = response.status
        except (aiohttp.ClientError, OSError) as error:
            raise self._explained(error, limit) from error
        return self._understood(here, status, content)

    def _open(self, here: int, path: str, bodies: list[Json], token: str | None) -> Any:
        if self._session is None:
            raise ConnectionLost(f"the client of {self.name} is closed", maybe_applied=False)
        data = "".join(json.dumps(body, separators=(",", ":")) for body in bodies).encode()
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = token
        # A large body is sent in pieces, so that others get a turn meanwhile.
        content = io.BytesIO(data) if len(data) > BODY_AT_ONCE else data
        return self._session.post(self._cluster.urls[here] + path, data=content, headers=headers)

    def _explained(self, error: Exception, limit: float) -> Exception:
        """Return the error for an attempt that brought no answer."""
        match error:
            case aiohttp.ClientConnectorCertificateError():
                words = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
                return AuthenticationError(f"{self.name} has no certificate that we trust: {words}")
            case aiohttp.ClientConnectorError():
                return Failure(describe(error.os_error), FailureKind.UNDONE)
            case aiohttp.ClientResponseError():  # whose own words quote what came, at any length
                return Failure("it does not answer in HTTP; to a store of ours write tcp://", FailureKind.DOUBT)
            case TimeoutError():
                return Failure(f"it has not answered within {limit:.1f} s", FailureKind.DOUBT, silent=True)
            case aiohttp.ServerDisconnectedError() | ConnectionResetError():
                never_met = self.cluster_id is None and not self._cluster.secure
                hint = " without a word, as one that speaks TLS would: perhaps it is etcds://" if never_met else ""
                return Failure(f"it closed the connection{hint}", FailureKind.DOUBT)
            case aiohttp.ClientOSError() if isinstance(error.__cause__ or error, ssl.SSLError):
                return Failure(describe(error.__cause__ or error), FailureKind.UNDONE)  # it did not let us in
            case aiohttp.ClientError() | OSError():
                return Failure(describe(error), FailureKind.DOUBT)
        return error

    def _understood(self, here: int, status: int, content: bytes) -> Json:
        """An answer, read."""
        where = self._cluster.urls[here]
        try:
            reply = json.loads(content)
        except ValueError:
            if b"HTTP request to an HTTPS server" in content:
                raise ProtocolError(f"{where} speaks TLS; write etcds://") from None
            if status in (404, 405, 501):
                raise ProtocolError(
                    f"{where} is not the gateway of an etcd v3 cluster; etcd 3.4 or later is needed"
                ) from None
            if status >= 500:  # a proxy in between, whose back is gone
                raise Failure(f"it answered with status {status}", FailureKind.DOUBT) from None
            raise ProtocolError(f"{where} answered with status {status} and no JSON; it is no etcd") from None
        if status != 200:
            self._refuse(reply)
        if not isinstance(reply, dict):
            raise ProtocolError(f"{where} answered with {type(reply).__name__}; it is no etcd")
        return reply

    def _refuse(self, reply: Any) -> None:
        problem = reply.get("error", reply) if isinstance(reply, dict) else reply
        if not isinstance(problem, dict):
            problem = {**reply, "message": reply.get("message", problem)} if isinstance(reply, dict) else {}
        code = int(problem.get("grpc_code", problem.get("code", 0)))
        message = str(problem.get("message", problem))
        verdict = classify(code, message, name=self.name)
        if isinstance(verdict, FailureKind):
            raise Failure(message, verdict)
        raise verdict

    def _message(self, line: Json) -> Json:
        """Return the message in one line of a stream."""
        if "result" not in line:
            self._refuse(line)
        result: Json = line["result"]
        return result

    async def current_revision(self, deadline: float) -> int:
        """The revision the store is at, as the consensus knows it."""
        reply = await self.ask("kv/range", self._probe, deadline=deadline, what="a question")
        return int(reply["header"]["revision"])

    async def look(self, here: int) -> None:
        """Ask one member whether it is still there, and still one of the cluster.

        Raises:
            Failure: It is not.
        """
        floor = self.revision
        reply = await self._attempt(here, "kv/range", self._probe, 0, math.inf)
        self._answered(here)
        self.met(reply["header"], floor=floor)

    # ------------------------------------------------------------------------------------------ streams

    async def stream(self, requests: list[Json], *, deadline: float = math.inf, what: str = "") -> Stream:
        """Open watches that share one stream, at a member that answers.

        Raises:
            Failure: With `COMPACTED`: what one of them asks for is no longer kept.
            StoreError: As `ask`.
        """
        failures = tokens = 0
        while True:
            left = deadline - self._time()
            if left <= 0:
                raise self.late(what, None)
            here = self._here
            limit = min(self.attempt_limit(failures), left)
            stream = Stream(self, here)
            try:
                await stream.open(requests, limit)
            except BaseException as error:
                stream.close()
                if not isinstance(error, Failure) or error.trouble is FailureKind.COMPACTED:
                    raise
                tokens += error.trouble is FailureKind.TOKEN
                self._may_log_in_again(error, tokens)
                failures += 1
                self.moved_on(here, error)
                await self.pause(failures, deadline)
            else:
                self._answered(here)
                return stream

    # ------------------------------------------------------------------------------------------ members

    def moved_on(self, here: int, failure: Failure) -> None:
        """A member has failed; ask the next one, unless somebody has moved on already."""
        if not (failure.silent and here in self._failing):  # a reason that was given says more than a silence
            self._problem = str(failure)
        if failure.trouble is FailureKind.TOKEN:
            return
        log.debug("etcd at %s: %s", self._cluster.urls[here], failure)
        self._failing.add(here)
        if self._here == here:
            self._here = (here + 1) % len(self._cluster.urls)

    def _answered(self, here: int) -> None:
        self._failing.discard(here)
        if not self._failing:
            self._problem = ""

    async def pause(self, failures: int, deadline: float) -> None:
        """Before another attempt: hardly any while there are members that were not asked yet."""
        others = max(failures - len(self._cluster.urls) + 1, 0)
        longest = min(PAUSE_FIRST * 2.0 ** min(others, 16), PAUSE_MOST)
        await anyio.sleep(min(self._rng.uniform(0, longest), max(deadline - self._time(), 0)))

    def what_is_wrong(self) -> str:
        """Why no member has answered, as far as it is known."""
        return self._problem

    def late(self, what: str, doubt: RetryState | None) -> StoreError:
        """The error for a caller whose time is over."""
        maybe = doubt is not None and doubt.any
        problem = f": {self._problem}" if self._problem else ""
        message = f"{what} at {self.name} was not answered in time{problem}"
        if self.connected:
            return StoreTimeoutError(message, maybe_applied=maybe)
        return ConnectionLost(message, maybe_applied=maybe)

    def met(self, header: Json, *, floor: int = 0) -> None:
        """A member has answered: it must be one of the cluster that we know (promise S10).

        A cluster whose data was deleted keeps its id, which is made from its addresses. But its revisions begin anew:
        what is read or written through the consensus is never older than what we had heard of before we asked.

        Args:
            header: Of its answer.
            floor: The latest revision that was known before it was asked, if the answer went through the consensus.
        """
        cluster_id = f"{int(header.get('cluster_id', 0)):x}"
        revision = int(header.get("revision", 0))
        reason = ""
        if self.cluster_id is not None and cluster_id != self.cluster_id:
            reason = f"{self.cluster_id} has been replaced by {cluster_id}"
        elif revision < floor:
            reason = f"it is at revision {revision}, and was at {floor} before"
        if reason:
            error = StoreReplaced(
                f"the cluster at {self.name} is not the one this client knew: {reason}, so what was in it is gone"
            )
            self.failed(error)
            raise error
        self.cluster_id = cluster_id
        self.revision = max(self.revision, revision)

    def _time(self) -> float:
        return asyncio.get_running_loop().time()

    # ------------------------------------------------------------------------------------------ who we are

    async def _logged_in(self, here: int, limit: float) -> str | None:
        """Return the token to show, fetched if need be; None if nobody needs to log in."""
        if self._user is None or self._token is not None:
            return self._token or None
        async with self._logging_in:
            if self._token is None:
                self._token = await self._log_in(here, limit)
            return self._token or None

    async def _log_in(self, here: int, limit: float) -> str:
        try:
            reply = await self._post(
                here, "auth/authenticate", {"name": self._user, "password": self._password or ""}, None, limit
            )
        except Failure as failure:
            if failure.trouble is not FailureKind.NO_AUTHENTICATION:
                # What was to be asked has not been sent.
                raise Failure(str(failure), FailureKind.UNDONE, silent=failure.silent) from failure
            log.warning("%s does not ask who we are: the user %r is not needed there", self.name, self._user)
            return ""
        except StoreUsageError as error:
            raise AuthenticationError(str(error)) from None
        return str(reply["token"])

    def _may_log_in_again(self, failure: Failure, tokens: int) -> None:
        if failure.trouble is not FailureKind.TOKEN:
            return
        if self._user is None or tokens > TOKENS_MOST:
            raise AuthenticationError(f"{self.name} does not let user {self._user!r} do that: {failure}")
        self._token = None


class Stream:
    """Watches that share one answer without an end."""

    def __init__(self, gateway: Gateway, here: int) -> None:
        self._gateway = gateway
        self._here = here
        self._response: aiohttp.ClientResponse | None = None
        self._held = bytearray()
        self._early: list[Json] = []  # what came while it was being opened

    async def open(self, requests: list[Json], limit: float) -> Self:
        """Open it, and wait until the member has opened every watch."""
        gateway = self._gateway
        token = await gateway._logged_in(self._here, limit)
        try:
            with anyio.fail_after(limit):
                self._response = await gateway._open(self._here, "watch", requests, token)
                gateway._streams.add(self)
                if self._response.status != 200:
                    content = await self._response.read()
                    gateway._understood(self._here, self._response.status, content)
                connection = self._response.connection
                transport = connection.transport if connection is not None else None
                sock = transport.get_extra_info("socket") if transport is not None else None
                if sock is not None:
                    prepare(sock)
                opened = 0
                while opened < len(requests):
                    for message in await self._read():
                        if message.get("created"):
                            opened += 1
                        else:
                            self._early.append(message)
        except (aiohttp.ClientError, OSError) as error:
            raise gateway._explained(error, limit) from error
        return self

    async def read(self) -> list[Json] | None:
        """Return the next messages, none if there were only half ones; None if it is time to open it anew.

        A peer that has gone without a word is noticed: if nothing comes for a while, its member is asked.

        Raises:
            Failure: It is over; with `COMPACTED`, because what was asked for is no longer kept.
        """
        if self._early:
            early, self._early = self._early, []
            return early
        silence = 0.0
        while silence < REOPEN:
            try:
                with anyio.fail_after(IDLE):
                    return await self._read()
            except TimeoutError:
                silence += IDLE
            except (aiohttp.ClientError, OSError) as error:
                raise Failure(describe(error), FailureKind.UNDONE) from error
            await self._gateway.look(self._here)
        return None

    async def _read(self) -> list[Json]:
        if self._response is None:
            raise Failure("it is closed", FailureKind.UNDONE)
        data = await self._response.content.readany()
        if not data:
            raise Failure("it ended the watch", FailureKind.UNDONE)
        looked_at = len(self._held)
        self._held += data
        if len(self._held) > LINE_BYTES_MAX:
            raise ProtocolError(f"{self._gateway.name} sent a message of more than {LINE_BYTES_MAX} bytes")
        end = self._held.rfind(b"\n", looked_at)
        if end < 0:
            return []
        lines = bytes(self._held[:end])
        del self._held[: end + 1]
        return [self._understood(line) for line in lines.split(b"\n") if line]

    def _understood(self, line: bytes) -> Json:
        gateway = self._gateway
        try:
            message = gateway._message(json.loads(line))
        except ValueError as error:
            raise ProtocolError(f"{gateway.name} sent a message that is no JSON: {error}") from None
        gateway.met(message["header"])
        if not message.get("canceled"):
            return message
        if "compact_revision" in message:
            raise Failure("what the watch asked for is no longer kept", FailureKind.COMPACTED)
        reason = str(message.get("cancel_reason", "it ended the watch"))
        verdict = classify(0, reason, name=gateway.name)
        if isinstance(verdict, AuthenticationError) and gateway._user is not None:
            raise Failure(reason, FailureKind.TOKEN)  # etcd says the same of a token that is too old
        if isinstance(verdict, FailureKind):
            raise Failure(reason, FailureKind.UNDONE)
        raise verdict

    async def failed(self, failure: Failure) -> None:
        """It has ended; the next one is opened elsewhere, after a moment, lest one that always ends keeps us busy."""
        self._gateway.moved_on(self._here, failure)
        await self._gateway.pause(2, math.inf)

    def close(self) -> None:
        """End it, at the member, too."""
        response, self._response = self._response, None
        self._gateway._streams.discard(self)
        if response is not None:
            response.close()
