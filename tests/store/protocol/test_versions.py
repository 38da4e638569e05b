"""Both sides use the highest common version, and ignore additions of later releases (S12)."""

import os
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

import store
from rdzv.testing.network import MemoryNetwork
from store import ProtocolError
from store.messages import FailureKind
from store.protocol import wire
from store.protocol.wire import Events, Hello, Reply, Welcome
from tests.support.by_hand import Town
from tests.support.stores import introduce, serve_in_memory

ROOT = Path(__file__).parents[2]


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


@pytest.mark.parametrize(
    ("theirs", "older"), [((2, 3), "client"), ((7, 9), "client"), ((0, 0), "server")], ids=["next", "later", "older"]
)
def test_without_a_common_version_one_sentence_says_which_side_is_older(
    theirs: tuple[int, int], older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store.protocol.connection import ClientConnection

    monkeypatch.setattr(wire, "VERSION_MIN", theirs[0])
    monkeypatch.setattr(wire, "VERSION", theirs[1])
    greeting = bytes(Town().accept().to_client)
    monkeypatch.undo()
    client = ClientConnection(session_id=bytes(16), token=None, name="tcp://head:29400")
    client.start_connection(nonce=bytes(16))
    with pytest.raises(ProtocolError, match=f"upgrade the {older}"):
        list(client.receive(greeting))


def test_the_highest_common_version_is_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    from store.protocol.connection import ClientConnection

    for server, client, spoken in [((1, 4), (2, 3), 3), ((2, 3), (1, 9), 3), ((1, 1), (1, 2), 1), ((3, 5), (1, 3), 3)]:
        monkeypatch.setattr(wire, "VERSION_MIN", server[0])
        monkeypatch.setattr(wire, "VERSION", server[1])
        greeting = bytes(Town().accept().to_client)
        monkeypatch.setattr(wire, "VERSION_MIN", client[0])
        monkeypatch.setattr(wire, "VERSION", client[1])
        connection = ClientConnection(session_id=bytes(16), token=None, name="the store")
        connection.start_connection(nonce=bytes(16))
        (hello,) = connection.receive(greeting)
        assert isinstance(hello, bytes)
        said = wire.decode_opening(hello[4:], Hello)
        assert isinstance(said, Hello)
        assert said.version == spoken


@pytest.mark.virtual_time
async def test_an_unknown_request_costs_no_connection() -> None:
    network = MemoryNetwork()
    async with serve_in_memory(network):
        peer = await introduce(network)
        strange: list[tuple[object, ...]] = [
            (1, 0, [99]),
            (2, 0, [62, "a", {}]),
            (3, 0, [13, [["a", 9, True]], [2, "a"]]),
            (4, 0, [11, [], [[40, "a"]], []]),
        ]
        for number, fields in enumerate(strange, 1):
            peer.connection.register_request(store.Get("a"), None)  # the method that counts the ids
            body = msgpack.packb(fields)
            peer.transport.write(len(body).to_bytes(4, "big") + body)
            answer = await peer.answer(number)
            assert getattr(answer, "kind", None) is FailureKind.UNSUPPORTED, answer
        (request,) = peer.ask(store.Get("a"))
        assert await peer.answer(request) is not None
        peer.transport.close()


def test_words_that_this_release_does_not_know_say_nothing() -> None:
    decode = wire.decode_server_frame
    assert decode(msgpack.packb((5, [126, [["frozen", 1, "a"], ["delete", 2, "b"]]]))) == Events(
        5, (store.Event(kind="delete", revision=2, key="b"),)
    )
    assert decode(msgpack.packb((5, [126, [["thawed", {}]], "new"]))) == Events(5, ())
    for event in [], 7, [7], None:
        with pytest.raises(ProtocolError, match="stands where an event belongs"):
            decode(msgpack.packb((5, [126, [["thawed", {}], event]])))
    assert decode(msgpack.packb((5, [110, "a push of a later release"]))) == Events(5, ())
    failed = decode(msgpack.packb((1, [77, 99, "because", "new"])))
    assert isinstance(failed, Reply)
    assert getattr(failed.response, "kind", None) is FailureKind.OTHER


def test_an_absent_field_has_its_default() -> None:
    """A release before `lease` was added to `Put` would send this."""
    _, _, request = wire.decode_request(msgpack.packb((1, 0, [1, "a", b"v"])))  # type: ignore[misc]
    assert request == store.Put("a", b"v")


def test_a_store_that_does_not_say_whether_it_is_durable_is_not_given_up() -> None:
    """A release before `durable` was added to `Welcome` would send this."""
    body = msgpack.packb(("rdzv", (1, "10.0.0.1", 7, 1000, b"", {})))
    assert wire.decode_opening(body, Welcome).durable  # type: ignore[union-attr]


PACKING = """
import sys, threading
from store.messages import Put
from store.protocol import wire
sys.setswitchinterval(1e-5)
corrupt = []
def work(letter):
    for _ in range(1000):
        frame = wire.encode_request(7, 0, Put("key", letter * 200))
        try:
            assert wire.decode_request(memoryview(frame)[4:])[2].value == letter * 200
        except Exception as error:
            corrupt.append(error)
threads = [threading.Thread(target=work, args=(bytes([number]),)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not corrupt, f"{len(corrupt)} of 4000 frames"
"""


@pytest.mark.parametrize("pure", ["0", "1"])
def test_frames_of_several_threads_are_whole_with_either_msgpack(pure: str) -> None:
    """One packer of msgpack's pure-Python fallback, shared by threads, mixed their frames up."""
    made = {**environment(ROOT), **({"MSGPACK_PUREPYTHON": "1"} if pure == "1" else {})}
    done = subprocess.run([sys.executable, "-c", PACKING], env=made, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
