"""Pure: stands between a plan and whoever drives it; every request is fenced here (promises R9, R10).

    plan  >  request  >  steps: add the fence, work out the time left  >  (request, timeout)  >  driver
    plan  <  response  <  steps: a broken fence becomes RoundSupersededError  <  response or StoreError  <  driver

The fence is a set of conditions that hold for as long as this node is a member of the round. The server checks it in
the same moment as it does what is asked, and ends a parked wait with a push once the fence breaks.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from rdzv.config.config_errors import shown
from rdzv.errors import MembersLostError, RendezvousConnectionError, RoundSupersededError, SharedStoreTimeoutError
from store.errors import ConditionFailed, ConnectionLost, StoreError, StoreTimeoutError, WaitEnded
from store.messages import Condition, Entry, Get, Guarded, Request, Response, Transact, TransactionResult, Wait

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NAMED_MAX", "QUEUES", "VALUES", "Fencing", "OutOfTime", "Plan", "Step", "nobody"]

T = TypeVar("T")
Plan: TypeAlias = Generator[Request[Any], Any, T]
Step: TypeAlias = tuple[Request[Any], float]
"""A fenced request, and how many seconds its answer may take."""

VALUES: Final = "k/"
QUEUES: Final = "q/"
"""Under which a round's store keeps them; the user knows nothing of it."""

ANSWER_TIMEOUT: Final = 1.0
"""In seconds. Timeouts are for waiting: what the store answers at once has at least this long to be answered."""

NAMED_MAX: Final = 8
"""How many missing keys an error spells out; its `keys` holds all of them."""


def nobody() -> tuple[str, ...]:
    """No member is known to have died."""
    return ()


class OutOfTime(Exception):
    """The time is over; thrown into a plan, which may still look around before it gives up."""

    def __init__(self, seconds: float, reason: str) -> None:
        super().__init__(reason)
        self.seconds = seconds


class Fencing:
    """Carries plans through for one member of a round.

    Args:
        prefix: What all keys of the round's store begin with.
        fence: What holds for as long as this node is a member of the round.
        superseded: Why this node is known here to be no member any more; None as long as it may be one.
        lost: Which members are known to have died since the round completed, if waits end because of that.
    """

    def __init__(
        self,
        *,
        prefix: str,
        fence: tuple[Condition, ...],
        superseded: Callable[[], str | None],
        lost: Callable[[], tuple[str, ...]] = nobody,
    ) -> None:
        self._prefix = prefix
        self._fence = fence
        self._fence_reads = tuple(Get(key) for key in dict.fromkeys(condition.key for condition in fence))
        self._superseded = superseded
        self._lost = lost

    def steps(self, plan: Plan[T], *, seconds: float, now: Callable[[], float]) -> Generator[Step, Response, T]:
        """Carry a plan through; whoever drives this sends it each response, or throws the `StoreError`.

        Args:
            plan: What to carry through.
            seconds: How long its waits may take, all together.
            now: The driver's clock.

        Raises:
            RoundSupersededError: This node is not a member of the round any more.
            MembersLostError: What it waits for is not there, and members are gone who might have given it.
            SharedStoreTimeoutError: The time is over.
            RendezvousConnectionError: The store could not be reached in time.
        """
        deadline = now() + seconds
        left = seconds
        response: Any = None
        late: OutOfTime | None = None
        try:
            while True:
                request = plan.send(response) if late is None else plan.throw(late)
                self.check_membership()
                if type(request) is not Wait:
                    left = max(left, ANSWER_TIMEOUT)
                late = None
                if left <= 0:
                    late = OutOfTime(seconds, "the time is over")
                    continue
                if type(request) is Wait and self._lost():
                    late = OutOfTime(seconds, "members were lost")  # the plan looks whether it need wait at all
                    continue
                try:
                    response = yield self._fenced(request), left
                    if type(response) is TransactionResult:
                        response = self._judged(request, response)
                except StoreError as error:
                    late = self._explained(error, seconds)
                left = deadline - now()
        except StopIteration as done:
            result: T = done.value
            return result
        except OutOfTime as error:
            raise SharedStoreTimeoutError(str(error), timeout=seconds) from error
        except SharedStoreTimeoutError as error:
            if deadline > now() and (lost := self._lost()):
                raise _lost_error(lost, error) from error
            raise

    def check_membership(self) -> None:
        """Raise `RoundSupersededError` if it is known here that this node is no member any more."""
        reason = self._superseded()
        if reason is not None:
            raise self.superseded_error(reason)

    def superseded_error(self, reason: str) -> RoundSupersededError:
        """Return the error that says so, and what to do."""
        return RoundSupersededError(
            f"this node is no longer in the round of {self._prefix}: {reason}; call next_rendezvous again"
        )

    def _fenced(self, request: Request[Any]) -> Request[Any]:
        """Return the request, conditional on the fence; a transaction that fails reads what the fence looks at."""
        if type(request) is Transact:
            return Transact(
                when=(*self._fence, *request.when),
                then=request.then,
                otherwise=(*self._fence_reads, *request.otherwise),
            )
        return Guarded(self._fence, request) if self._fence else request

    def _judged(self, request: Request[Any], response: TransactionResult) -> TransactionResult:
        """Return the response as the plan expects it: if a transaction has failed, it was not because of the fence."""
        if response.succeeded:
            return response
        assert isinstance(request, Transact), "a transaction's result answers a transaction"
        reads = len(self._fence_reads)
        seen = dict(zip((read.key for read in self._fence_reads), response.results[:reads], strict=True))
        for condition in self._fence:
            entry = seen[condition.key]
            if not condition.holds(entry if isinstance(entry, Entry) else None):
                raise ConditionFailed(
                    f"{condition.target.name.lower()} of {condition.key!r} is no longer {condition.expected!r}"
                )
        return TransactionResult(succeeded=False, results=response.results[reads:], revision=response.revision)

    def _explained(self, error: StoreError, seconds: float) -> OutOfTime:
        """Return the error that a plan may handle; raise all others."""
        if isinstance(error, ConditionFailed):
            raise self.superseded_error(self._superseded() or str(error)) from error
        reason = self._superseded()
        if reason is not None:  # and so the handler has interrupted the client, of which this error tells
            raise self.superseded_error(reason) from error
        if isinstance(error, StoreTimeoutError):
            return OutOfTime(seconds, str(error))
        if isinstance(error, WaitEnded):
            return OutOfTime(seconds, str(error))
        if isinstance(error, ConnectionLost):
            raise RendezvousConnectionError(f"the shared store {self._prefix} cannot be reached: {error}") from error
        self._name_the_users_key(error)
        raise error

    def _name_the_users_key(self, error: StoreError) -> None:
        """Have an error of the store name the key that the user wrote, not the one under which it is kept."""
        text = str(error)
        for before in (self._prefix + VALUES, self._prefix + QUEUES):
            text = text.replace(before, "")
        if text != str(error):
            error.args = (text, *error.args[1:])


def _lost_error(lost: tuple[str, ...], missing: SharedStoreTimeoutError) -> MembersLostError:
    named = ", ".join(map(shown, lost[:NAMED_MAX]))
    more = f" and {len(lost) - NAMED_MAX} more" if len(lost) > NAMED_MAX else ""
    keys = ", ".join(map(shown, missing.keys[:NAMED_MAX]))
    return MembersLostError(
        f"the round has lost {named}{more}, and what this node waited for may never come: {keys or missing}; "
        f"call next_rendezvous to meet again, or write waits_end_on_loss=0 to wait on all the same",
        node_ids=lost,
    )
