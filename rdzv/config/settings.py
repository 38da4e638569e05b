"""What the user chooses, from keywords, a URL or the environment: checked once, frozen after.

`Settings` holds what was chosen, and `parse` puts it together; `PARAMETERS` says of each field what it may be and
what it is for. One parameter may be given in three places, and the more deliberate place wins:

    keyword of `connect`   beats   the URL   beats   the environment variable RDZV_<NAME>

A keyword that is None counts as not given. A wrong value is answered at once, whichever place it comes from,
by one sentence that names the parameter, the value, the limit and the remedy. Unknown names are errors in
keywords and URLs; in the environment they are left alone, because launchers put RDZV_ROUND and such like
there for others to read.

Three things can be said in two ways, which are then rivals: `token` and `token_file`; `tls` and `ca`, `cert`,
`key`; `ttl` and PyTorch's `keep_alive_interval` x `keep_alive_max_attempt`. A rival from the place that wins
silences the other; rivals from one place must not contradict each other. Of the keep-alive pair one suffices:
the other is then what PyTorch's `create_handler` takes, 5 seconds and 3 attempts.

`Settings` checks itself, so that one made by hand or by `dataclasses.replace` is as sound as a parsed one.

This room is pure: files are only named here, not read, and the environment is handed in by the caller.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import quote

from rdzv.config.config_errors import refuse, shown, suggest
from rdzv.config.endpoint import Endpoint, split_url
from rdzv.config.parameters import KEEP_ALIVE, RUN_ID, TABLE, Parameter, Source
from store.limits import Limits  # noqa: TC001  so that the annotations can be evaluated
from store.messages import GONE_TTL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["PARAMETERS", "Settings", "capacity_of", "describe_difference", "needed_of", "parse"]

log: logging.Logger = logging.getLogger(__name__)

DERIVED: Final[Any] = None
"""Stands for a default that depends on other settings; `Parameter.derive` works it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a handler is told, in one checked, unchanging piece; `PARAMETERS` says what each means.

    Secrets are left out of its repr. Both node counts are None for an observer, which may look and close, but
    not join. Defaults that depend on other settings are worked out by `Parameter.derive`.

    Raises:
        RendezvousSettingsError: A value is not what its parameter may be, or two contradict each other.
    """

    endpoint: Endpoint
    run_id: str

    # When a round is complete.
    min_nodes: int | None = None
    max_nodes: int | None = None
    node_unit: int = 1
    unit_within: str | None = None
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    early_last_call: bool = True
    expected: tuple[str, ...] = DERIVED
    expected_file: str | None = None
    waits_end_on_loss: bool = True

    # When a node or a run is over.
    close_timeout: float = 30.0
    closed_ttl: float = 86400.0
    ttl: float = 10.0
    disconnect_ttl: float = DERIVED
    gone_ttl: float = GONE_TTL
    stall_timeout: float | None = None
    first_step_timeout: float | None = None
    ban_after: str | None = None

    # Where the store is kept, and who may use it.
    prefix: str = DERIVED
    is_host: bool | None = None
    data_dir: str | None = None
    insecure: bool = False
    limits: Limits | None = None
    http_port: int | None = None
    metrics_port: int | None = None
    token: str | bytes | None = field(default=None, repr=False)
    token_file: str | None = None
    tls: Any = field(default=None, repr=False)
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password_file: str | None = None

    # What this node is, and brings.
    node_id: str | None = None
    address: str | None = None
    master_port: str | None = None
    bootstrap_check: bool | None = None
    payload: Any = None
    attributes: Mapping[str, str] = DERIVED
    rank_order: str | Callable[..., Any] = "survivors"
    requested_rank: int | None = None
    torch_store: str = "rdzv"
    health_check: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_id", RUN_ID.read(self.run_id))
        for name, default in _DEFAULTS_TO_READ:
            value = getattr(self, name)
            # Most are not given, and a default is in its one true form.
            if value is not None and value is not default:
                object.__setattr__(self, name, PARAMETERS[name].read(value))
        for parameter, derive in _DERIVED:
            if getattr(self, parameter.name) is None:
                object.__setattr__(self, parameter.name, derive(self))
        for parameter in _NOT_FOR_ALL_STORES:
            if (value := getattr(self, parameter.name)) is not None and value is not False:
                _check_that_it_applies(parameter, self.endpoint)
        for is_broken, sentence in _RULES:
            if is_broken(self):
                refuse(sentence.format(_Shown(self)))

    @property
    def can_join(self) -> bool:
        """Whether this node may be a member; an observer has not said how many nodes it needs."""
        return self.min_nodes is not None

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted: the scheme says so, or a TLS context was given."""
        return self.endpoint.info.is_encrypted or self.tls is not None

    @property
    def needed(self) -> int:
        """The fewest nodes that make a round: the minimum, rounded up to a unit.

        Raises:
            RendezvousSettingsError: This is an observer.
        """
        return needed_of(self._joiner(self.min_nodes), self.node_unit)

    @property
    def capacity(self) -> int:
        """The most nodes that fit in a round: the maximum, rounded down to a unit.

        Raises:
            RendezvousSettingsError: This is an observer.
        """
        return capacity_of(self._joiner(self.max_nodes), self.node_unit)

    def _joiner(self, nodes: int | None) -> int:
        if nodes is None:
            refuse(
                f"min_nodes is missing, and a node that joins run {shown(self.run_id)} must say it; "
                f"write for example {self.endpoint.url}/{quote(self.run_id)}?min_nodes=2"
            )
        return nodes

    def shared(self) -> dict[str, Any]:
        """Return, as plain data, what all nodes of a run must agree on, and what is stored once with it."""
        agreed = {name: _plain(getattr(self, name)) for name in _SHARED}
        if self.torch_store != "rdzv":  # left out otherwise, so that runs of nodes that do not know it are the same
            agreed["torch_store"] = self.torch_store
        for name in _SHARED_IF_GIVEN:
            if getattr(self, name) is not None:
                agreed[name] = getattr(self, name)
        return agreed


_SHARED: Final = (
    "min_nodes",
    "max_nodes",
    "node_unit",
    "rank_order",
    "last_call_timeout",
    "early_last_call",
)

_SHARED_IF_GIVEN: Final = ("stall_timeout", "first_step_timeout", "unit_within", "ban_after")
"""The same, left out where nobody has given them."""


def _plain(value: Any) -> Any:
    """Return a function's qualified name, and anything else as it is.

    Two nodes that run one program name their function alike; this is as near as one gets to comparing code.
    """
    if not callable(value):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def describe_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return in words how two results of `Settings.shared` differ: "min_nodes is 2 here and 3 in the run".

    Field by field, so that releases of which one knows a field more can meet: what is missing there has its default,
    and what is unknown here is passed over.

    Returns:
        One clause for each difference, and an empty text if there is none.
    """
    known = [name for name in dict.fromkeys((*ours, *theirs)) if name in _DEFAULTS]
    here, there = ({name: given.get(name, _DEFAULTS[name]) for name in known} for given in (ours, theirs))
    return ", ".join(
        f"{name} is {shown(here[name])} here and {shown(there[name])} in the run"
        for name in known
        if here[name] != there[name]
    )


_DEFAULTS: Final = {declared.name: declared.default for declared in fields(Settings)}

PARAMETERS: Final[Mapping[str, Parameter]] = MappingProxyType(
    {parameter.name: replace(parameter, default=_DEFAULTS[parameter.name]) for parameter in TABLE}
)
"""Every parameter by name, in the order in which `Settings` declares them."""

assert ["endpoint", "run_id", *PARAMETERS] == [*_DEFAULTS], "each field of Settings has its line in the table"

_DEFAULTS_TO_READ: Final = tuple((name, _DEFAULTS[name]) for name in PARAMETERS)
_DERIVED: Final = tuple((parameter, parameter.derive) for parameter in PARAMETERS.values() if parameter.derive)
_NOT_FOR_ALL_STORES: Final = tuple(one for one in PARAMETERS.values() if one.family or one.encrypted_only)

_BY_WRITTEN_NAME: Final[Mapping[str, Parameter]] = {
    written: parameter
    for parameter in (*PARAMETERS.values(), *KEEP_ALIVE.values())
    for written in (parameter.name, *parameter.aliases)
}

_IN_THE_ENVIRONMENT: Final[Mapping[str, str]] = {
    Source.ENVIRONMENT.spell(written): written
    for written, parameter in _BY_WRITTEN_NAME.items()
    if Source.ENVIRONMENT in parameter.sources
}
"""The variables that say something about parameters, and about which."""

_RIVALS_OF: Final[Mapping[str, frozenset[str]]] = {
    name: frozenset(theirs)
    for one, other in (
        ({"token"}, {"token_file"}),
        ({"tls"}, {"ca", "cert", "key"}),
        ({"ttl"}, {*KEEP_ALIVE}),
    )
    for mine, theirs in ((one, other), (other, one))
    for name in mine
}


class _Shown:
    """Settings as sentences show them: text as a literal, and not at any length."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._settings, name)
        return value if isinstance(value, int | float) else shown(value)


def needed_of(min_nodes: int, unit: int) -> int:
    """Return the fewest nodes that make a round: the minimum, rounded up to a unit."""
    return -(-min_nodes // unit) * unit


def capacity_of(max_nodes: int, unit: int) -> int:
    """Return the most nodes that fit in a round: the maximum, rounded down to a unit."""
    return max_nodes // unit * unit


def _check_that_it_applies(parameter: Parameter, endpoint: Endpoint) -> None:
    """Refuse what this kind of store would ignore: whoever set it believes that it does something."""
    if parameter.family not in ("", endpoint.info.family):
        refuse(
            f"{parameter.name} is for {parameter.family} and {parameter.family}s, but the scheme is "
            f"{endpoint.scheme}; leave out {parameter.name} (and RDZV_{parameter.name.upper()}), "
            f"or use a {parameter.family} store"
        )
    if parameter.encrypted_only and not endpoint.info.is_encrypted:
        refuse(
            f"{parameter.name} is for encrypted connections, but the scheme is {endpoint.scheme}; "
            f"write {endpoint.scheme}s:// or leave out {parameter.name} (and RDZV_{parameter.name.upper()})"
        )


# What a single value cannot break: each rule is what must not be, and what to say about it.
_RULES: Final[tuple[tuple[Callable[[Settings], bool], str], ...]] = (
    (
        lambda it: it.min_nodes is None and it.max_nodes is not None,
        "max_nodes={0.max_nodes} needs min_nodes beside it; give min_nodes from 1 to {0.max_nodes}",
    ),
    (
        lambda it: it.min_nodes is not None and it.max_nodes is not None and it.max_nodes < it.min_nodes,
        "max_nodes={0.max_nodes} must not be less than min_nodes={0.min_nodes}; raise one or lower the other",
    ),
    (
        lambda it: it.can_join and it.capacity < it.needed,
        (
            "min_nodes={0.min_nodes} in units of node_unit={0.node_unit} is {0.needed}, and must not be more "
            "than max_nodes={0.max_nodes}; raise max_nodes to {0.needed} or choose a smaller node_unit"
        ),
    ),
    (
        lambda it: it.disconnect_ttl > it.ttl,
        (
            "disconnect_ttl={0.disconnect_ttl:g} must not be more than ttl={0.ttl:g}, when a node is gone; "
            "lower disconnect_ttl or raise ttl"
        ),
    ),
    (
        lambda it: it.token is not None and it.token_file is not None,
        "token and token_file={0.token_file} are both given, but only one can be the secret; leave one out",
    ),
    (
        lambda it: it.tls is not None and any((it.ca, it.cert, it.key)),
        (
            "tls and ca={0.ca}, cert={0.cert}, key={0.key} are given, but an SSLContext holds it all; "
            "leave out the one or the others"
        ),
    ),
    (
        lambda it: it.cert is not None and it.key is None,
        "cert={0.cert} is of no use without its private key; give key as well",
    ),
    (
        lambda it: it.key is not None and it.cert is None,
        "key={0.key} is of no use without its certificate; give cert as well",
    ),
    (
        lambda it: it.password_file is not None and it.user is None,
        "password_file={0.password_file} does not say whose password it is; give user as well",
    ),
    (
        lambda it: it.user is not None and it.password_file is None,
        "user={0.user} cannot log in without a password; give password_file as well",
    ),
)


def parse(url: str, overrides: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Put together what the environment, the URL and the keywords of `connect` say.

    Raises:
        RendezvousSettingsError: Anything is wrong with any of it.
    """
    parts = split_url(url)
    endpoint = Endpoint.parse(parts.scheme, parts.authority)
    if not parts.run_id:
        refuse(f"the URL {shown(endpoint.url)} has no run_id; write for example {endpoint.url}/job-7")
    run_id = RUN_ID.read(parts.run_id, source=Source.URL)

    chosen: dict[str, Any] = {}
    for source, given in (
        (Source.ENVIRONMENT, _from_environment(environ)),
        (Source.URL, parts.parameters),
        (Source.KEYWORD, {name: value for name, value in overrides.items() if value is not None}),
    ):
        _overlay(chosen, _read(given, source))
    keep_alive = {name: chosen.pop(name) for name in KEEP_ALIVE if name in chosen}
    if keep_alive:
        written = " x ".join(KEEP_ALIVE)
        chosen["ttl"] = PARAMETERS["ttl"].read(_keep_alive_ttl(keep_alive), written=written)
    settings = Settings(endpoint=endpoint, run_id=run_id, **chosen)
    if settings.can_join and settings.max_nodes != settings.capacity:
        _warn(
            f"max_nodes={settings.max_nodes} is no multiple of node_unit={settings.node_unit}: a round has at most "
            f"{settings.capacity} nodes, and more stay as spares; write max_nodes={settings.capacity} or "
            f"max_nodes={settings.capacity + settings.node_unit}"
        )
    return settings


@functools.cache
def _warn(sentence: str) -> None:
    """Log a warning, once per process: settings are often read more than once."""
    log.warning("%s", sentence)


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the environment says about the parameters it may set; all else there is left alone."""
    # The environment's names are gone through, and not ours: it has few that are of interest, as a rule none.
    there = sorted(variable for variable in environ if variable in _IN_THE_ENVIRONMENT)
    return {_IN_THE_ENVIRONMENT[variable]: environ[variable] for variable in there}


def _read(given: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return what one source says, checked, by the parameters' own names."""
    values: dict[str, Any] = {}
    written_as: dict[str, str] = {}
    for written, raw in given.items():
        parameter = _look_up(written, source)
        value = parameter.read(raw, source=source, written=written)
        if values.setdefault(parameter.name, value) != value:
            first = written_as[parameter.name]
            _contradiction(f"{first}={shown(given[first])} and {written}={shown(raw)}", source)
        written_as[parameter.name] = written
    if "ttl" in values and values.keys() & KEEP_ALIVE.keys():
        product = _keep_alive_ttl(values)
        if values["ttl"] != product:
            _contradiction(f"ttl={values['ttl']:g} and {' x '.join(KEEP_ALIVE)}={product:g}", source)
        values = {name: value for name, value in values.items() if name not in KEEP_ALIVE}
    return values


def _contradiction(both: str, source: Source) -> NoReturn:
    refuse(f"{both}{source.value} mean the same and must not differ; leave one out")


def _keep_alive_ttl(values: Mapping[str, Any]) -> float:
    interval, attempts = (values.get(name, parameter.default) for name, parameter in KEEP_ALIVE.items())
    return float(interval * attempts)


def _overlay(chosen: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Let what a stronger source says replace the same parameters of weaker ones, and their rivals."""
    for name in values:
        for rival in _RIVALS_OF.get(name, ()):
            chosen.pop(rival, None)
    chosen.update(values)


def _look_up(written: str, source: Source) -> Parameter:
    parameter = _BY_WRITTEN_NAME.get(written)
    if parameter is None:
        refuse(
            f"there is no parameter {shown(written)}{source.value}{suggest(written, _BY_WRITTEN_NAME)}; "
            f"the parameters are {', '.join(PARAMETERS)}"
        )
    if source not in parameter.sources and parameter.is_secret:
        refuse(
            f"{written} was given in the URL, but secrets do not belong into a URL, which is shown in "
            f"process lists; put it into a file and name that: "
            f"{written}_file={PARAMETERS[f'{written}_file'].example}"
        )
    if source not in parameter.sources:
        refuse(f"{written} in the URL must be {parameter.kind.limit}, which text cannot be; give it as a keyword")
    return parameter
