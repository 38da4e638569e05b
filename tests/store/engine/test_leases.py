"""Leases expire when their time is over, on a clock that does not count time in which the server itself stood still."""

from store.engine.changeset import SavedLease
from store.engine.leases import STALL_AFTER, UNTIDY, LeaseRecord, Leases
from store.engine.processes import DisconnectKind


def at(now: float = 0.0) -> Leases:
    leases = Leases()
    leases.advance_clock(now)
    return leases


def let_pass(leases: Leases, seconds: float, *, now: float = 0.0) -> float:
    """Let time pass in steps so small that the clock sees no stall."""
    until = now + seconds
    while now < until:
        now = min(now + STALL_AFTER / 2, until)
        leases.advance_clock(now)
    return now


def close(leases: Leases, peer: int) -> None:
    """Report that a peer closed its connection, and do all the work that follows."""
    for _ in leases.shorten_after_close(peer, DisconnectKind.DROPPED):
        pass


def grant(leases: Leases, ttl: float, *, peer: int | None, disconnect_ttl: float | None = None) -> LeaseRecord:
    return leases.grant(SavedLease(id=leases.next_id(), ttl=ttl, disconnect_ttl=disconnect_ttl), peer=peer)


def ids(leases: list[LeaseRecord]) -> list[int]:
    return [lease.id for lease in leases]


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    leases = at(100.0)
    lease = grant(leases, 1.0, peer=7)
    leases.advance_clock(50.0)
    assert leases.remaining(lease) == 1.0


def test_the_next_due_time_is_known_or_there_is_none() -> None:
    leases = at()
    assert leases.seconds_to_next_expiry() is None
    grant(leases, 3.0, peer=7)
    grant(leases, 1.0, peer=7)
    assert leases.seconds_to_next_expiry() == 1.0
    let_pass(leases, 2.0)
    assert leases.seconds_to_next_expiry() == 0


def test_leases_that_are_renewed_in_time_are_never_looked_at_as_due() -> None:
    """Regression: each renewal left an entry with its own due time: of 10,000 members one was checked every ms."""
    leases = at()
    members = []
    now = 0.0
    for _ in range(50):
        members.append(grant(leases, 3.0, peer=7))
        now = let_pass(leases, 0.02, now=now)
    for _ in range(20):
        now = let_pass(leases, 1.0, now=now)
        for lease in members:
            leases.keep_alive(lease, peer=7)
        due_in = leases.seconds_to_next_expiry()
        assert due_in is not None
        assert due_in >= 0.1
    let_pass(leases, 3.0, now=now)
    assert leases.seconds_to_next_expiry() == 0
    assert len(leases.expired()) == 50


def test_restored_leases_have_their_full_ttl_and_no_keeper_until_one_renews_them() -> None:
    """S5: after a restart `disconnect_ttl` is off until a lease's first keep-alive."""
    leases = at(1000.0)
    leases.restore(
        [
            SavedLease(id=3, ttl=10.0, disconnect_ttl=1.0, anonymous=False),
            SavedLease(id=5, ttl=2.0, disconnect_ttl=None, anonymous=True),
        ],
        last=7,
    )
    first, second = leases.get_if_live(3), leases.get_if_live(5)
    assert first is not None
    assert second is not None
    assert (leases.remaining(first), leases.remaining(second), second.terms.anonymous) == (10.0, 2.0, True)
    close(leases, 1)
    assert leases.remaining(first) == 10.0
    leases.keep_alive(first, peer=1)
    close(leases, 1)
    assert leases.remaining(first) == 1.0
    assert grant(leases, 1.0, peer=1).id == 8
    let_pass(leases, 2.0, now=1000.0)
    assert ids(leases.expired()) == [3, 8, 5]


def test_waiting_for_the_next_due_time_always_gets_there() -> None:
    """Sums of floats differ by less than a clock shows: at the time 1000 s, a wait of 1e-16 s does not advance it."""
    now = 1000.0
    leases = at(now)
    grant(leases, 1.0, peer=7)
    for _ in range(100):
        due_in = leases.seconds_to_next_expiry()
        assert due_in is not None
        now += min(due_in, 0.1)
        leases.advance_clock(now)
    assert leases.seconds_to_next_expiry() == 0
    assert now < 1001.001


def test_leases_that_come_and_go_do_not_fill_memory() -> None:
    leases = at()
    for _ in range(10 * UNTIDY):
        leases.remove_empty_lease(grant(leases, 86_400.0, peer=7))
    assert len(leases._order) <= UNTIDY


def test_connections_that_come_and_go_do_not_fill_memory() -> None:
    leases = at()
    lease = grant(leases, 86_400.0, disconnect_ttl=60.0, peer=0)
    for peer in range(10 * UNTIDY):
        close(leases, peer)
        leases.keep_alive(lease, peer=peer + 1)
    assert len(leases._order) <= UNTIDY + 2
    let_pass(leases, 120.0)
    assert leases.expired() == []  # the older, earlier due times do not count
