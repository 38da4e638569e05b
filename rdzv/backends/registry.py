"""The backends by URL scheme, and the registration of a user's backend.

A backend is a creator: a function from `RendezvousParameters` to a `RendezvousHandler`. Register it by either:

    rdzv.register("zk", create)                          in code, before connecting

    [project.entry-points."rdzv.backends"]               in a package's pyproject.toml, found on demand
    zk = "zk_rendezvous:create"

Registration in code has precedence. Entry points are looked up only for an unregistered scheme: a broken package
affects only its users. Schemes are case-insensitive.

`RendezvousParameters` is compatible with PyTorch's class. The class has no repr, as it may contain secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from rdzv.config.config_errors import refuse
from rdzv.config.endpoint import quote_part, split_url
from rdzv.config.parameters import Parameter, Source
from rdzv.config.rules import check_sizes
from rdzv.config.settings import PARAMETERS, find_parameter
from rdzv.config.value_types import FLAG, whole_number
from rdzv.errors import RendezvousSettingsError
from rdzv.interface import RendezvousHandler

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

ENTRY_POINT_GROUP: Final = "rdzv.backends"

ParameterValue: TypeAlias = (
    str | bytes | int | float | PurePath | Mapping[str, Any] | Sequence[Any] | Callable[..., Any] | None
)
"""A parameter as its user wrote it: text if from a URL."""


class RendezvousParameters:
    """A creator's arguments.

    Attributes:
        backend: The URL's scheme.
        endpoint: The URL's hosts and ports, as written.
        run_id: The run to join.
        min_nodes: The fewest nodes of a round; None, like `max_nodes`, for an observer.
        max_nodes: The most nodes of a round.
        local_addr: The address of this node for other nodes, if given.
        config: All other parameters, as written.
        url: The whole URL, for creators that read it.
        overrides: The keywords, which override the URL.
    """

    def __init__(  # arguments in PyTorch's order
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int | None,
        max_nodes: int | None,
        local_addr: str | None = None,
        *,
        url: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        **config: ParameterValue,
    ) -> None:
        _require_backend_name(backend)
        if min_nodes is not None and min_nodes < 1:
            refuse(f"min_nodes={min_nodes} must be at least 1; write for example min_nodes=2")
        if (min_nodes is None) != (max_nodes is None):
            refuse(f"min_nodes={min_nodes} and max_nodes={max_nodes} must both be given, or neither; give both")
        if min_nodes is not None and max_nodes is not None:
            check_sizes(min_nodes, max_nodes)
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config = config
        if url is None:
            url = f"{backend}://{endpoint}/{quote_part(run_id)}"
            overrides = {"min_nodes": min_nodes, "max_nodes": max_nodes, "address": local_addr, **config}
        self.url = url
        self.overrides: Mapping[str, Any] = MappingProxyType(
            {name: value for name, value in (overrides or {}).items() if value is not None}
        )

    @classmethod
    def from_url(cls, url: str, overrides: Mapping[str, Any]) -> Self:
        """Return the parameters of a URL and of the keywords of `connect`; keywords that are None are ignored.

        Only the URL's form and the node counts are checked (`RendezvousSettingsError`): the creator checks the rest.
        """
        parts = split_url(url)
        given = {name: value for name, value in overrides.items() if value is not None}
        config = {**parts.parameters, **given}
        min_nodes, max_nodes = (_pop_node_count(config, name, given) for name in ("min_nodes", "max_nodes"))
        return cls(
            parts.scheme,
            parts.authority,
            parts.run_id,
            min_nodes,
            min_nodes if max_nodes is None else max_nodes,
            config.pop("address", None),
            url=url,
            overrides=given,
            **{name: value for name, value in config.items() if name not in _OWN_NAMES},
        )

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of `config`, or the default."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return a value of `config` as a bool, or the default; raise `RendezvousSettingsError` for other values."""
        value = self.get(key, default)
        return None if value is None else bool(Parameter(key, FLAG).read(value))

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return a value of `config` as an int, or the default; raise `RendezvousSettingsError` for other values."""
        value = self.get(key, default)
        return None if value is None else int(Parameter(key, ANY_WHOLE_NUMBER).read(value))


ANY_WHOLE_NUMBER: Final = whole_number(-(2**63), 2**63, limit="a whole number", example="1")
_OWN_NAMES: Final = frozenset({"self", "backend", "endpoint", "run_id", "local_addr", "url", "overrides"})
"""Arguments of `RendezvousParameters`: a URL's parameters with these names are left out of `config`."""


def _pop_node_count(config: dict[str, Any], name: str, given: Mapping[str, Any]) -> int | None:
    """Pop a node count from `config`; the parameter's name has precedence over its aliases."""
    names = [name, *PARAMETERS[name].aliases]
    for written in given.keys() & {*names}:
        find_parameter(written, Source.KEYWORD)  # raises an error if a keyword has an older name
    written = next((it for it in names if it in config), name)
    raw = {it: config.pop(it, None) for it in names}[written]
    count: int | None = None if raw is None else PARAMETERS[name].read(raw, written=written)
    return count


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """The creators by scheme."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Register a creator; raise `RendezvousSettingsError` if the scheme is empty or has another creator."""
        _require_backend_name(backend)
        present = self._creators.setdefault(backend.lower(), creator)
        if present != creator:
            refuse(
                f"the scheme {backend!r} cannot be registered for {creator!r}, because it is registered for "
                f"{present!r}; choose another name"
            )

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Return a new handler; `RendezvousSettingsError` if its backend is unknown, broken, or returns no handler."""
        scheme = params.backend.lower()
        if scheme not in self._creators:
            self.register(scheme, self._load_creator(scheme))
        handler: object = self._creators[scheme](params)
        if not isinstance(handler, RendezvousHandler):
            refuse(
                f"the backend {scheme!r} made a {type(handler).__qualname__}, which is not an "
                f"rdzv.RendezvousHandler; let its creator return one"
            )
        return handler

    def known(self) -> list[str]:
        """Return the registered schemes and those of installed packages, sorted."""
        return sorted({*self._creators, *(found.name.lower() for found in _installed_entry_points())})

    def _load_creator(self, scheme: str) -> RendezvousHandlerCreator:
        # Count entry points by value: a directory twice on the path lists each one twice.
        found = {point.value: point for point in _installed_entry_points() if point.name.lower() == scheme}
        if not found:
            refuse(
                f"there is no backend for the scheme {scheme!r}, only for {', '.join(self.known()) or 'none'}; use "
                f"rdzv.register, or install a package with an entry point in {ENTRY_POINT_GROUP}"
            )
        if len(found) > 1:
            refuse(
                f"the scheme {scheme!r} is offered by several entry points in {ENTRY_POINT_GROUP}: "
                f"{', '.join(sorted(found))}; uninstall all but one, or choose with rdzv.register"
            )
        (point,) = found.values()
        named = f"the entry point {point.name} = {point.value} in {ENTRY_POINT_GROUP}"
        try:
            creator: RendezvousHandlerCreator = point.load()
        except Exception as error:  # a foreign module may raise anything when imported
            raise RendezvousSettingsError(
                f"{named} cannot be loaded ({type(error).__name__}: {error}); repair or uninstall its package"
            ) from error
        if not callable(creator):
            refuse(f"{named} is not a function but {creator!r}; let it name a function that returns a handler")
        return creator


def _installed_entry_points() -> EntryPoints:
    from importlib.metadata import entry_points  # imported late, as this takes as long as importing rdzv

    return entry_points(group=ENTRY_POINT_GROUP)


def _require_backend_name(backend: str) -> None:
    if not backend:
        refuse("the backend's name is empty; give the scheme of its URLs")


RendezvousHandlerFactory = RendezvousHandlerRegistry
"""The registry's name in older code."""

rendezvous_handler_registry: Final = RendezvousHandlerRegistry()
"""The registry that `connect` uses."""


def register(scheme: str, creator: RendezvousHandlerCreator) -> None:
    """Register a creator for a URL scheme in the registry that `connect` uses."""
    rendezvous_handler_registry.register(scheme, creator)
