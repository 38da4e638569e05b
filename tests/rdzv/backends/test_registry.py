"""Backends: registered in code, or found in installed packages."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rdzv.sync
from rdzv.backends import registry
from rdzv.backends.registry import (
    RendezvousHandlerFactory,
    RendezvousHandlerRegistry,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from rdzv.errors import RendezvousSettingsError
from rdzv.interface import RendezvousHandler


class Fake(RendezvousHandler):
    """A handler that keeps the parameters of its creator."""

    def __init__(self, params: RendezvousParameters) -> None:
        self.params = params

    async def next_rendezvous(self) -> Any:
        raise NotImplementedError

    async def num_nodes_waiting(self) -> int:
        raise NotImplementedError

    async def is_closed(self) -> bool:
        raise NotImplementedError

    async def set_closed(self, reason: str = "") -> None:
        raise NotImplementedError


def params(backend: str = "mine", **config: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, "head:1", "job-7", 2, 4, **config)


def install(site: Path, package: str, *entry_points: str, source: str = "") -> None:
    """Put a package on disk as an installer would: a module, and a dist-info directory that describes it."""
    described = site / f"{package}-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("\n".join(["[rdzv.backends]", *entry_points, ""]))
    (site / f"{package}.py").write_text(source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on `sys.path`. Modules that were imported from it are forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


# Parameters.


def test_parameters_have_pytorchs_shape_and_a_url_and_overrides_too() -> None:
    it = RendezvousParameters("mine", "head:1", "job 7", 2, 4, "10.0.0.7", colour="red")
    assert (it.backend, it.endpoint, it.run_id, it.min_nodes, it.max_nodes) == ("mine", "head:1", "job 7", 2, 4)
    assert (it.local_addr, it.config, it.get("colour"), it.get("size", 3)) == ("10.0.0.7", {"colour": "red"}, "red", 3)
    assert it.url == "mine://head:1/job%207"
    assert it.overrides == {"min_nodes": 2, "max_nodes": 4, "address": "10.0.0.7", "colour": "red"}


def test_keywords_take_precedence_over_the_url_also_by_another_name() -> None:
    url = "mine://a,b:2/job-7?min_workers=2&colour=red&address=10.0.0.7&url=x"
    it = RendezvousParameters.from_url(url, {"colour": "blue", "size": 3, "shape": None})
    assert (it.backend, it.endpoint, it.run_id, it.min_nodes, it.max_nodes) == ("mine", "a,b:2", "job-7", 2, 2)
    assert (it.local_addr, it.config) == ("10.0.0.7", {"colour": "blue", "size": 3})
    assert (it.url, it.overrides) == (url, {"colour": "blue", "size": 3})
    it = RendezvousParameters.from_url("mine://a/r?min_workers=2&max_nodes=9", {"min_nodes": 3})
    assert (it.min_nodes, it.max_nodes) == (3, 9)
    with pytest.raises(RendezvousSettingsError, match=r"no keyword min_workers.*write min_nodes"):
        RendezvousParameters.from_url("mine://a/r?min_nodes=2", {"min_workers": 3})
    observer = RendezvousParameters.from_url("mine://a/r", {})
    assert (observer.min_nodes, observer.max_nodes) == (None, None)


@pytest.mark.parametrize(
    ("backend", "min_nodes", "max_nodes"),
    [("", 1, 1), ("mine", 0, 1), ("mine", 3, 2), ("mine", None, 2), ("mine", 2, None)],
)
def test_wrong_parameters_are_refused(backend: str, min_nodes: int | None, max_nodes: int | None) -> None:
    with pytest.raises(RendezvousSettingsError):
        RendezvousParameters(backend, "head:1", "job-7", min_nodes, max_nodes)


@pytest.mark.parametrize("meaning", [True, False])
def test_config_is_read_as_true_or_false_or_a_number(meaning: bool) -> None:
    for value in ("1", "T", "yes", 1, True) if meaning else ("0", "n", 0):
        assert params(flag=value).get_as_bool("flag") is meaning
    assert params().get_as_bool("flag") is None and params().get_as_bool("flag", meaning) is meaning
    assert params(size="3").get_as_int("size") == 3
    assert params().get_as_int("size") is None and params().get_as_int("size", 3) == 3


@pytest.mark.parametrize(
    ("how", "values"), [("get_as_bool", ["maybe", 2, []]), ("get_as_int", ["three", "1_0", [], float("inf")])]
)
def test_config_that_is_no_flag_or_number_is_refused(how: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RendezvousSettingsError, match="write for example it="):
            getattr(params(it=value), how)("it")


# Registered in code.


def test_a_registered_creator_is_called_with_the_parameters_and_a_second_one_is_an_error() -> None:
    backends = RendezvousHandlerRegistry()
    for _ in range(2):
        backends.register("Mine", Fake)
    given = params()
    handler = backends.create_handler(given)
    assert isinstance(handler, Fake) and handler.params is given
    for name, creator in (("MINE", lambda _: Fake(params())), ("", Fake)):
        with pytest.raises(RendezvousSettingsError):
            backends.register(name, creator)


def test_the_error_for_an_unknown_scheme_lists_the_known_ones() -> None:
    backends = RendezvousHandlerRegistry()
    with pytest.raises(RendezvousSettingsError, match=r"scheme 'mine', only for none; use rdzv\.register"):
        backends.create_handler(params())
    backends.register("zk", Fake)
    backends.register("consul", Fake)
    with pytest.raises(RendezvousSettingsError, match="scheme 'mine', only for consul, zk;"):
        backends.create_handler(params())


def test_a_creator_must_return_a_handler() -> None:
    backends = RendezvousHandlerRegistry()
    backends.register("mine", lambda _: object())  # type: ignore[arg-type,return-value]
    with pytest.raises(RendezvousSettingsError, match=r"'mine' made a object, which is not an rdzv\.Rendezvous"):
        backends.create_handler(params())


def test_the_module_registers_in_the_default_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_handler_registry, "_creators", {})
    registry.register("mine", Fake)
    assert rendezvous_handler_registry.known() == ["mine"]
    assert RendezvousHandlerFactory is RendezvousHandlerRegistry


def test_the_blocking_handler_of_a_registered_backend_forwards_calls_and_closes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = []

    class Mine(Fake):
        async def num_nodes_waiting(self) -> int:
            return 7

        async def aclose(self) -> None:
            called.append("aclose")

    monkeypatch.setattr(rendezvous_handler_registry, "_creators", {})
    registry.register("mine", Mine)
    with rdzv.sync.connect("mine://head:1/job-7?min_nodes=2&max_nodes=4") as handler:
        assert handler.num_nodes_waiting() == 7
    assert called == ["aclose"]


# Found in installed packages.


def test_an_installed_package_offers_a_backend(site: Path) -> None:
    install(
        site, "rdzv_zk", "zk = rdzv_zk:create", source="from tests.rdzv.backends.test_registry import Fake as create"
    )
    backends = RendezvousHandlerRegistry()
    assert backends.known() == ["zk"] and "rdzv_zk" not in sys.modules
    first = backends.create_handler(params("zk"))
    second = backends.create_handler(params("ZK"))
    assert type(first).__name__ == type(second).__name__ == "Fake"


def test_a_backend_registered_in_code_replaces_an_installed_package_which_is_not_loaded(site: Path) -> None:
    install(site, "rdzv_zk", "zk = rdzv_zk:create", source="raise RuntimeError('loaded')")
    backends = RendezvousHandlerRegistry()
    backends.register("zk", Fake)
    assert isinstance(backends.create_handler(params("zk")), Fake)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('no zookeeper here')", r"cannot be loaded \(RuntimeError: no zookeeper here\); repair"),
        ("", r"cannot be loaded \(AttributeError: .*create"),
        ("import rdzv_not_there", r"cannot be loaded \(ModuleNotFoundError: .*rdzv_not_there"),
        ("create = 7", "is not a function but 7"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_named_with_the_cause(site: Path, source: str, said: str) -> None:
    install(site, "rdzv_zk", "zk = rdzv_zk:create", source=source)
    with pytest.raises(RendezvousSettingsError, match=f"entry point zk = rdzv_zk:create in rdzv.backends.*{said}"):
        RendezvousHandlerRegistry().create_handler(params("zk"))


def test_two_packages_that_offer_one_scheme_are_both_named(site: Path) -> None:
    install(site, "rdzv_zk", "zk = rdzv_zk:create")
    install(site, "rdzv_zookeeper", "zk = rdzv_zookeeper:create")
    with pytest.raises(RendezvousSettingsError, match="rdzv_zk:create, rdzv_zookeeper:create; uninstall"):
        RendezvousHandlerRegistry().create_handler(params("zk"))
