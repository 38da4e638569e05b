"""Logins of a client of etcd: one login for all waiting calls; the password is read again, the token is forgotten."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from store.errors import AuthenticationError, StoreUsageError
from store.etcd.codec import Failure, FailureKind
from store.etcd.login import TOKENS_MOST, Login
from store.etcd.rpc import etcd_pb2 as pb

if TYPE_CHECKING:
    from store.etcd.rpc.connection import Connection

REFUSED = AuthenticationError("refused the user or the password")
OLD = Failure("etcdserver: invalid auth token", FailureKind.TOKEN)
SWITCHED_OFF = Failure("authentication is not enabled", FailureKind.NO_AUTHENTICATION)


class Member:
    """Answers logins by a script, and repeats the last answer."""

    def __init__(self, *answers: str | Exception) -> None:
        self._answers = list(answers)
        self.passwords: list[str] = []

    async def ask(self, _: str, fields: dict[str, str], **__: Any) -> Any:
        """Stands in for a connection's `ask`."""
        self.passwords.append(fields["password"])
        await asyncio.sleep(0)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return pb.AuthenticateResponse(token=answer)


class SilentMember(Member):
    """Answers no login."""

    async def ask(self, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(3600)


async def token(login: Login, member: Member) -> str | None:
    return await login.token(cast("Connection", member), 2.0)


async def test_one_login_serves_all_callers_until_its_token_is_refused() -> None:
    login, member = Login("etcd", "me", "secret"), Member("first", "second")
    assert await asyncio.gather(*(token(login, member) for _ in range(5))) == ["first"] * 5
    login.forget_rejected_token(Failure("no leader", FailureKind.UNDONE), "first", 1)
    assert await token(login, member) == "first"
    for _ in range(5):
        login.forget_rejected_token(OLD, "first", 1)
        assert await token(login, member) == "second", "it is not fetched again for each of those who showed the first"
    assert member.passwords == ["secret"] * 2


@pytest.mark.virtual_time
async def test_a_caller_waits_for_the_login_of_another_no_longer_than_its_own_limit() -> None:
    """Regression: a lock's timeout did not bound it."""
    login, member = Login("etcd", "me", "secret"), SilentMember()
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(login.token(cast("Connection", member), 8.0))
    await asyncio.sleep(0)
    began = loop.time()
    with pytest.raises(Failure, match="a login is not answered") as caught:
        await login.token(cast("Connection", member), 1.0)
    assert loop.time() - began <= 1.1
    assert caught.value.trouble is FailureKind.UNDONE
    with pytest.raises(Failure):
        await first


async def test_a_token_that_is_always_refused_is_no_matter_of_tokens() -> None:
    login, member = Login("etcd", "me", "secret"), Member("first", "second")
    assert await token(login, member) == "first"
    login.forget_rejected_token(OLD, "another", TOKENS_MOST)
    with pytest.raises(AuthenticationError):
        login.forget_rejected_token(OLD, "first", TOKENS_MOST + 1)
    assert await token(login, member) == "second", "who asks again begins anew"


async def test_a_client_without_a_user_does_not_log_in_and_gets_an_error_if_one_is_required() -> None:
    member = Member("t")
    assert await token(Login("etcd", None, None), member) is None
    assert member.passwords == []
    with pytest.raises(AuthenticationError, match="user="):
        Login("etcd", None, None).forget_rejected_token(OLD, None, 1)


async def test_an_unneeded_user_is_warned_once_and_logs_in_when_authentication_is_switched_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    login, member = Login("etcd", "me", "secret"), Member(SWITCHED_OFF, "t")
    assert [await token(login, member) for _ in range(2)] == [None, None]
    assert caplog.text.count("'me'") == 1
    login.forget_rejected_token(Failure("user name is empty", FailureKind.TOKEN), None, 1)
    assert await token(login, member) == "t"


async def test_a_password_that_was_changed_where_it_is_kept_is_read_again_once_it_is_refused() -> None:
    passwords = iter(["old", "new"])
    member = Member(REFUSED, "t")
    assert await token(Login("etcd", "me", lambda: next(passwords)), member) == "t"
    assert member.passwords == ["old", "new"]
    for password in ("same", None, lambda: "same"):
        member = Member(REFUSED)
        with pytest.raises(AuthenticationError):
            await token(Login("etcd", "me", password), member)
        assert len(member.passwords) == 1, "it has not changed"


async def test_a_failed_login_says_that_the_request_was_not_sent() -> None:
    login = Login("etcd", "me", "secret")
    with pytest.raises(Failure) as caught:
        await token(login, Member(Failure("lost", FailureKind.DOUBT, silent=True)))
    assert (caught.value.trouble, caught.value.silent) == (FailureKind.UNDONE, True)
    with pytest.raises(AuthenticationError):
        await token(login, Member(StoreUsageError("the name is too long")))
