"""Write the bytes of this release, which every later release of the same major number must read, and read them.

    python -m tools.golden tests/golden/0.1.0

`frames` has one message of the wire per line of hex, `records.json` the run's records in the store, and `store` a
durable store. The release script calls this; a test reads every such directory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import store.sync
from rdzv.core.history import Chapter, History, Incident, pack_history
from rdzv.core.round import Member, Participant, Round
from rdzv.core.state import Ban, Closed, NodeRecord, Phase, Progress, pack_settings, unpack_settings
from store import when
from store.messages import (
    CompareAndSet,
    DeletedOlder,
    DeleteOlder,
    Entry,
    Event,
    Found,
    Grant,
    Granted,
    Guarded,
    Listing,
    Put,
    Transact,
    Written,
)
from store.protocol import wire
from store.protocol.wire import Bye, Events, Reply

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["read", "write"]

LEASE_TTL: Final = 86_400.0
ENTRY: Final = Entry(key="a", value=b"1", create_revision=1, mod_revision=2, lease=3)
REQUESTS: Final = (
    Put("a", b"1", ttl=1.5),
    CompareAndSet(key="a", value=b"2", expected_revision=7),
    Grant(ttl=10.0, disconnect_ttl=1.0),
    Transact(when=(when.exists("a"),), then=(Put("b", b"2", lease=3),), otherwise=()),
    Guarded(when=(when.mod_revision("a") == 2,), request=Put("a", b"3")),
    DeleteOlder(prefix="a", after="a/1", revision=9),
)
RESPONSES: Final = (
    Written(revision=4),
    Found(entry=ENTRY),
    Listing(entries=(ENTRY, None), revision=5),
    Granted(lease=3, ttl=10.0),
    DeletedOlder(count=2, revision=9, after="a/3"),
)
EVENTS: Final = (
    Event(kind="put", revision=2, key="a", value=b"1", create_revision=1, lease=3),
    Event(kind="delete", revision=2, key="b"),
)

RECORDS: Final[dict[str, tuple[bytes, Callable[[bytes], object], object]]] = {}
"""By name: the bytes, the function that reads them, and the expected result."""


def _record(name: str, packed: bytes, unpack: Callable[[bytes], object], value: object) -> None:
    RECORDS[name] = packed, unpack, value


_NODE: Final = NodeRecord(node_id="a", incarnation="x", address="h", port=1, payload={"gpus": 8}, release="0.1.0")
_ROUND: Final = Round(number=3, term=5, size=2, buckets=1, host="h", port=29500, lease=4)
_PROGRESS: Final = Progress(phase=Phase.LAST_CALL, joined=2)
_CLOSED: Final = Closed(reason="done", by="a")
_HISTORY: Final = History(
    chapters=(
        Chapter(
            number=0,
            size=1,
            node_ids=("a",),
            joined=1,
            joined_ids=("a",),
            incidents=(Incident(kind="lost", after=1.5, count=1, node_ids=("a",)),),
        ),
    )
)
_MEMBERS: Final = [Member(node_id="a", rank=0, arrival=9)]
_ROSTER: Final = [Participant(node_id="a", rank=0, address="h", payload=7)]
_SETTINGS: Final = {"min_nodes": 2, "max_nodes": 4}
_BAN: Final = Ban(reason="slow disk")
_record("node", _NODE.pack(), lambda data: NodeRecord.unpack(data, node_id="a", arrival=0), _NODE)
_record("round", _ROUND.pack(), lambda data: Round.unpack(data, revision=0), _ROUND)
_record("progress", _PROGRESS.pack(), Progress.unpack, _PROGRESS)
_record("closed", _CLOSED.pack(), Closed.unpack, _CLOSED)
_record("ban", _BAN.pack(), Ban.unpack, _BAN)
_record("history", pack_history(_HISTORY), History.unpack, _HISTORY)
_record("ranks", Member.pack_all(_MEMBERS), Member.unpack_all, _MEMBERS)
_record("roster", Participant.pack_all(_ROSTER), Participant.unpack_all, _ROSTER)
_record("settings", pack_settings(_SETTINGS), unpack_settings, _SETTINGS)


def _frames() -> list[bytes]:
    frames = [wire.encode_request(number, 0, request) for number, request in enumerate(REQUESTS, 1)]
    frames += [wire.encode_response(number, response) for number, response in enumerate(RESPONSES, 1)]
    shared = b"".join(wire.encode_shared_body(RESPONSES[2]))
    events = wire.encode_events(EVENTS)
    frames += [wire.events_head(9, len(events)) + events, wire.response_head(9, len(shared)) + shared]
    return frames


def write(directory: Path) -> None:
    """Write the bytes of this release into a new directory."""
    directory.mkdir(parents=True)
    (directory / "frames").write_text("".join(f"{frame.hex()}\n" for frame in _frames()), encoding="ascii")
    records = {name: packed.hex() for name, (packed, _, _) in RECORDS.items()}
    (directory / "records.json").write_text(json.dumps(records, indent=1) + "\n", encoding="ascii")
    with store.sync.serve(data_dir=directory / "store") as server, store.sync.connect(server.url) as client:
        client.put("a", b"1")
        client.put("b", b"2", ttl=LEASE_TTL)


def read(directory: Path) -> list[str]:
    """Return the bytes of a directory that this release does not read as intended."""
    wrong = []
    for name, packed in json.loads((directory / "records.json").read_text(encoding="ascii")).items():
        _, unpack, value = RECORDS[name]
        if unpack(bytes.fromhex(packed)) != value:
            wrong.append(f"{directory.name}: the record {name}")
    lines = (directory / "frames").read_text(encoding="ascii").split()
    wrong += [
        f"{directory.name}: frame {number}, {type(meant).__name__}"
        for number, (line, meant) in enumerate(zip(lines, (*REQUESTS, *RESPONSES, EVENTS, RESPONSES[2]), strict=True))
        if not _reads(bytes.fromhex(line), meant)
    ]
    return wrong + _read_store(directory)


def _reads(frame: bytes, meant: object) -> bool:
    body = frame[4:]
    if meant in REQUESTS:
        decoded = wire.decode_request(body)
        return not isinstance(decoded, Bye) and decoded[2] == meant
    told = wire.decode_server_frame(body)
    return meant == (told.response if isinstance(told, Reply) else told.events if isinstance(told, Events) else None)


def _read_store(directory: Path) -> list[str]:
    """Open a copy of the store and compare it with the expected content."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(directory / "store", copy, dirs_exist_ok=True)
        with store.sync.serve(data_dir=copy) as server, store.sync.connect(server.url) as client:
            found = [(entry.key, entry.value, entry.lease is None) for entry in client.list("")]
            return [] if found == [("a", b"1", True), ("b", b"2", False)] else [f"{directory.name}: the store: {found}"]


def main() -> None:
    """Write them."""
    parser = argparse.ArgumentParser(description="Write the bytes that later releases must read.")
    parser.add_argument("directory", type=Path)
    write(parser.parse_args().directory)


if __name__ == "__main__":
    main()
