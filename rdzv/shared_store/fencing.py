"""Adds a round's fence to each request of an operation (promises R9, R10).

The fence is a set of conditions that hold while this node is a member of the round. The server checks the fence
atomically with the request, and ends a pending wait once a condition no longer holds.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from rdzv.config.config_errors import brief
from rdzv.errors import (
    MembersLostError,
    RendezvousConnectionError,
    RendezvousStateError,
    RoundChanged,
    RoundSupersededError,
    SharedStoreTimeoutError,
    mark_run,
)
from store.errors import (
    ConditionFailed,
    ConnectionLost,
    StoreError,
    StoreReplaced,
    StoreTimeoutError,
    UsedAfterFork,
    WaitEndedError,
)
from store.messages import Condition, Entry, Get, Guarded, Request, Response, Transact, TransactionResult, Wait
from store.printable import printable, short_names

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

R = TypeVar("R", bound=Response)

VALUES: Final = "k/"
QUEUES: Final = "q/"  # the prefix of the queues' keys; users do not see it
ANSWER_TIMEOUT: Final = 1.0  # seconds, at least, for a request that does not wait: users' timeouts are limits on waits
NAMED_MAX: Final = 8  # members, or keys, that an error lists


class OutOfTimeError(SharedStoreTimeoutError):
    """No time is left, members were lost, or the round is over; the operation may check keys before it raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipQueries:
    """Functions by which a shared store learns the state of this member and of the others."""

    run_id: str | None = None
    superseded: Callable[[], str | None] = lambda: None  # returns why this node is no longer a member
    lost: Callable[[], tuple[str, ...]] | None = None  # returns the dead members; None: waits continue after a loss
    # Returns a context for a wait for members, given a function that returns the awaited keys in words.
    waiting: Callable[[Callable[[], str]], AbstractContextManager[object]] = nullcontext
    interrupted: Callable[[], object] = lambda: None  # called when a member's loss or the round's end ends a call
    roster: AbsenteeNames | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsenteeNames:
    """Names members missing at a barrier.

    The key `key(rank)` holds names of several members; `read` returns them by rank. `absence(name)` returns
    "lost 41 s ago", or "".
    """

    rank: int
    key: Callable[[int], str]
    read: Callable[[bytes], Mapping[int, str]]
    absence: Callable[[str], str]

    def describe_missing(self, ranks: Sequence[int], names: Mapping[int, str], *, more: int) -> str:
        """Return the end of a sentence, `more` being members not named: "; missing rank 1, node c, lost 41 s ago"."""
        said = []
        for rank in ranks:
            name = names.get(rank, "")
            parts = (f"rank {rank}", name and f"node {printable(name)}", name and self.absence(name))
            said.append(", ".join(filter(None, parts)))
        return f"; missing {'; '.join(said)}{f'; and {more} more' if more > 0 else ''}" if said else ""


@dataclass(slots=True)
class FencedCall:
    """Makes the requests of one operation, with the fence and the time limit."""

    call: Callable[[Request[Any], float], Awaitable[Any]]  # makes a request, with a limit in seconds
    _: KW_ONLY
    prefix: str  # the prefix of all keys of the round's store
    fence: tuple[Condition, ...]
    company: MembershipQueries
    seconds: float  # the limit of all waits of the operation together
    now: Callable[[], float]  # the clock by which `call` waits
    _deadline: float = field(init=False)
    _wait_ended: bool = False  # True if a wait ended early: members were lost, or the round is over

    def __post_init__(self) -> None:
        self._deadline = self.now() + self.seconds

    async def __call__(self, request: Request[R]) -> R:
        """Make one request, on condition that this node is a member.

        Raises:
            RoundSupersededError: This node is not a member any more.
            OutOfTimeError: The time is over, or members are lost and the wait may never end.
            RendezvousConnectionError: The store could not be reached in time.
            RendezvousStateError: The client was made before a `fork()`.
        """
        self.check_membership()
        left = self._deadline - self.now()
        if type(request) is not Wait:
            left = max(left, ANSWER_TIMEOUT)
        elif left <= 0 or self._lost_members():  # the operation catches this error, and reads without a wait
            raise OutOfTimeError("there is no time to wait", timeout=self.seconds)
        try:
            if type(request) is Transact:
                response: R = await self._transact(request, left)
            else:
                response = await self.call(Guarded(self.fence, request) if self.fence else request, left)
            return response
        except StoreError as error:
            explained = self._translate_error(error)
            if explained is error:
                raise
            raise explained from error

    async def _transact(self, request: Transact, left: float) -> Any:
        """Run a transaction with the fence's conditions added; raise ConditionFailed only if the fence fails."""
        reads = tuple(Get(key) for key in dict.fromkeys(condition.key for condition in self.fence))
        fenced = Transact(when=(*self.fence, *request.when), then=request.then, otherwise=(*reads, *request.otherwise))
        result: TransactionResult = await self.call(fenced, left)
        if result.succeeded:
            return result
        seen = {read.key: entry for read, entry in zip(reads, result.results, strict=False)}
        for condition in self.fence:
            entry = seen[condition.key]
            if not condition.holds(entry if isinstance(entry, Entry) else None):
                raise ConditionFailed(
                    f"{condition.target.name.lower()} of {condition.key!r} is no longer {condition.expected!r}"
                )
        return result.replace(results=result.results[len(reads) :])

    def check_membership(self) -> None:
        """Raise `RoundSupersededError` if this node is known to be out of the round."""
        reason = self.company.superseded()
        if reason is not None:
            raise self._superseded_error(reason)

    def raise_timeout_or_loss(self, message: str, *, keys: tuple[str, ...]) -> NoReturn:
        """Raise SharedStoreTimeoutError for missing keys; before the deadline, MembersLostError or RoundChanged."""
        lost, timed_out = self._lost_members(), SharedStoreTimeoutError(message, keys=keys, timeout=self.seconds)
        if not (lost or self._wait_ended) or self.now() >= self._deadline:
            raise timed_out
        self.company.interrupted()
        if not lost:
            over = f"the round is over for this member, and these keys may never come: {names_in_words(keys)}"
            raise mark_run(self.company.run_id, RoundChanged(over)) from timed_out
        why = (
            f"the round has lost {names_in_words(lost)}, and these keys may never come: {names_in_words(keys)}; "
            f"call next_rendezvous to meet again, or write waits_end_on_loss=0 to wait on all the same"
        )
        raise mark_run(self.company.run_id, MembersLostError(why, node_ids=lost)) from timed_out

    def _lost_members(self) -> tuple[str, ...]:
        return self.company.lost() if self.company.lost is not None else ()

    def _superseded_error(self, reason: str) -> RoundSupersededError:
        self.company.interrupted()
        why = f"this node is no longer in the round of {self.prefix}: {reason}; call next_rendezvous again"
        return mark_run(self.company.run_id, RoundSupersededError(why))

    def _translate_error(self, error: StoreError) -> Exception:
        reason = self.company.superseded()
        if reason is not None or isinstance(error, ConditionFailed):
            return self._superseded_error(reason or str(error))
        if isinstance(error, StoreTimeoutError | WaitEndedError):
            self._wait_ended = isinstance(error, WaitEndedError)
            return OutOfTimeError(str(error), timeout=self.seconds)
        if isinstance(error, StoreReplaced):
            return self._superseded_error(str(error))
        if isinstance(error, UsedAfterFork):
            return RendezvousStateError(
                f"the shared store {self.prefix} was made before fork(); use it in the process that joined the round"
            )
        if isinstance(error, ConnectionLost):
            return RendezvousConnectionError(f"the shared store {self.prefix} cannot be reached: {error}")
        text = str(error)  # show the user's key, without the prefix in the store
        for before in (self.prefix + VALUES, self.prefix + QUEUES):
            text = text.replace(before, "")
        error.args = (text, *error.args[1:])
        return error


def names_in_words(names: Sequence[str]) -> str:
    """Return the first `NAMED_MAX` names, in words."""
    return short_names([*map(brief, names[:NAMED_MAX]), *names[NAMED_MAX:]], NAMED_MAX)


def keys_in_words(prefix: str, request: Request[Any]) -> str:
    """Return the keys that a request waits for, as the user named them."""
    wait = request.request if type(request) is Guarded else request
    assert type(wait) is Wait, "nothing else waits"
    names = [key.removeprefix(prefix).partition("/")[2] for key in wait.keys]
    return f"{'key' if len(names) == 1 else 'keys'} {names_in_words(names)}"
