"""The user's settings, from keywords, a URL or the environment: checked once, then frozen.

Each field of `Settings` declares a parameter (`PARAMETERS`); the text below a field is its row in
docs/all-parameters.md. If a parameter is given in several places, this order decides:

    keyword of `connect`   beats   the URL   beats   the environment variable RDZV_<NAME>

torchrun's `--rdzv-conf` is passed on as keywords. Only in `--rdzv-conf` and URLs, a parameter may have an older name,
such as `timeout`, and PyTorch's pair `keep_alive_interval` x `keep_alive_max_attempt` may stand for `ttl`.
Keywords that are None are ignored. Unknown names are errors, except in the environment (launchers set RDZV_ROUND).

Two settings have two forms each: `token` and `token_file`; `tls` and `ca`, `cert`, `key`. If both forms are given, the
form from the stronger place counts; both in one place are an error.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import quote

from rdzv.config import value_types as kinds
from rdzv.config.config_errors import brief, refuse, suggest
from rdzv.config.endpoint import SCHEMES, Endpoint, split_url
from rdzv.config.parameters import KEEP_ALIVE, RUN_ID, Parameter, Source, parameter
from rdzv.config.rules import check_applies_to_store, check_consistent, max_in_whole_units, min_in_whole_units
from rdzv.config.value_types import duration, whole_number
from store.limits import Limits  # noqa: TC001  so that the annotations can be evaluated
from store.messages import GONE_TTL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log: logging.Logger = logging.getLogger(__name__)


TTL_MIN: Final = 0.5  # seconds; with a smaller TTL, a short pause would count as a death
DISCONNECT_TTL: Final = 1.0  # seconds; the default of `disconnect_ttl`: reconnecting takes milliseconds
GONE_TTL_MIN: Final = 0.01  # seconds, also of `disconnect_ttl`; a few local round trips or a pause of Python take less
STALL_TIMEOUT_MIN: Final = 1.0  # seconds, also of `first_step_timeout`; a healthy machine may be busy for less
_NOT_SHOWN: Final = frozenset({Source.KEYWORD, Source.ENVIRONMENT})
_NO_TEXT: Final = frozenset({Source.KEYWORD, Source.RDZV_CONF})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checked settings of a handler.

    The repr has no secrets. `min_nodes` and `max_nodes` are None for an observer, which may not join.

    Raises:
        RendezvousSettingsError: A value is wrong, or two values contradict each other.
    """

    endpoint: Endpoint
    run_id: str

    # Completing a round.
    min_nodes: int | None = parameter(None, whole_number(1), aliases=("min_workers",), default_text="an observer")
    """The fewest nodes of a round; needed to join."""
    max_nodes: int | None = parameter(
        None, whole_number(1), aliases=("max_workers",), default_text="`min_nodes`", derive=lambda it: it.min_nodes
    )
    """The most nodes of a round; more are spares."""
    node_unit: int = parameter(1, whole_number(1))
    """The world size is a multiple of this."""
    unit_within: str | None = parameter(None, kinds.TEXT)
    """An attribute that all nodes of a unit share; their ranks are adjacent. Nodes outside full units are spares."""
    join_timeout: float = parameter(600.0, duration(), aliases=("timeout",))
    """The time limit of `next_rendezvous`; it does not run during a last call, or for spares."""
    last_call_timeout: float = parameter(30.0, duration())
    """Time to wait for more nodes once `min_nodes` have arrived."""
    early_last_call: bool = parameter(True, kinds.FLAG)
    """End the last call once no other node is known to be coming."""
    expected: tuple[str, ...] = parameter(None, kinds.NAMES, derive=lambda _: ())
    """Names of nodes that are reported missing until they arrive; give every node the same."""
    expected_file: str | None = parameter(None, kinds.PATH)
    """A file with more expected nodes, one per line; # begins a comment."""
    waits_end_on_loss: bool = parameter(True, kinds.FLAG)
    """Waits in the round's store end with `MembersLostError` when a member is lost; PyTorch's stores wait on."""

    # The end of a node or a run.
    close_timeout: float = parameter(30.0, duration())
    """Limits leaving and closing, and the time that a store stays up for other nodes."""
    store_gone_timeout: float = parameter(5.0, duration())
    """Time to wait for a new store once no process listens at the address of a store in memory."""
    closed_ttl: float = parameter(86400.0, duration(1.0, because=", long enough for every node to see it"))
    """Time for which a closed run is remembered."""
    ttl: float = parameter(
        10.0, duration(TTL_MIN, because=", below which a short pause would pass for a death", example="10")
    )
    """Time for which a silent node counts as alive; in a URL also `keep_alive_interval` x `keep_alive_max_attempt`."""
    disconnect_ttl: float = parameter(
        None,
        duration(GONE_TTL_MIN, because=", which a connection that was cut needs to come back", example="1"),
        default_text=f"{DISCONNECT_TTL:g} s, or `ttl` if that is less",
        derive=lambda it: min(DISCONNECT_TTL, it.ttl),
    )
    """Time for which a node counts as alive once its connection has closed; at most `ttl`."""
    gone_ttl: float = parameter(
        None,
        duration(GONE_TTL_MIN, because=", which a living process needs to come back", example=f"{GONE_TTL:g}"),
        default_text=f"{GONE_TTL:g} s, or `disconnect_ttl` if that is less",
        derive=lambda it: min(GONE_TTL, it.disconnect_ttl),
    )
    """Time for which a node counts as alive once all connections of its process have closed without a goodbye; at
    most `disconnect_ttl`, at least three round trips.
    """
    stall_timeout: float | None = parameter(
        None, duration(STALL_TIMEOUT_MIN, because=", which a busy machine may take", example="5m"), default_text="off"
    )
    """A live member counts as lost after this time without a step while others make steps; give every node the same
    ([failures.md](failures.md#alive-but-stuck)).
    """
    first_step_timeout: float | None = parameter(
        None, duration(STALL_TIMEOUT_MIN, because=", which a busy machine may take", example="5m"), default_text="off"
    )
    """As `stall_timeout`, for the first step of a round, which compiles and loads."""

    # The store, and access to it.
    prefix: str = parameter(
        None,
        kinds.PREFIX,
        aliases=("etcd_prefix",),
        default_text=f"{SCHEMES['tcp'].prefix} (etcd: {SCHEMES['etcd'].prefix})",
        derive=lambda it: it.endpoint.scheme_info.prefix,
    )
    """The prefix of all runs in the store."""
    is_host: bool | None = parameter(None, kinds.FLAG_OR_AUTO, default_text="auto")
    """Start the store in this node; auto: start it if the URL's host is this machine and no process listens there."""
    host: str = parameter("inside", kinds.HOST, family="tcp")
    """Run the store started here `inside` this process, or in a `process` of its own."""
    data_dir: str | None = parameter(None, kinds.PATH, family="tcp")
    """The directory of the store started here; without it, the store is in memory."""
    insecure: bool = parameter(False, kinds.FLAG)
    """The store started here is open to every client that reaches it."""
    limits: Limits | None = parameter(None, kinds.LIMITS, default_text="those of `rdzv serve`", family="tcp")
    """Limits of the store started here: `store.Limits`, or `keys_max:5000,leases_max:900` ([limits.md](limits.md))."""
    http_port: int | None = parameter(None, kinds.HTTP_PORT, family="tcp")
    """The port at which the store started here serves [HTTP](operating.md#http-health-metrics-and-a-page); needs the
    extra `http`.
    """
    metrics_port: int | None = parameter(None, kinds.HTTP_PORT)
    """This node's port for its [metrics](operating.md#http-health-metrics-and-a-page); needs the extra `http`."""
    token: str | bytes | None = parameter(None, kinds.SECRET, sources=_NOT_SHOWN, family="tcp", is_secret=True)
    """The shared secret; never in a URL."""
    token_file: str | None = parameter(None, kinds.PATH, family="tcp")
    """A file with the shared secret."""
    tls: Any = parameter(None, kinds.TLS, sources=_NO_TEXT)
    """An ssl.SSLContext instead of ca, cert and key."""
    ca: str | None = parameter(None, kinds.PATH, encrypted_only=True)
    """A file of certificates to trust."""
    cert: str | None = parameter(None, kinds.PATH, encrypted_only=True)
    """A file with this node's certificate."""
    key: str | None = parameter(None, kinds.PATH, encrypted_only=True)
    """A file with the private key of `cert`."""
    user: str | None = parameter(None, kinds.TEXT, family="etcd")
    """The user name in etcd."""
    password_file: str | None = parameter(None, kinds.PATH, family="etcd")
    """A file with etcd's password."""

    # This node, and its payload.
    node_id: str | None = parameter(None, kinds.NAME, default_text="made up")
    """This node's name; no two live nodes may share it."""
    address: str | None = parameter(None, kinds.ADDRESS, default_text="what the store sees")
    """The address at which other nodes reach this node."""
    master_port: str | None = parameter(None, kinds.PORTS, default_text="any free one")
    """The port at rank 0 where members meet, or a range ([networking.md](networking.md#ports))."""
    bootstrap_check: bool | None = parameter(
        None, kinds.FLAG, default_text="true under torchrun and `rdzv run`, else false"
    )
    """End a round if a member does not reach rank 0 within 5 s; leave that member out of the next, or change rank 0."""
    payload: Any = parameter(None, kinds.PAYLOAD)
    """Any small value, which all members can read."""
    attributes: Mapping[str, str] = parameter(None, kinds.ATTRIBUTES, derive=lambda _: MappingProxyType({}))
    """Names and values, such as rack:r1, by which nodes are ordered or banned."""
    rank_order: str | Callable[..., Any] = parameter("survivors", kinds.RANK_ORDER)
    """`survivors`, `survivors_then_name` (torchrun's default), `in_place`, `arrival`, `name`, `requested`, or
    `topology:ATTRIBUTE`."""
    requested_rank: int | None = parameter(None, whole_number(0))
    """The rank that this node requests, with `rank_order=requested`."""
    torch_store: str = parameter("rdzv", kinds.TORCH_STORE)
    """PyTorch's store: `rdzv`, or `tcp`, a TCPStore at rank 0 ([pytorch.md](pytorch.md))."""
    agent_store: bool | None = parameter(None, kinds.FLAG, default_text="true under torchrun, else false")
    """Rank 0's agent serves PyTorch's TCPStore at the port where members meet
    ([pytorch.md](pytorch.md#agent_store))."""
    health_check: Callable[..., Any] | None = parameter(None, kinds.FUNCTION, sources=_NO_TEXT)
    """A function called before joining; if it raises, or returns a reason, this node does not join."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_id", RUN_ID.read(self.run_id))
        for name, one in PARAMETERS.items():
            value = getattr(self, name)
            if value is not None and value is not one.default:
                object.__setattr__(self, name, one.read(value))
                if value is not False:
                    check_applies_to_store(one, self.endpoint)
            elif value is None and one.derive is not None:
                object.__setattr__(self, name, one.derive(self))
        check_consistent(self)

    @property
    def can_join(self) -> bool:
        """True if this node may join; False for an observer."""
        return self.min_nodes is not None

    @property
    def uses_tls(self) -> bool:
        """True if connections are encrypted, by the scheme or by `tls`."""
        return self.endpoint.scheme_info.is_encrypted or self.tls is not None

    @property
    def needed(self) -> int:
        """The fewest nodes of a round, as a multiple of `node_unit`; raises an error for an observer."""
        return min_in_whole_units(self._require_nodes(self.min_nodes), self.node_unit)

    @property
    def capacity(self) -> int:
        """The most nodes of a round, as a multiple of `node_unit`; raises an error for an observer."""
        return max_in_whole_units(self._require_nodes(self.max_nodes), self.node_unit)

    def _require_nodes(self, nodes: int | None) -> int:
        if nodes is None:
            refuse(
                f"min_nodes is missing, and a node that joins run {brief(self.run_id)} must say it; "
                f"write for example {self.endpoint.url}/{quote(self.run_id)}?min_nodes=2"
            )
        return nodes

    def shared(self) -> dict[str, Any]:
        """Return the settings on which all nodes of a run must agree, as plain data."""
        agreed = {name: _name_if_callable(getattr(self, name)) for name in _SHARED}
        given = {name: getattr(self, name) for name in _SHARED_IF_GIVEN}
        agreed |= {name: value for name, value in given.items() if value != PARAMETERS[name].default}
        return agreed | ({HOSTS: self.endpoint.url} if self.endpoint.has_successors else {})


_SHARED: Final = ("min_nodes", "max_nodes", "node_unit", "rank_order", "last_call_timeout", "early_last_call")
HOSTS: Final = "hosts"  # the key of the URL's hosts in `shared`, if there are several
# `Settings.shared` omits these at their defaults: nodes of earlier releases, which lack them, can then agree.
_SHARED_IF_GIVEN: Final = ("torch_store", "stall_timeout", "first_step_timeout", "unit_within")


def _name_if_callable(value: Any) -> Any:
    if not callable(value):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def describe_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return the differences of two results of `Settings.shared`: "min_nodes is 2 here and 3 in the run", or "".

    As nodes' releases may differ, a missing setting counts as its default, and an unknown setting is ignored.
    """
    known = [name for name in dict.fromkeys((*ours, *theirs)) if name in (*PARAMETERS, HOSTS)]
    default = {HOSTS: "a single host"} | {name: one.default for name, one in PARAMETERS.items()}
    here, there = ({name: given.get(name, default[name]) for name in known} for given in (ours, theirs))
    return ", ".join(
        f"{name} is {brief(here[name])} here and {brief(there[name])} in the run"
        for name in known
        if here[name] != there[name]
    )


PARAMETERS: Final[Mapping[str, Parameter]] = MappingProxyType(
    {
        declared.name: replace(declared.metadata["parameter"], name=declared.name)
        for declared in fields(Settings)
        if declared.metadata
    }
)

_BY_WRITTEN_NAME: Final[Mapping[str, Parameter]] = {
    written: parameter
    for parameter in (*PARAMETERS.values(), *KEEP_ALIVE.values())
    for written in (parameter.name, *parameter.aliases)
}

_IN_THE_ENVIRONMENT: Final[Mapping[str, str]] = {
    Source.ENVIRONMENT.name_of(name): name
    for name, parameter in PARAMETERS.items()
    if Source.ENVIRONMENT in parameter.sources
}

# Not a parameter: in every pod Kubernetes sets RDZV_HTTP_PORT=tcp://10.96.0.7:29401 for a Service called rdzv-http.
_LINK: Final = re.compile(r"(tcp|udp|sctp)://[^/?]+:[0-9]+$")

_RIVALS_OF: Final[Mapping[str, tuple[str, ...]]] = dict.fromkeys(("ca", "cert", "key"), ("tls",)) | {
    "token": ("token_file",),
    "token_file": ("token",),
    "tls": ("ca", "cert", "key"),
}


def parse(url: str, overrides: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Return the settings from the environment, the URL and the keywords; raise `RendezvousSettingsError` if wrong."""
    parts = split_url(url)
    endpoint = Endpoint.parse(parts.scheme, parts.authority)
    if not parts.run_id:
        refuse(f"the URL {brief(endpoint.url)} has no run_id; write for example {endpoint.url}/job-7")
    run_id = RUN_ID.read(parts.run_id, source=Source.URL)

    chosen: dict[str, Any] = {}
    for source, given in (
        (Source.ENVIRONMENT, _from_environment(environ)),
        (Source.URL, parts.parameters),
        (Source.KEYWORD, {name: value for name, value in overrides.items() if value is not None}),
    ):
        values = parse_all(given, source)
        for name in values:
            for rival in _RIVALS_OF.get(name, ()):
                chosen.pop(rival, None)
        chosen |= values
    settings = Settings(endpoint=endpoint, run_id=run_id, **chosen)
    if settings.can_join and settings.max_nodes != settings.capacity:
        _warn_once(
            f"max_nodes={settings.max_nodes} is no multiple of node_unit={settings.node_unit}: a round has at most "
            f"{settings.capacity} nodes, and more stay as spares; write max_nodes={settings.capacity} or "
            f"max_nodes={settings.capacity + settings.node_unit}"
        )
    return settings


@functools.cache
def _warn_once(sentence: str) -> None:
    """Warn once per process, as settings are often parsed more than once."""
    log.warning("%s", sentence)


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters in the environment, stripped: a secret from Kubernetes may end with a newline."""
    there = sorted(name for name in environ if name in _IN_THE_ENVIRONMENT and not _LINK.match(environ[name]))
    return {_IN_THE_ENVIRONMENT[variable]: environ[variable].strip() for variable in there}


def parse_all(given: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return the checked values of one place, by parameter name."""
    values: dict[str, Any] = {}
    written_as: dict[str, str] = {}
    for written, raw in given.items():
        parameter = find_parameter(written, source)
        value = parameter.read(raw, source=source, written=written)
        first = written_as.get(parameter.name)
        if first is not None and values[parameter.name] != value:
            _raise_contradiction(f"{first}={brief(given[first])} and {written}={brief(raw)}", source)
        values[parameter.name], written_as[parameter.name] = value, written
    if values.keys() & KEEP_ALIVE.keys():
        interval, attempts = (values.pop(name, parameter.default) for name, parameter in KEEP_ALIVE.items())
        written = " x ".join(KEEP_ALIVE)
        product = PARAMETERS["ttl"].read(round(interval * attempts, 9), source=source, written=written)
        if values.setdefault("ttl", product) != product:
            _raise_contradiction(f"ttl={values['ttl']:g} and {written}={product:g}", source)
    return values


def _raise_contradiction(both: str, source: Source) -> NoReturn:
    refuse(f"{both}{source.value} mean the same and must not differ; leave one out")


def find_parameter(written: str, source: Source) -> Parameter:
    """Return the parameter with this name in this place, or raise an error."""
    parameter = _BY_WRITTEN_NAME.get(written)
    if parameter is None:
        refuse(
            f"there is no parameter {brief(written)}{source.value}{suggest(written, PARAMETERS, within=0.3)}; "
            f"the parameters are {', '.join(PARAMETERS)}"
        )
    if source is Source.KEYWORD and written not in PARAMETERS:
        name = "ttl" if written in KEEP_ALIVE else parameter.name
        refuse(f"there is no keyword {written}, which is an older name for URLs and --rdzv-conf; write {name}")
    if source not in parameter.sources and parameter.is_secret:
        refuse(
            f"{written} was given{source.value}, which is shown in process lists, and secrets do not belong there; "
            f"put it into a file and name that: {written}_file={PARAMETERS[f'{written}_file'].kind.example}"
        )
    if source not in parameter.sources:
        refuse(f"{written} in the URL must be {parameter.kind.limit}, which text cannot be; give it as a keyword")
    return parameter
