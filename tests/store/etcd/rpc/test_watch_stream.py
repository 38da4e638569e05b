"""All watches of a client over one stream: which watch gets a message, which has fallen behind, and how watches end."""

import asyncio
from typing import Any

import pytest

from store.errors import AuthenticationError
from store.etcd.codec import Failure, FailureKind, range_of
from store.etcd.rpc import etcd_pb2 as pb
from store.etcd.rpc import watch_stream
from store.etcd.rpc.watch_stream import WatchStream


def stream(*, token: str | None = None) -> WatchStream:
    return WatchStream(name="the cluster", token=token)


def created(id: int) -> pb.WatchResponse:
    return pb.WatchResponse(watch_id=id, created=True)


def event(id: int, value: bytes = b"") -> pb.WatchResponse:
    return pb.WatchResponse(watch_id=id, events=[pb.Event(kv=pb.KeyValue(key=b"key", value=value))])


def canceled(id: int, reason: str = "", **more: Any) -> pb.WatchResponse:
    return pb.WatchResponse(watch_id=id, canceled=True, cancel_reason=reason, **more)


def sent(watches: WatchStream) -> list[tuple[str, int]]:
    """Return the requests to the member since the last call."""
    asked = []
    queue = watches._queue
    while not queue.empty():
        request = queue.get_nowait()
        if request is None:
            break  # it has ended
        kind = request.WhichOneof("request_union")
        asked.append((kind.removesuffix("_request"), getattr(request, kind).watch_id))
    return asked


async def test_each_reader_gets_its_own_events_and_a_closed_watch_is_cancelled_at_the_member() -> None:
    watches = stream()
    one, two = watches.subscribe([range_of("a")]), watches.subscribe([range_of("b"), range_of("c")])
    assert watches.subscriptions
    assert sent(watches) == [("create", 1), ("create", 2), ("create", 3)]
    opening = asyncio.ensure_future(two.wait_until_open())
    for id in (1, 2):
        watches.dispatch(created(id))
    await asyncio.sleep(0)
    assert not opening.done(), "one of its two watches is still to be opened"
    watches.dispatch(created(3))
    await opening
    for message in (event(3), event(1, b"1"), event(2)):
        watches.dispatch(message)
    assert [message.watch_id for message in await two.read()] == [3, 2]
    assert (await one.read())[0].events[0].kv.value == b"1"
    two.close()
    two.close()
    assert sent(watches) == [("cancel", 2), ("cancel", 3)]
    watches.dispatch(event(2))  # it was on its way
    one.close()


async def test_a_watch_that_is_refused_at_once_bears_no_number_and_is_the_first_that_was_not_answered() -> None:
    watches = stream()
    one, two = watches.subscribe([range_of("a")]), watches.subscribe([range_of("b")])
    watches.dispatch(created(1))
    watches.dispatch(canceled(-1, created=True, compact_revision=9))
    await one.wait_until_open()
    with pytest.raises(Failure) as caught:
        await two.wait_until_open()
    assert caught.value.trouble is FailureKind.COMPACTED


DENIED = "rpc error: code = PermissionDenied desc = etcdserver: permission denied"


@pytest.mark.parametrize(
    ("reason", "logged_in", "kind"),
    [
        ("", False, FailureKind.UNDONE),
        ("etcdserver: no leader", False, FailureKind.UNDONE),
        ("etcdserver: invalid auth token", True, FailureKind.TOKEN),
        (DENIED, True, FailureKind.TOKEN),
        (DENIED, False, None),
    ],
)
async def test_the_members_reason_for_ending_a_watch_decides_the_reaction(
    reason: str, logged_in: bool, kind: FailureKind | None
) -> None:
    watches = stream(token="t" if logged_in else None)
    reader = watches.subscribe([range_of("a"), range_of("b")])
    sent(watches)
    watches.dispatch(canceled(1, reason))
    assert sent(watches) == [("cancel", 2)], "what is read with it ends with it"
    with pytest.raises((Failure, AuthenticationError)) as caught:
        await reader.read()
    assert getattr(caught.value, "trouble", None) is kind


async def test_a_reader_that_falls_behind_loses_its_watch_after_the_held_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_stream, "HELD_BYTES_MAX", 1000)
    watches = stream()
    slow, large = watches.subscribe([range_of("a")]), watches.subscribe([range_of("b")])
    sent(watches)
    for _ in range(4):
        watches.dispatch(event(1, b"a" * 400))
    assert sent(watches) == [("cancel", 1)]
    assert len(await slow.read()) == 2
    with pytest.raises(Failure, match="fallen behind") as caught:
        await slow.read()
    assert caught.value.trouble is FailureKind.REOPEN
    watches.dispatch(event(2, b"b" * 5000))
    assert len(await large.read()) == 1, "one message is held, however large"


async def test_the_end_of_the_stream_reaches_all_readers_and_later_ones_with_the_first_reason() -> None:
    watches = stream()
    reader = watches.subscribe([range_of("a")])
    watches.dispatch(event(1))
    watches.end(Failure("first", FailureKind.UNDONE))
    watches.end(Failure("second", FailureKind.UNDONE))
    sent(watches)
    assert len(await reader.read()) == 1, "what came before is read"
    for late in (reader, watches.subscribe([range_of("b")])):
        with pytest.raises(Failure, match="first"):
            await late.read()
        late.close()
    assert sent(watches) == [], "nobody would hear it"
    assert not watches.subscriptions
