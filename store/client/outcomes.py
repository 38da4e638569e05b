"""Pure: the outcome of a request: its response or an error, which says if the request may have been applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.errors import AuthenticationError, ConnectionLost, ProtocolError, StoreError, StoreTimeoutError, unsent

if TYPE_CHECKING:
    from store.messages import Response
    from store.protocol.connection import InFlight

__all__ = ["out_of_time", "settle", "with_doubt"]


def settle(item: InFlight, outcome: Response | StoreError) -> None:
    """Give a waiting caller its response or its error."""
    if item.timer is not None:
        item.timer.cancel()
    future = item.waiter
    if future is None or future.done():
        return
    if isinstance(outcome, StoreError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def with_doubt(error: StoreError, item: InFlight) -> StoreError:
    """Return the error for one caller of a lost connection."""
    mine = unsent(error)
    if isinstance(error, ConnectionLost | ProtocolError | AuthenticationError):
        mine.maybe_applied = item.mutates and item.sent
    return mine


def out_of_time(item: InFlight, timeout: float, name: str, trouble: str | None) -> StoreError:
    """Return the error for a caller whose timeout is over; `trouble` of the connection, if any."""
    what = f"{type(item.request).__name__} at {name}"
    maybe = item.mutates and item.sent
    if trouble is None:
        return StoreTimeoutError(f"no answer to {what} within {timeout:g} s", maybe_applied=maybe)
    return ConnectionLost(f"{what} was not answered within {timeout:g} s: {trouble}", maybe_applied=maybe)
