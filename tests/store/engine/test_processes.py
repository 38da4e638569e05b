"""The processes that count as dead, given the ends of their connections."""

from store.engine.processes import AT_ONCE, DisconnectKind, Processes

A, B, C, D = (bytes([letter]) * 16 for letter in b"ABCD")


def holding(processes: Processes, id: bytes, *peers: int) -> None:
    """A process with these connections, and a lease with the number of the first connection."""
    for peer in peers:
        processes.note_connected(peer, id, previous=None)
    processes.note_lease_holder(peers[0], peers[0])


def several(*ids: bytes) -> Processes:
    """Processes with one connection each: 1, 2 and so on."""
    made = Processes()
    for number, id in enumerate(ids, 1):
        holding(made, id, number)
    return made


def dead(
    processes: Processes, peer: int, how: DisconnectKind = DisconnectKind.DROPPED, *, now: float = 0.0
) -> list[bytes]:
    process = processes.note_disconnect(peer, how, now=now)
    return [] if process is None else [process.id]


def test_one_that_says_goodbye_last_or_whose_connection_was_cut_is_not() -> None:
    processes = several(A, B, C, D)
    assert dead(processes, 1, DisconnectKind.GOODBYE) == []
    assert dead(processes, 2, DisconnectKind.CUT) == []
    assert dead(processes, 3) == [C]


def test_a_connection_in_the_place_of_another_makes_the_end_of_that_no_news() -> None:
    processes = several(A, B, C)
    processes.note_connected(9, A, previous=1)
    assert dead(processes, 1) == []
    assert dead(processes, 9) == [A]


def test_processes_without_a_lease_or_an_id_are_not_judged() -> None:
    processes = several(B)
    processes.note_connected(8, A, previous=None)
    processes.note_connected(9, b"", previous=None)
    processes.note_lease_holder(9, 77)
    assert dead(processes, 8) == dead(processes, 9) == []
    assert len(processes._by_id) == 1


def test_more_than_half_of_a_few_are_many_and_a_single_one_never_is() -> None:
    processes = several(A, B, C)
    first = processes.note_disconnect(1, DisconnectKind.DROPPED, now=0.0)
    assert first is not None
    assert (first.id, first.died_at) == (A, 0.0)
    assert dead(processes, 2, now=AT_ONCE / 2) == []
    assert first.died_at is None
    assert dead(several(A), 1) == [A]
    four = several(A, B, C, D)
    assert [dead(four, 1), dead(four, 2)] == [[A], [B]]  # half


def test_a_lease_belongs_to_the_process_that_kept_it_last() -> None:
    processes = several(A, B, C, D)
    processes.note_lease_holder(2, 1)
    process = processes.note_disconnect(2, DisconnectKind.DROPPED, now=0.0)
    assert process is not None
    assert process.leases == {1, 2}
    assert dead(processes, 1, now=1.0) == []


def test_nothing_stays_of_a_process_without_connections_and_leases() -> None:
    processes = several(A, B)
    processes.note_disconnect(1, DisconnectKind.DROPPED, now=0.0)
    assert len(processes._by_id) == 2
    processes.note_lease_released(1)
    processes.note_lease_released(1)
    assert len(processes._by_id) == 1
    processes.note_lease_released(2)
    processes.note_disconnect(2, DisconnectKind.DROPPED, now=0.0)
    assert len(processes._by_id) == 0
    processes.note_disconnect(2, DisconnectKind.DROPPED, now=0.0)
