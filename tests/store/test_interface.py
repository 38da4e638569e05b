"""The named calls, beyond the tests of `test_conformance` on each kind of store: the arguments of every one of them."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from store import when
from store.errors import StoreError, StoreUsageError
from store.interface import BlockingLease, BlockingStore, BlockingWatch, Lease, Store, Watch
from store.messages import Guarded, Request

CALLS: dict[str, tuple[Any, ...]] = {
    "put": ("a", b"1"),
    "get": ("a",),
    "get_many": (["a"],),
    "list": ("a",),
    "count": ("a",),
    "delete": ("a",),
    "delete_prefix": ("a",),
    "compare_and_set": ("a", b"2"),
    "add": ("a", 2),
    "append": ("a", b"2"),
    "transact": (),
    "wait": (["a"],),
    "grant": (3.0,),
    "ping": (),
    "stats": (),
    "groups": (),
    "notes": ("a",),
}
GUARDED = ("put", "delete", "delete_prefix", "compare_and_set", "add", "append", "wait")


class Fake(Store):
    """A store that records its requests, and refuses them."""

    asked: Any = None
    timeout: float | None = None

    async def call(self, request: Request[Any], *, timeout: float | None = None) -> NoReturn:
        self.asked, self.timeout = request, timeout
        raise StoreError("enough")

    def watch(self, prefix: str, *, start_revision: int | None = None, snapshot: bool = False) -> Watch:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError

    def time(self) -> float:
        return 0.0


async def asked(name: str, **keywords: Any) -> Fake:
    fake = Fake()
    if name == "compare_and_set":
        keywords["expected_revision"] = 0
    with contextlib.suppress(StoreError):
        await getattr(fake, name)(*CALLS[name], **keywords)
    return fake


@pytest.mark.parametrize("name", CALLS)
async def test_every_call_has_a_timeout(name: str) -> None:
    assert (await asked(name, timeout=7.0)).timeout == 7.0
    assert (await asked(name)).timeout is None


@pytest.mark.parametrize("name", GUARDED)
async def test_a_write_or_a_wait_can_be_guarded(name: str) -> None:
    conditions = (when.exists("x"),)
    assert (await asked(name, when=list(conditions))).asked == Guarded(conditions, (await asked(name)).asked)


async def test_one_string_is_not_taken_for_several_keys() -> None:
    fake = Fake()
    for call in (fake.wait, fake.get_many):
        with pytest.raises(StoreUsageError):
            await call("key")
    assert fake.asked is None


def named_calls(kind: type) -> dict[str, Callable[..., Any]]:
    return {
        name: method
        for name, method in inspect.getmembers(kind, callable)
        if not name.startswith("_")
        and name not in ("aclose", "close", "end_waits", "interrupt", "register")  # async callers cancel a task instead
        # a blocking caller is in a call, and gets its error there
        and name not in ("cap_retry_pauses", "check_usable", "fail", "on_connection_change", "notify_connection_change")
    }


@pytest.mark.parametrize(
    ("awaited", "blocking"), [(Store, BlockingStore), (Lease, BlockingLease), (Watch, BlockingWatch)]
)
def test_the_twins_have_the_same_names_and_arguments(awaited: type, blocking: type) -> None:
    one, other = named_calls(awaited), named_calls(blocking)
    assert one.keys() == other.keys()
    for name in one:
        assert inspect.signature(one[name]).parameters == inspect.signature(other[name]).parameters, (
            f"{name} differs between the twins"
        )
