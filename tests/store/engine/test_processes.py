"""The processes that count as dead, given the ends of their connections."""

from store.engine.processes import DisconnectKind, Processes


def test_processes_without_a_lease_or_an_id_are_not_judged() -> None:
    processes = Processes()
    for peer, id in ((1, b"b" * 16), (8, b"a" * 16), (9, b"")):
        processes.note_connected(peer, id, previous=None)
    processes.note_lease_holder(1, 1)
    processes.note_lease_holder(9, 77)
    for peer in (8, 9):
        assert processes.note_disconnect(peer, DisconnectKind.DROPPED, now=0.0) is None
    assert len(processes._by_id) == 1
