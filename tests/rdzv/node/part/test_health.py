"""A health check passes with None or True; anything else, awaited or not, is a failure with a text."""

from typing import Any

import pytest

from rdzv.node.member.health import run_health_check


@pytest.mark.parametrize("is_waited_for", [False, True])
@pytest.mark.parametrize(
    ("verdict", "failure"),
    [
        (None, None),
        (True, None),
        (False, "failed its health check"),
        (1, "failed its health check"),
        ("", "failed its health check: "),
        ("no GPU", "failed its health check: no GPU"),
        (SystemExit(3), "failed its health check: SystemExit: 3"),
    ],
)
async def test_a_verdict(verdict: Any, failure: str | None, is_waited_for: bool) -> None:
    def check() -> Any:
        if isinstance(verdict, BaseException):
            raise verdict
        return verdict

    async def later() -> Any:
        return check()

    assert await run_health_check(later if is_waited_for else check) == failure
