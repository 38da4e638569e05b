"""Shell: attempts of a blocking caller to connect, step by step: TCP, TLS, and the server's first word.

It waits for two things at once: its own next step, and word on an older connection beside which it is made, if there is
one. A connection that is only slow is so kept until another one has proved to be quicker.
"""

from __future__ import annotations

import enum
import select
import ssl
import time
from typing import TYPE_CHECKING

from store.client.attempts import Attempts
from store.net.dialing import describe
from store.net.racing import STAGGER, Race
from store.net.sockets import prepare

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from store.client.patience import Patience
    from store.net.racing import Addresses, Resolved

__all__ = ["Connecting", "Stage", "greeted", "poll_until"]

CHECK_EVERY = 0.5  # seconds; how late a caller that looks for its store may notice that it is to end
FIRST_BYTES = 4096  # of what the server says first; a greeting has less than a hundred


class Stage(enum.IntEnum):
    """How far an attempt has come."""

    TRYING = 0
    TAKEN = 1  # the other side's system has answered
    SECURED = 2  # TLS is agreed on, if there is any
    SPOKEN = 3  # the server has said something


class Connecting:
    """One connection in the making; close it unless its socket is taken.

    Args:
        addresses: Where to connect to.
        tls: The client's context, if TLS is spoken there.
        order: The addresses in the order to be tried in, if they are not to be looked up.
    """

    def __init__(
        self, addresses: Addresses, tls: ssl.SSLContext | None, order: Iterable[Resolved] | None = None
    ) -> None:
        self._host = addresses.host
        self._tls = tls
        self._race = Race(addresses, addresses.resolve() if order is None else order)
        self.began: float = time.monotonic()
        self._next_at = self.began
        self._sock: socket.socket | None = None
        self._wanted = select.POLLIN
        self.stage: Stage = Stage.TRYING
        self.first_word: bytes = b""

    def wants(self, waiting: select.poll, until: float) -> float:
        """Have the socket looked at that it waits for; when it is to go on without, which is `until` at the latest."""
        if self._sock is not None:
            waiting.register(self._sock, self._wanted)
            return until
        now = time.monotonic()
        if self._race.more and now >= self._next_at:
            self._race.begin_next()
            self._next_at = now + STAGGER
        for sock in self._race.connecting:
            waiting.register(sock, select.POLLOUT)
        return min(until, self._next_at) if self._race.more else until

    def go_on(self, until: float, *, to: Stage, beside: socket.socket | None = None) -> bool:
        """Go on to a stage; False if `time.monotonic()` came to `until` first, or word came on `beside`.

        Raises:
            OSError: It has failed.
        """
        while self.stage < to:
            waiting = select.poll()
            if beside is not None:
                waiting.register(beside, select.POLLIN)
            ready = poll_until(waiting, self.wants(waiting, until))
            if beside is not None and beside.fileno() in ready:
                return False
            self.step(ready, to)
            if not ready and time.monotonic() >= until:
                return False
        return True

    def take(self) -> socket.socket:
        """Give the socket to the caller, who closes it from now on."""
        assert self._sock is not None, "it has been taken by the other side"
        sock, self._sock = self._sock, None
        self._race.close()
        return sock

    def close(self) -> None:
        """Give it up; what was given to the caller stays the caller's."""
        self._race.close()
        if self._sock is not None:
            self._sock.close()

    def step(self, ready: set[int], to: Stage) -> None:
        """Go on as far as these sockets allow, that can be read or written to.

        Raises:
            OSError: It has failed.
        """
        if self._sock is None:
            self._look_who_won(ready)
        elif self._sock.fileno() in ready:
            self._converse(to)

    def _look_who_won(self, ready: set[int]) -> None:
        for sock in [sock for sock in self._race.connecting if sock.fileno() in ready]:
            if self._race.won(sock):
                self._sock = sock
                prepare(sock)
                self.stage = Stage.TAKEN if self._tls is not None else Stage.SECURED
                if self._tls is not None:
                    self._sock = self._tls.wrap_socket(sock, server_hostname=self._host, do_handshake_on_connect=False)
                    self._wanted = select.POLLOUT  # ours is the first word of the handshake
                return
            self._next_at = 0.0  # its turn is over

    def _converse(self, to: Stage) -> None:
        """Take a step of the handshake, or hear what the server says."""
        assert self._sock is not None, "there is somebody to converse with"
        try:
            if self.stage is Stage.TAKEN:
                assert isinstance(self._sock, ssl.SSLSocket), "only TLS has a handshake"
                self._sock.do_handshake()
                self.stage, self._wanted = Stage.SECURED, select.POLLIN
            if self.stage < to:
                self.first_word = self._sock.recv(FIRST_BYTES)
                if not self.first_word:
                    raise ConnectionResetError("it closed the connection before it said a word")
                self.stage = Stage.SPOKEN
        except ssl.SSLWantWriteError:
            self._wanted = select.POLLOUT
        except (ssl.SSLWantReadError, BlockingIOError):
            self._wanted = select.POLLIN


def poll_until(waiting: select.poll, until: float) -> set[int]:
    """Wait until then for one of these sockets; which of them are ready."""
    return {number for number, _ in waiting.poll(max(until - time.monotonic(), 0.0) * 1000 + 1)}


def greeted(
    addresses: Addresses,
    tls: ssl.SSLContext | None,
    patience: Patience,
    *,
    until: float,
    check: Callable[[], None],
    on_problem: Callable[[str], None],
    beside: socket.socket | None = None,
) -> Connecting | None:
    """Connect until a server speaks; the connection on which it did, None once it is time: as `greeted_link` awaits.

    Args:
        addresses: Where to connect to.
        tls: The client's context, if TLS is spoken there.
        patience: How long to wait for what.
        until: When to give up, on `time.monotonic()`.
        check: Called every now and then; what it raises ends this.
        on_problem: Told of each attempt that has failed, in words.
        beside: An older connection; word on it ends this, too.
    """
    attempts, going = Attempts(patience), dict[int, Connecting]()
    order = None if beside is None else addresses.resolved()

    def fail(number: int, error: OSError) -> None:
        on_problem(describe(error))
        attempts.has_failed(number, time.monotonic())
        if number in going:
            going.pop(number).close()

    try:
        while (now := time.monotonic()) < until:
            check()
            move = attempts.look(now)
            for number in move.give_up:
                if going[number].stage is Stage.TRYING:
                    on_problem(describe(TimeoutError()))
                going.pop(number).close()
            waiting, wake_at = select.poll(), min(move.until, until, now + CHECK_EVERY)
            if beside is not None:
                waiting.register(beside, select.POLLIN)
            if move.begin is not None:
                addresses.use_small_packets(move.small_packets)
                try:
                    going[move.begin] = Connecting(addresses, tls, order)
                except OSError as error:  # its name is not known now
                    fail(move.begin, error)
            for number, one in list(going.items()):
                try:
                    wake_at = one.wants(waiting, wake_at)
                except OSError as error:
                    fail(number, error)
            ready = poll_until(waiting, wake_at)
            if beside is not None and beside.fileno() in ready:
                return None
            for number, one in list(going.items()):
                try:
                    one.step(ready, Stage.SPOKEN)
                except OSError as error:
                    fail(number, error)
                    continue
                if one.stage is not Stage.TRYING and attempts.was_taken(number):
                    patience.connected(time.monotonic() - one.began)
                if one.stage is Stage.SPOKEN:
                    return going.pop(number)
        return None
    finally:
        for one in going.values():
            one.close()
