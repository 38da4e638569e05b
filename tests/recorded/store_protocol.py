"""Frames and messages as bytes, and both ends of a connection; frames in which a byte is another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from store import errors, messages
from store.protocol import connection, element_budget, frames, wire
from store.protocol.connection import ClientConnection, ServerConnection
from tests.recorded import store_engine
from tests.recorded.tables import evaluated, sections, text
from tests.support.limits import limits_with

TABLES = sections(__file__)
SMALL = {"CHUNK_BYTES": 8, "STEP_BYTES": 60, "PACKER_BYTES": 90}


def run(generator: Iterator[Any]) -> list[Any]:
    """Return what a generator yields, and its result or its error."""
    said: list[Any] = []
    try:
        while True:
            item = next(generator)
            said.append(bytes(item) if isinstance(item, memoryview) else item)
    except StopIteration as end:
        return said if end.value is None else [*said, end.value]
    except Exception as error:  # noqa: BLE001 - it is recorded
        return [*said, error]


def meet(server: ServerConnection, client: ClientConnection, **welcome: Any) -> list[Any]:
    """Return what both ends say up to the welcome."""
    client.start_connection(nonce=b"c" * 16)
    said = run(client.receive(server.encode_greeting()))
    for hello in [each for each in said if isinstance(each, bytes)]:
        heard = run(server.receive(hello))
        said += heard
        if any(isinstance(each, wire.Hello) for each in heard):
            fields = {"session": 1, "address": "10.0.0.1", "revision": 5, **welcome}
            said += run(client.receive(server.encode_welcome(**fields)))
    return said


def _server(**given: Any) -> ServerConnection:
    told: dict[str, Any] = {name: given.pop(name) for name in ("token", "store_id") if name in given}
    options: dict[str, Any] = {"store_id": "store", "nonce": b"n" * 16, "token": None, **told}
    return connection.ServerConnection(**options, limits=limits_with(**{"operations_max": 2, **given}))


def _client(**given: Any) -> ClientConnection:
    return connection.ClientConnection(**{"session_id": b"s" * 16, "token": None, "name": "tcp://here", **given})


NAMES: dict[str, Any] = {**vars(messages), **vars(wire), **vars(connection), **vars(errors), **vars(frames)}
NAMES |= {"run": run, "meet": meet, "server": _server, "client": _client}


class Waiter(list[Any]):
    """A future that notes what it is given."""

    set_exception = set_result = list.append

    def done(self) -> bool:
        """Return True if it has an outcome."""
        return bool(self)

    def cancel(self) -> None:
        """Stop a timer."""
        self.append("cancelled")


def rows() -> list[str]:
    """Return the table's rows."""
    names = {**store_engine.NAMES, **NAMES, "Waiter": Waiter}
    small: Any = SMALL
    with mock.patch.multiple(wire, **small), mock.patch.object(element_budget, "COUNTED_AT_ONCE", 4):
        return list(evaluated(TABLES["rows"], names))


def requests() -> list[str]:
    """Return each request of the engine's tables as a frame, and if it is read as it was; and with a low limit."""
    lines = []
    for request in [each for line in store_engine.TABLES["requests"].splitlines() for each in store_engine.read(line)]:
        try:
            frame = wire.encode_request(7, 3, request, bytes_max=99)
            lines.append(f"{text(frame)} {wire.decode_request(frame[4:])[2:] == (request,)}")
        except errors.StoreError as error:
            lines.append(f"{text(request)} -> {text(error)}")
    return lines


def damaged() -> list[str]:
    """Return what is read of frames in which one byte is another, or is missing."""
    lines = []
    decoders: dict[str, Any] = {"request": wire.decode_request, "answer": wire.decode_server_frame}
    for row in TABLES["damaged"].splitlines():
        body = eval(row, {**store_engine.NAMES, **NAMES})[4:]
        for at in range(len(body)):
            read: dict[str, list[str]] = {}
            for new in (b"", b"\0", b"\x90", b"\xa0", b"\xff"):
                for name, decode in decoders.items():
                    try:
                        told = text(decode(body[:at] + new + body[at + 1 :]))
                    except errors.ProtocolError as error:
                        told = str(error).partition("not msgpack")[0] and text(error)
                    if told:
                        read.setdefault(told, []).append(f"{name[0]}{new.hex()}")
            lines.append(f"{row} {at}: " + "; ".join(f"{' '.join(those)} {told[:30]}" for told, those in read.items()))
    return lines


RECORDINGS = {"rows": rows, "requests": requests, "damaged": damaged}
