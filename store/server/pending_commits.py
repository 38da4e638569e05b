"""The changes that are not on disk yet, and the replies that must wait for them (promise S3).

Keep-alives, and reads of keys whose changes are on disk, are answered even while the disk hangs. A reply never names a
later revision than the one on disk.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from store.messages import Count, Counted, Failed, Get, GetMany, Guarded, KeepAlive, List, Listing, Ping, Pong

if TYPE_CHECKING:
    from collections.abc import Iterable

    from store.engine.changeset import ChangeSet
    from store.messages import Request, Response

PREFIX_LOOKS_MAX = 1024  # a listing compares its prefix with up to this many changed keys; if more, it awaits the disk
SMALL_STEP_BYTES = 32 * 1024  # a larger step keeps the loop and the disk busy for milliseconds


class PendingCommits:
    """The changes that wait for the disk, and their bytes."""

    def __init__(self, *, durable: int, revision: int) -> None:
        self.durable: int = durable  # the number of the last step on disk
        self.revision: int = revision  # the store's revision after the last step on disk
        self.appended: int = durable  # the number of the last step in the journal
        self.bytes: int = 0
        self._steps: OrderedDict[int, tuple[int, int, ChangeSet]] = OrderedDict()  # by step: bytes, revision, changes
        self._last_revision = revision
        self._changed: dict[str | int, int] = {}  # by key or lease: the last pending step that changed it
        self._last_small = self._last_large = durable  # numbers of steps
        self._passing = durable  # large requests wait until this step, a small one, is on disk

    @property
    def lets_small_steps_pass(self) -> bool:
        """True while small steps that the last group left pending are not on disk; large requests wait for them."""
        return self._passing > self.durable

    def append(self, number: int, facts: ChangeSet) -> None:
        """Note a step that was handed to the journal."""
        if facts.revisions:
            self._last_revision = facts.revisions[-1][0].revision
        size = facts.size
        self.appended = number
        self.bytes += size
        self._steps[number] = size, self._last_revision, facts
        self._changed.update(dict.fromkeys(_changed_keys(facts), number))
        if size > SMALL_STEP_BYTES:
            self._last_large = number
        else:
            self._last_small = number

    def note_written(self, number: int) -> None:
        """Note that the steps up to this number are on disk."""
        self.durable = number
        while self._steps and next(iter(self._steps)) <= number:
            _, (size, self.revision, facts) = self._steps.popitem(last=False)
            self.bytes -= size
            for what in _changed_keys(facts):
                if self._changed.get(what, number + 1) <= number:  # no later step has changed it
                    del self._changed[what]
        if self._last_large > self._passing:  # small steps pass once for each large step, so that neither kind starves
            self._passing = self._last_small

    def step_to_wait_for(self, request: Request[Any], response: Response) -> tuple[int, Response]:
        """Return the number of the step that must be on disk before the reply, and the reply as it is true then."""
        if self.appended <= self.durable:
            return self.durable, response
        number = self.appended if isinstance(response, Failed) else self._last_step_in_reply(request)
        if isinstance(response, Listing | Counted | Pong):
            # Lower the reply's revision to the one after step `number`: no key in the reply has changed since.
            on_disk_by_then = self.revision if number <= self.durable else self._steps[number][1]
            if response.revision > on_disk_by_then:
                response = response.replace(revision=on_disk_by_then)
        return number, response

    def _last_step_in_reply(self, request: Request[Any]) -> int:
        """Return the number of the last step whose changes the reply may show."""
        match request:
            case Guarded(when=when, request=guarded):
                return max(self._last_step_in_reply(guarded), self._last_step_of(condition.key for condition in when))
            case Get(key=key):
                return self._changed.get(key, 0)
            case GetMany(keys=keys):
                return self._last_step_of(keys)
            case List(prefix=prefix) | Count(prefix=prefix) if len(self._changed) <= PREFIX_LOOKS_MAX:
                return self._last_step_of(
                    key for key in self._changed if isinstance(key, str) and key.startswith(prefix)
                )
            case KeepAlive(lease=lease):
                return self._changed.get(lease, 0)
            case Ping():
                return 0
        return self.appended

    def _last_step_of(self, keys: Iterable[str]) -> int:
        return max((self._changed.get(key, 0) for key in keys), default=0)


def _changed_keys(facts: ChangeSet) -> list[str | int]:
    return [event.key for events in facts.revisions for event in events] + [*facts.leases]
