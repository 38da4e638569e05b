"""Text from other parties, escaped for a terminal and a log."""

import importlib
import logging
from functools import partial

import msgpack
import pytest

from store.printable import LETTERS_MOST, make_logger, printable
from store.protocol import wire
from store.protocol.wire import Bye, Greeting, Rejection, Welcome


@pytest.mark.parametrize("text", ["", "plain", "Müller läßt grüßen", "節点", "a b"])
def test_printable_text_stays(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\x7f\x9b", r"\x7f\x9b"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\u2028", r"\u2028"),
        ("\ud800", r"\ud800"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_text_is_shortened() -> None:
    assert printable("x" * 10**6) == "x" * LETTERS_MOST + "..."


def test_a_peers_farewell_is_escaped() -> None:
    said = "gone\x1b]0;owned\x07\nrdzv: all is well"
    assert wire.decode_request(msgpack.packb((wire.BYE, said))) == Bye(printable(said))
    for decode in (
        wire.decode_server_frame,
        partial(wire.decode_opening, kind=Greeting),
        partial(wire.decode_opening, kind=Welcome),
    ):
        sorry = decode(msgpack.packb((wire.SORRY, "limit", said)))
        assert isinstance(sorry, Rejection)
        assert sorry.message.isprintable()


def test_a_logger_escapes_text_of_others_and_leaves_numbers_alone(caplog: pytest.LogCaptureFixture) -> None:
    log = make_logger("tests.make_logger")
    log.warning("run %s, %d nodes: %s", "job\n2026 forged", 3, ValueError("\x1b[2J"))
    log.warning("nothing %% to escape")
    log.warning("%(name)s", {"name": "kept"})
    assert caplog.messages == ["run job\\n2026 forged, 3 nodes: \\x1b[2J", "nothing %% to escape", "kept"]


@pytest.mark.parametrize(
    "room",
    [
        *(
            "rdzv.node.run.run_settings",
            "rdzv.node.coordinator.election",
            "rdzv.node.coordinator.term",
            "rdzv.node.link.head_watcher",
        ),
        *(
            "rdzv.node.node",
            "rdzv.node.member.joining",
            "rdzv.node.member.membership_watcher",
            "rdzv.node.member.node_state",
        ),
        *("rdzv.node.run.run", "rdzv.loop.round_monitor", "rdzv.loop.member", "rdzv.backends.bind_address"),
        *("rdzv.backends.hosting", "rdzv.cli.launcher.launch"),
    ],
)
def test_rooms_that_log_reasons_and_names_of_others_escape_them(room: str, caplog: pytest.LogCaptureFixture) -> None:
    """A closing reason, or another node's name, could clear the terminal of each user of `rdzv run -v`."""
    importlib.import_module(room)
    logging.getLogger(room).error("run %s: %s", "job", "the end\x1b[2J")
    assert caplog.messages == ["run job: the end\\x1b[2J"]
