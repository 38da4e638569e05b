"""The access rules of HTTP: the token if there is one, only this machine's names on loopback, and no other site."""

import base64

import pytest

from rdzv.http.access_rules import AccessRules

TOKEN = "correct horse battery staple"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
BASIC = {"Authorization": "Basic " + base64.b64encode(f"me:{TOKEN}".encode()).decode()}
LOCAL = {"Host": "127.0.0.1:29401"}


def status(door: AccessRules, method: str, path: str, *headers: dict[str, str]) -> int | None:
    """Return the status of the refusal; None if the request is accepted."""
    merged: dict[str, str] = {}
    for each in headers:
        merged |= each
    refusal = door.find_refusal(method, path, merged)
    return None if refusal is None else refusal.status


WITH_TOKEN = AccessRules(token=TOKEN.encode(), loopback=False)
LOOPBACK = AccessRules(token=None, loopback=True)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_needs_no_token(path: str) -> None:
    assert status(WITH_TOKEN, "GET", path) is None


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/runs", "/api/events"])
def test_all_other_paths_need_the_token_if_there_is_one(path: str) -> None:
    assert status(WITH_TOKEN, "GET", path) == 401
    assert status(WITH_TOKEN, "GET", path, {"Authorization": "Bearer wrong"}) == 401
    assert status(WITH_TOKEN, "GET", path, {"Authorization": "Basic no base64"}) == 401
    assert status(WITH_TOKEN, "GET", path, {"Authorization": "Digest"}) == 401
    assert status(WITH_TOKEN, "GET", path, BEARER) is None
    assert status(WITH_TOKEN, "GET", path, BASIC) is None


def test_requests_that_change_something_are_refused() -> None:
    for door in (WITH_TOKEN, LOOPBACK):
        assert status(door, "POST", "/api/runs/job/close", LOCAL, BEARER) == 405


@pytest.mark.parametrize("secret", ["Bearer \udcff\udcfe", "Basic \udcff", "Basic ÿ", "Bearer ÿ"])
def test_bytes_that_are_no_text_are_a_wrong_token(secret: str) -> None:
    assert status(WITH_TOKEN, "GET", "/metrics", {"Authorization": secret}) == 401


def test_on_loopback_a_foreign_name_for_this_machine_is_refused() -> None:
    for host in ("localhost:29401", "127.0.0.1", "127.8.8.8:1", "[::1]:29401"):
        assert status(LOOPBACK, "GET", "/api/runs", {"Host": host}) is None
    for host in ("evil.example:29401", "10.0.0.1", "", "localhost.evil.example", "[::1", "a@b:x"):
        assert status(LOOPBACK, "GET", "/api/runs", {"Host": host}) == 421
        assert status(LOOPBACK, "GET", "/healthz", {"Host": host}) == 421
