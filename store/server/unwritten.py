"""Pure: what has been done and is not on disk yet, and so which replies must wait for the disk (promise S3).

A reply that reflects nothing of it need not wait: a keep-alive, or a read of keys that have not changed since, goes out
at once also while the disk hangs. A reply never says a later revision than the disk has when it goes out.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from store.messages import Count, Counted, Failed, Get, GetMany, Guarded, KeepAlive, List, Listing, Ping, Pong

if TYPE_CHECKING:
    from collections.abc import Iterable

    from store.engine.changeset import Facts
    from store.messages import Request, Response

__all__ = ["Unwritten"]

PREFIX_LOOKS_MAX = 1024  # changed keys that are compared with a prefix; with more of them, whoever lists waits


class Unwritten:
    """What awaits the disk.

    Attributes:
        durable: Up to which number of the journal all is on disk.
        appended: The number of the last step handed to the journal.
        bytes: What the steps between take.
        revision: The last revision that is on disk.
    """

    def __init__(self, *, durable: int, revision: int) -> None:
        self.durable: int = durable
        self.appended: int = durable
        self.revision: int = revision
        self.bytes: int = 0
        self._steps: OrderedDict[int, tuple[int, int, Facts]] = OrderedDict()  # bytes, revision after it, what it was
        self._last_revision = revision
        self._changed: dict[str | int, int] = {}  # the step that last changed a key, or made or ended a lease

    def append(self, number: int, facts: Facts) -> None:
        """A step was handed to the journal under this number."""
        if facts.revisions:
            self._last_revision = facts.revisions[-1][0].revision
        size = facts.size
        self.appended = number
        self.bytes += size
        self._steps[number] = size, self._last_revision, facts
        self._changed.update(dict.fromkeys(_what_changed(facts), number))

    def written(self, number: int) -> None:
        """Everything up to this number is on disk."""
        self.durable = number
        while self._steps and next(iter(self._steps)) <= number:
            _, (size, self.revision, facts) = self._steps.popitem(last=False)
            self.bytes -= size
            for what in _what_changed(facts):
                if self._changed.get(what, number + 1) <= number:  # what changed again is of a later step
                    del self._changed[what]

    def wait_for(self, request: Request[Any], response: Response) -> tuple[int, Response]:
        """Up to which number all must be on disk before this may be said, and what to say."""
        if self.appended <= self.durable:
            return self.durable, response
        number = self.appended if isinstance(response, Failed) else self._number_of(request)
        if isinstance(response, Listing | Counted | Pong):
            # What it says was so at the revision after that step, too: nothing that it says has changed since. The
            # listing of many keys may be of an earlier revision, which it keeps.
            on_disk_by_then = self.revision if number <= self.durable else self._steps[number][1]
            if response.revision > on_disk_by_then:
                response = response.replace(revision=on_disk_by_then)
        return number, response

    def _number_of(self, request: Request[Any]) -> int:
        """The last step that the reply to this request may reflect."""
        match request:
            case Guarded(when=when, request=guarded):
                return max(self._number_of(guarded), self._last_of(condition.key for condition in when))
            case Get(key=key):
                return self._changed.get(key, 0)
            case GetMany(keys=keys):
                return self._last_of(keys)
            case List(prefix=prefix) | Count(prefix=prefix) if len(self._changed) <= PREFIX_LOOKS_MAX:
                return self._last_of(key for key in self._changed if isinstance(key, str) and key.startswith(prefix))
            case KeepAlive(lease=lease):
                return self._changed.get(lease, 0)
            case Ping():
                return 0
        return self.appended

    def _last_of(self, keys: Iterable[str]) -> int:
        return max((self._changed.get(key, 0) for key in keys), default=0)


def _what_changed(facts: Facts) -> list[str | int]:
    """The keys and the leases of a step; those are text, and these are numbers."""
    return [event.key for events in facts.revisions for event in events] + [*facts.leases]
