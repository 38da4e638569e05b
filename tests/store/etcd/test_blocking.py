"""The blocking client of an etcd cluster: threads, signals and forks. The rest is in `test_conformance`."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

import store
import store.sync
from store.errors import ConnectionLost, UsedAfterFork
from store.etcd import blocking as etcd_sync
from store.etcd import client as etcd
from store.etcd.codec import Endpoints
from tests.support.etcd import serve_etcd
from tests.support.interrupts import Torn, alarms
from tests.support.processes import start_python

FORGETFUL = """
import sys
from store.etcd import blocking as etcd_sync
from store.etcd.codec import Endpoints
client = etcd_sync.Client(Endpoints.parse(sys.argv[1]))
client.put("forgotten", b"")
watch = client.watch("", snapshot=True).__enter__()
print(next(iter(watch)).kind)
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve_etcd() as served:
        yield served.url


def test_a_signal_handler_that_raises_gets_out_of_a_call_at_once_and_the_client_goes_on(url: str) -> None:
    with alarms(), store.sync.connect(url) as client:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Torn):
            client.wait(["never"])
        client.put("after", b"1")
        assert client.get("after") is not None


def test_a_forked_child_gets_an_error_that_it_needs_its_own_client(url: str) -> None:
    with store.sync.connect(url) as client:
        client.put("mine", b"1")
        child = os.fork()
        if child == 0:
            try:
                client.get("mine")
            except UsedAfterFork:
                client.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client.get("mine") is not None


async def test_a_client_that_was_not_closed_ends_silently_with_its_process(url: str) -> None:
    async with start_python("-X", "dev", "-c", FORGETFUL, url) as child:
        assert await child.wait(timeout=60) == 0
        noise = [line for line in child.output if "nclosed" in line or "Error" in line or "error" in line]
        assert noise == []
    with etcd_sync.Client(Endpoints.parse(url), receipts="others/") as client:
        assert client.count(etcd.RECEIPTS) == 0, "it has hung up, and taken its receipts back"


def test_a_client_that_was_never_used_starts_nothing_and_one_that_is_closed_can_be_closed_again() -> None:
    threads = threading.active_count()
    client = etcd_sync.Client(Endpoints.parse("etcd://127.0.0.1:1"))
    assert threading.active_count() == threads
    client.close()
    client.close()
    with pytest.raises(ConnectionLost, match="closed"):
        client.get("a")
    assert threading.active_count() == threads
