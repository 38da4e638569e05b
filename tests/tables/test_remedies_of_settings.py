"""The advice of each error about a URL, a setting, a limit or a directory, followed by the test, leads on."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import store.sync
from rdzv.cli.main import main
from rdzv.config.settings import PARAMETERS, parse
from rdzv.errors import RendezvousSettingsError
from store.limits import Limits

# Of each URL after its scheme: the wrong one, the advice, and the one that follows it.
OF_A_URL = {
    "tpc://head/j": ("write for example tcp://head:29400/job-7", "tcp://head/j"),
    "head:29400/j": ("write for example tcp://head:29400/job-7", "tcp://head:29400/j"),
    "tcp:///j": ("write for example tcp://head:29400/job-7", "tcp://head:29400/j"),
    "tcp://head": ("write for example tcp://head:29400/job-7", "tcp://head:29400/j"),
    "tcp://head/j#1": ("write %20, %23", "tcp://head/j%231"),
    "tcp://head/j 1": ("write %20, %23", "tcp://head/j%201"),
    "tcp://::1:29400/j": ("IPv6 addresses in brackets", "tcp://[::1]:29400/j"),
    "tcp://head:99999/j": ("leave it out for 29400", "tcp://head/j"),
    "tcp://head,head/j": ("name each host once", "tcp://head/j"),
    "tcp://me:secret@head/j": ("token_file= for tcp", "tcp://head/j?token_file=f"),
    "etcd://me:secret@head/j": ("give user= and password_file= for etcd", "etcd://head/j?user=me&password_file=f"),
    "tcp://head/j?token=secret": ("token_file=/run/secrets/rdzv", "tcp://head/j?token_file=/run/secrets/rdzv"),
    "tcp://head/j?password=secret": ("did you mean password_file", "etcd://head/j?user=me&password_file=f"),
    "tcp://head/j?ttl": ("write ttl=VALUE", "tcp://head/j?ttl=20"),
    "tcp://head/j?ttl=20&ttl=30": ("leave one out", "tcp://head/j?ttl=20"),
    "tcp://head/j?node_id=%E4": ("write %C3%A4", "tcp://head/j?node_id=%C3%A4"),
    "tcp://head/j?ttl=20&keep_alive_interval=5": ("leave one out", "tcp://head/j?ttl=20"),
    "tcp://head/j?user=me": ("use a etcd store", "etcd://head/j?user=me&password_file=f"),
    "etcd://head/j?user=me": ("give password_file as well", "etcd://head/j?user=me&password_file=f"),
    "tcp://head/j?ca=f": ("write tcps://", "tcps://head/j?ca=f"),
    "tcps://head/j?cert=f": ("give key as well", "tcps://head/j?cert=f&key=f"),
    "tcp://head/j?max_nodes=4": ("give min_nodes from 1 to 4", "tcp://head/j?min_nodes=1&max_nodes=4"),
    "tcp://head/j?min_nodes=3&max_nodes=2": ("raise one", "tcp://head/j?min_nodes=3&max_nodes=3"),
    "tcp://head/j?min_nodes=3&node_unit=2": (
        "raise max_nodes to 4",
        "tcp://head/j?min_nodes=3&max_nodes=4&node_unit=2",
    ),
    "tcp://head/j?ttl=2&disconnect_ttl=5": ("or raise ttl", "tcp://head/j?ttl=5&disconnect_ttl=5"),
    "tcp://head/j?gone_ttl=9": ("or raise disconnect_ttl", "tcp://head/j?gone_ttl=9&disconnect_ttl=9"),
    "tcp://head/j?requested_rank=0": ("rank_order=requested", "tcp://head/j?requested_rank=0&rank_order=requested"),
    "tcp://a,b/j?data_dir=d": ("or list one host", "tcp://a/j?data_dir=d"),
    "tcp://a,b/j?is_host=1": ("leave it out", "tcp://a,b/j"),
    "tcp://a/j?limits=key_max:9": ("did you mean keys_max", "tcp://a/j?limits=keys_max:9"),
}


@pytest.mark.parametrize(("wrong", "advice", "right"), [(one, *rest) for one, rest in OF_A_URL.items()])
def test_advice_of_a_url(wrong: str, advice: str, right: str) -> None:
    with pytest.raises(RendezvousSettingsError, match=re.escape(advice)):
        parse(wrong, {}, {})
    parse(right, {}, {})


BESIDE = {
    "max_nodes": "min_nodes=1",
    "cert": "key=f",
    "key": "cert=f",
    "user": "password_file=f",
    "password_file": "user=me",
}
BESIDE["requested_rank"] = "rank_order=requested"


TEXT_IS_NONE_OF = {"rank_order", "health_check", "token", "tls", "payload"}  # or any text is right


@pytest.mark.parametrize("name", sorted(PARAMETERS.keys() - TEXT_IS_NONE_OF))
def test_the_example_of_an_error_is_a_value_that_is_taken(name: str) -> None:
    one = PARAMETERS[name]
    scheme = one.family or "tcp"
    url = f"{scheme}{'s' * one.encrypted_only}://head/j?{BESIDE.get(name, 'prefix=/p' * (name != 'prefix'))}"
    with pytest.raises(RendezvousSettingsError, match="write for example") as error:
        parse(f"{url}&{name}=%01", {}, {})
    parse(f"{url}&{str(error.value).rpartition('write for example ')[2]}", {}, {})


def test_advice_for_a_limit_is_enough_for_a_value() -> None:
    """Regression: a store with the least `memory_bytes_max` took nothing."""
    with pytest.raises(ValueError, match="make it at least") as error:
        Limits(memory_bytes_max=1)
    limits = Limits(memory_bytes_max=int(str(error.value).rpartition(" ")[2]))
    with store.sync.serve(limits=limits) as server, store.sync.connect(server.url) as client:
        client.put("k", bytes(limits.value_bytes_max))


OF_A_LIMIT: dict[str, tuple[Callable[[Any], object], str, Callable[[Any], object]]] = {
    "many keys": (lambda it: it.get_many(["k"] * 20_000), "split it", lambda it: it.get_many(["k"] * 10_000)),
    "appends": (
        lambda it: [it.append("k", bytes(600_000)) for _ in "ab"],
        "or put",
        lambda it: it.put("k", bytes(2**21)),
    ),
    "a long lease": (lambda it: it.grant(1e9), "ask for less, and renew it", lambda it: it.grant(60)),
}


@pytest.mark.parametrize(("wrong", "advice", "right"), OF_A_LIMIT.values(), ids=OF_A_LIMIT)
def test_advice_at_a_limit(wrong: Callable[[Any], object], advice: str, right: Callable[[Any], object]) -> None:
    with store.sync.serve() as server, store.sync.connect(server.url) as client:
        with pytest.raises(store.LimitExceeded, match=advice):
            wrong(client)
        right(client)


@pytest.mark.parametrize("way", ["restored", "moved away"])
def test_advice_for_a_store_that_is_gone_from_its_directory(way: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with store.sync.serve(data_dir=data) as server, store.sync.connect(server.url) as client:
        client.put("k", b"")
    assert main(["backup", str(data), str(tmp_path / "copy")]) == 0
    (data / "store.sqlite3").unlink()
    with (
        pytest.raises(store.StoreUsageError, match=r"rdzv restore FILE .*, or move .*durable"),
        store.sync.serve(data_dir=data),
    ):
        pass
    if way == "restored":
        assert main(["restore", str(tmp_path / "copy"), str(data)]) == 0
    else:
        (data / "durable").rename(tmp_path / "durable")
    with store.sync.serve(data_dir=data) as server, store.sync.connect(server.url) as client:
        assert (client.get("k") is not None) == (way == "restored")
