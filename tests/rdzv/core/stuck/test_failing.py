"""When a node has failed too often."""

from __future__ import annotations

from rdzv.core.stuck.failing import FailureRule


def test_a_node_is_banned_once_it_has_failed_as_often_as_the_rule_says_and_it_is_said_why() -> None:
    rule = FailureRule(3, 3600.0)
    assert rule.verdict(2, "its process ended") == ""
    assert rule.verdict(3, "its process ended") == "3 failures, the last: its process ended"
    assert rule.verdict(4, "") == "4 failures, the last: it was lost", "nobody knows why"
    assert FailureRule(1, 60.0).verdict(1, "rank 0 exited with status 1").startswith("1 failure, the last: rank 0")
