"""What the user chooses, from keywords, a URL or the environment: checked once, frozen after.

    tcp://head:29400/job-7?min_nodes=2&max_nodes=4
    ─┬─   ────┬─────  ─┬──  ──────────┬──────────
   scheme  endpoint  run_id       parameters

`Settings` holds what was chosen. `PARAMETERS` says of each field what it may be and what it is for, and
drives `parse`, the documentation and the command line alike. One parameter may be given in three places, and
the more deliberate place wins:

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

import difflib
import ipaddress
import operator
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from enum import Enum
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final, NoReturn
from urllib.parse import quote, unquote

import msgpack

from rdzv.errors import RendezvousSettingsError

__all__ = [
    "ATTRIBUTES_BYTES_MAX",
    "NAME_LENGTH_MAX",
    "PARAMETERS",
    "PAYLOAD_BYTES_MAX",
    "RANK_ORDERS",
    "SCHEMES",
    "Endpoint",
    "Kind",
    "Parameter",
    "Scheme",
    "Settings",
    "Source",
    "UrlParts",
    "describe_difference",
    "parse",
    "split_url",
]

PAYLOAD_BYTES_MAX: Final = 4096
"""As msgpack. The coordinator holds every node's payload in memory: 10,000 of this size are 40 MB."""

ATTRIBUTES_BYTES_MAX: Final = 1024
"""As msgpack. A rack, a zone and a host take a tenth of it; whatever is larger is a payload."""

NAME_LENGTH_MAX: Final = 255
"""In characters, for run and node ids: as long as a file name may be, well below a store's limit for keys."""

NODES_MAX: Final = 1_000_000
"""A hundred times the largest run we measure. A count beyond it is a slip of the keyboard."""

TTL_MIN: Final = 0.5
"""In seconds. Leases are renewed several times per TTL; below this, a pause of 0.3 s (a garbage collection, a
busy hypervisor, one lost packet and its retransmission) would pass for a death."""

DISCONNECT_TTL: Final = 1.0
"""In seconds. Reconnecting takes milliseconds: a process disconnected for this long is taken to be gone."""

DURATION_MAX: Final = 1e9
"""In seconds, 31 years: within what threads (`threading.TIMEOUT_MAX`) and etcd leases take, 9e9 each."""

KEEP_ALIVE_INTERVAL: Final = 5.0
KEEP_ALIVE_MAX_ATTEMPT: Final = 3
"""What PyTorch's `dynamic_rendezvous.create_handler` takes for the one of the pair that is not given."""

RANK_ORDERS: Final = ("survivors", "arrival", "name", "requested", "topology")
"""The orders that have a name; `topology:rack` says which attribute holds the domain."""

WORDS_FOR_TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
WORDS_FOR_FALSE: Final = frozenset({"0", "false", "f", "no", "n", "off"})

DERIVED: Final[Any] = None
"""Stands for a default that depends on other settings; `Parameter.derive` works it out."""


def _fail(message: str) -> NoReturn:
    """Raise what this room raises; lets an expression end in an error."""
    raise RendezvousSettingsError(message)


def _shown(value: object) -> str:
    """Return the value as an error shows it: literally, but not at any length."""
    return _brief.repr(value)


_brief: Final = reprlib.Repr()
_brief.maxstring = _brief.maxother = 80


# ----------------------------------------------------------------------------------------------------------
# What a value may be.


class _Unfit(ValueError):  # noqa: N818  never leaves this module
    """Raised by a `Kind` that can say more than its limit does."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a parameter's value may be.

    Attributes:
        limit: Completes "it must be ...".
        convert: Returns the value in its one true form, from text or from that form itself, so that
            converting twice changes nothing. Raises `ValueError` or `TypeError` for anything else.
    """

    limit: str
    convert: Callable[[Any], Any]


def _whole_number(at_least: int) -> Kind:
    def convert(raw: Any) -> int:
        if isinstance(raw, bool):
            raise TypeError
        number = int(raw) if isinstance(raw, str) else operator.index(raw)
        if not at_least <= number <= NODES_MAX:
            raise ValueError
        return number

    return Kind(f"a whole number from {at_least} to {NODES_MAX}", convert)


def _duration(at_least: float = 0.0, *, because: str = "") -> Kind:
    def convert(raw: Any) -> float:
        if isinstance(raw, bool):
            raise TypeError
        seconds = float(raw)
        if not at_least <= seconds <= DURATION_MAX:  # false for NaN, too
            raise ValueError
        return seconds

    return Kind(f"a number of seconds from {at_least:g} to {DURATION_MAX:.0f}{because}", convert)


def _flag(raw: Any) -> bool:
    word = str(raw).lower()
    if word not in WORDS_FOR_TRUE | WORDS_FOR_FALSE:
        raise ValueError
    return word in WORDS_FOR_TRUE


def _flag_or_auto(raw: Any) -> bool | None:
    return None if raw == "auto" else _flag(raw)


def _text(raw: Any) -> str:
    """Return text that is there and can be seen: no control characters, no lone surrogates."""
    if not isinstance(raw, str):
        raise TypeError
    if not raw or not raw.isprintable():
        raise ValueError
    return raw


def _name(raw: Any) -> str:
    name = _text(raw)
    if "/" in name or len(name) > NAME_LENGTH_MAX:
        raise ValueError
    return name


def _path(raw: Any) -> str:
    return _text(str(raw) if isinstance(raw, PurePath) else raw)


def _prefix(raw: Any) -> str:
    # One slash before, none behind: "rdzv", "/rdzv" and "/rdzv/" must be one place, or nodes would not meet.
    return "/" + _text(_text(raw).strip("/"))


def _address(raw: Any) -> str:
    address = _text(raw)
    if address.startswith("[") and address.endswith("]"):
        address = address[1:-1]
    if len(address) > NAME_LENGTH_MAX or not re.fullmatch(r"[\w.%-]+|[^:\s/]*:[^:\s/]*:[^\s/]*", address):
        raise ValueError
    return address


def _secret(raw: Any) -> str | bytes:
    if not isinstance(raw, str | bytes):
        raise TypeError
    if not raw:
        raise ValueError
    return raw


def _payload(raw: Any) -> Any:
    # Through msgpack and back: a later change to the caller's object does not reach us, and a node reads of
    # itself exactly what the others will read of it.
    try:
        packed = msgpack.packb(raw)
        copy = msgpack.unpackb(packed, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _Unfit(f"msgpack cannot carry it ({error})") from error
    if len(packed) > PAYLOAD_BYTES_MAX:
        raise _Unfit(f"it has {len(packed)}")
    return copy


def _attributes(raw: Any) -> Mapping[str, str]:
    pairs = [item.split(":", 1) for item in raw.split(",")] if isinstance(raw, str) else Mapping.items(raw)
    attributes: dict[str, str] = {}
    for name, value in pairs:
        if _text(name) in attributes:
            raise _Unfit(f"{name!r} is there twice")
        attributes[name] = _text(value)
    if len(msgpack.packb(attributes)) > ATTRIBUTES_BYTES_MAX:
        raise _Unfit("these are more")
    return MappingProxyType(attributes)


def _rank_order(raw: Any) -> str | Callable[..., Any]:
    if not isinstance(raw, str):
        return _function(raw)
    _, colon, attribute = raw.partition(":")
    if raw not in RANK_ORDERS and not (raw.startswith("topology:") and attribute):
        raise ValueError(colon)
    return raw


def _function(raw: Any) -> Callable[..., Any]:
    if not callable(raw):
        raise TypeError
    function: Callable[..., Any] = raw
    return function


def _tls_context(raw: Any) -> Any:
    # By what it can do: importing ssl here would bring sockets into a pure room.
    if not hasattr(raw, "wrap_bio"):
        raise TypeError
    return raw


_FLAG: Final = Kind("one of 1, 0, true, false, yes, no, on, off", _flag)
_FLAG_OR_AUTO: Final = Kind("one of auto, 1, 0, true, false, yes, no, on, off", _flag_or_auto)
_NAME: Final = Kind(
    f'1 to {NAME_LENGTH_MAX} printable characters without "/", which separates the parts of a key', _name
)
_TEXT: Final = Kind("text that is not empty, in printable characters", _text)
_PATH: Final = Kind("the path of a file or directory, not empty", _path)
_PREFIX: Final = Kind("the beginning of a key, in printable characters and more than slashes", _prefix)
_ADDRESS: Final = Kind("a host name or an IP address, without a port", _address)
_SECRET: Final = Kind("text or bytes, not empty", _secret)
_PAYLOAD: Final = Kind(f"at most {PAYLOAD_BYTES_MAX} bytes of msgpack", _payload)
_ATTRIBUTES: Final = Kind(
    f"names and values, both text and not empty, in at most {ATTRIBUTES_BYTES_MAX} bytes of msgpack",
    _attributes,
)
_RANK_ORDER: Final = Kind(f"one of {', '.join(RANK_ORDERS)}, topology:ATTRIBUTE, or a function", _rank_order)
_FUNCTION: Final = Kind("a function", _function)
_TLS: Final = Kind("an ssl.SSLContext", _tls_context)


# ----------------------------------------------------------------------------------------------------------
# Where a value comes from.


class Source(Enum):
    """A place in which a parameter may be given; the value completes "ttl=0 ... must be"."""

    ENVIRONMENT = " in the environment"
    URL = " in the URL"
    KEYWORD = ""

    def spell(self, name: str) -> str:
        """Return the parameter's name as it is written in this place."""
        return f"RDZV_{name.upper()}" if self is Source.ENVIRONMENT else name


@dataclass(frozen=True, slots=True)
class Parameter:
    """One thing the user can choose.

    Attributes:
        name: Its name, the same as the field of `Settings`.
        kind: What it may be.
        example: A value that would do, for the remedy in an error.
        help: What it is for, in one line.
        default: What it is when not given; `default_text` says so in words, where the default is derived.
        derive: Works out the default from the other settings.
        aliases: Older names that mean the same.
        sources: The places it may be given in.
        family: The kind of store it is for, "tcp" or "etcd"; empty if any.
        encrypted_only: Whether it is for `tcps` and `etcds` only.
        is_secret: Whether its value must not be shown.
    """

    name: str
    kind: Kind
    example: str
    help: str
    _: KW_ONLY
    default: Any = None
    default_text: str = ""
    derive: Callable[[Settings], Any] | None = None
    aliases: tuple[str, ...] = ()
    sources: frozenset[Source] = frozenset(Source)
    family: str = ""
    encrypted_only: bool = False
    is_secret: bool = False

    def read(self, raw: object, *, source: Source = Source.KEYWORD, written: str = "") -> Any:
        """Return the value in its one true form; `source` and `written` say where and how it was given.

        Raises:
            RendezvousSettingsError: It is not what this parameter may be.
        """
        try:
            return self.kind.convert(raw)
        except (ValueError, TypeError, OverflowError) as error:
            written = source.spell(written or self.name)
            value = "(not shown)" if self.is_secret else _shown(raw)
            detail = f", but {error}" if isinstance(error, _Unfit) else ""
            raise RendezvousSettingsError(
                f"{written}={value}{source.value} must be {self.kind.limit}{detail}; "
                f"write for example {source.spell(self.name)}={self.example}"
            ) from None


# ----------------------------------------------------------------------------------------------------------
# Where the store is.


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What the first word of a URL implies.

    Attributes:
        family: "tcp" for our own store, "etcd" for a cluster.
        is_encrypted: Whether connections use TLS.
        port: Where the store listens unless the URL says otherwise.
        prefix: Where runs are kept unless `prefix` says otherwise.
        takes_many_hosts: Whether the URL may list several.
    """

    family: str
    is_encrypted: bool
    port: int
    prefix: str
    takes_many_hosts: bool


# 29400 and /torchelastic/p2p are PyTorch's own defaults, 2379 is etcd's.
_TCP: Final = Scheme(family="tcp", is_encrypted=False, port=29400, prefix="/rdzv", takes_many_hosts=False)
_ETCD: Final = Scheme(family="etcd", is_encrypted=False, port=2379, prefix="/torchelastic/p2p", takes_many_hosts=True)
SCHEMES: Final[Mapping[str, Scheme]] = MappingProxyType(
    {
        "tcp": _TCP,
        "tcps": replace(_TCP, is_encrypted=True),
        "etcd": _ETCD,
        "etcds": replace(_ETCD, is_encrypted=True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the store is.

    Attributes:
        scheme: One of `SCHEMES`.
        hosts: Names or addresses, without brackets, each with its port. Only an etcd cluster has several.
    """

    scheme: str
    hosts: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            _fail(
                f"the scheme {_shown(self.scheme)} is not one of {', '.join(SCHEMES)}"
                f"{_suggest(self.scheme, SCHEMES)}; write for example tcp://head:29400/job-7, "
                f"or register a backend of that name with rdzv.register"
            )
        if len(self.hosts) != 1 and not (self.hosts and self.info.takes_many_hosts):
            _fail(
                f"{self.scheme} has exactly one host, not {len(self.hosts)}: "
                f"name the one that the store runs on (an etcd cluster may list several)"
            )

    @classmethod
    def parse(cls, scheme: str, authority: str) -> Endpoint:
        """Read what stands between "//" and the next "/" of a URL.

        Raises:
            RendezvousSettingsError: It is not a list of hosts, or more hosts than the scheme takes.
        """
        endpoint = cls(scheme=scheme, hosts=(("unread", 0),))  # an unknown scheme is the first thing to say
        if "@" in authority:  # not shown: what precedes it may be a password
            _fail(
                'the URL\'s host contains "@", but users and passwords do not belong into a URL, which is '
                "shown in process lists; give user= and password_file= for etcd, token_file= for tcp"
            )
        hosts = authority.split(",")
        return replace(endpoint, hosts=tuple(_host_and_port(host, endpoint.info.port) for host in hosts))

    @property
    def info(self) -> Scheme:
        """What the scheme implies."""
        return SCHEMES[self.scheme]

    @property
    def url(self) -> str:
        """The endpoint as a URL, without run or parameters; what `store.connect` takes."""
        hosts = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{self.scheme}://{','.join(hosts)}"


_HOST_AND_PORT: Final = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(:(?P<port>.*))?", re.DOTALL)


def _host_and_port(text: str, default_port: int) -> tuple[str, int]:
    match = _HOST_AND_PORT.fullmatch(text)
    host = unquote(match["host"]) if match else ""
    if host.startswith("["):
        host = host[1:-1]
        is_host = _is_ipv6(host)
    else:
        is_host = re.fullmatch(r"[\w.-]+", host) is not None
    if not match or not is_host:
        _fail(
            f"{_shown(text)} in the URL must be a host name or an IP address, and perhaps a port; "
            f"write for example head:29400, and IPv6 addresses in brackets: [::1]:29400"
        )
    port = match["port"]
    if port is None:
        return host, default_port
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        _fail(
            f"the port {_shown(port)} of {_shown(host)} in the URL must be a whole number from 1 to 65535; "
            f"leave it out for {default_port}"
        )
    return host, int(port)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------
# The settings.


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
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    early_last_call: bool = True

    # When a node or a run is over.
    close_timeout: float = 30.0
    closed_ttl: float = 86400.0
    ttl: float = 10.0
    disconnect_ttl: float = DERIVED

    # Where the store is kept, and who may use it.
    prefix: str = DERIVED
    is_host: bool | None = None
    data_dir: str | None = None
    insecure: bool = False
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
    payload: Any = None
    attributes: Mapping[str, str] = DERIVED
    rank_order: str | Callable[..., Any] = "survivors"
    requested_rank: int | None = None
    health_check: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_id", _RUN_ID.read(self.run_id))
        for parameter in PARAMETERS.values():
            value = getattr(self, parameter.name)
            if value is not None:
                object.__setattr__(self, parameter.name, parameter.read(value))
        for parameter in PARAMETERS.values():
            if getattr(self, parameter.name) is None and parameter.derive:
                object.__setattr__(self, parameter.name, parameter.derive(self))
        for parameter in PARAMETERS.values():
            if getattr(self, parameter.name) not in (None, False):
                _check_that_it_applies(parameter, self.endpoint)
        for is_broken, sentence in _RULES:
            if is_broken(self):
                _fail(sentence.format(self))

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
        return _rounded_up(self._joiner(self.min_nodes), self.node_unit)

    @property
    def capacity(self) -> int:
        """The most nodes that fit in a round: the maximum, rounded down to a unit.

        Raises:
            RendezvousSettingsError: This is an observer.
        """
        return self._joiner(self.max_nodes) // self.node_unit * self.node_unit

    def _joiner(self, nodes: int | None) -> int:
        if nodes is None:
            _fail(
                f"min_nodes is missing, and a node that joins run {_shown(self.run_id)} must say it; "
                f"write for example {self.endpoint.url}/{quote(self.run_id)}?min_nodes=2"
            )
        return nodes

    def shared(self) -> dict[str, Any]:
        """Return, as plain data, what all nodes of a run must agree on, and what is stored once with it."""
        return {name: _plain(getattr(self, name)) for name in _SHARED}


_SHARED: Final = (
    "min_nodes",
    "max_nodes",
    "node_unit",
    "rank_order",
    "last_call_timeout",
    "early_last_call",
)


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

    Returns:
        One clause for each difference, and an empty text if there is none.
    """
    return ", ".join(
        f"{name} is {_shown(ours.get(name))} here and {_shown(theirs.get(name))} in the run"
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
    )


_NOT_IN_A_URL: Final = frozenset({Source.KEYWORD, Source.ENVIRONMENT})
_KEYWORD_ONLY: Final = frozenset({Source.KEYWORD})

_TABLE: Final = (
    Parameter(
        "min_nodes",
        _whole_number(1),
        "2",
        "the fewest nodes a round may have; needed to join",
        aliases=("min_workers",),
    ),
    Parameter(
        "max_nodes",
        _whole_number(1),
        "4",
        "the most nodes a round may have; more stay as spares",
        aliases=("max_workers",),
        default_text="min_nodes",
        derive=lambda it: it.min_nodes,
    ),
    Parameter("node_unit", _whole_number(1), "1", "the world size is a multiple of this"),
    Parameter(
        "join_timeout",
        _duration(),
        "600",
        "seconds after which joining fails if too few nodes came",
        aliases=("timeout",),
    ),
    Parameter("last_call_timeout", _duration(), "30", "seconds to wait for more nodes once min_nodes are in"),
    Parameter("early_last_call", _FLAG, "true", "end the last call once nobody else is known to be coming"),
    Parameter("close_timeout", _duration(), "30", "seconds that leaving and closing may take"),
    Parameter(
        "closed_ttl",
        _duration(1.0, because=", long enough for every node to see it"),
        "86400",
        "seconds for which a closed run is remembered",
    ),
    Parameter(
        "ttl",
        _duration(TTL_MIN, because=", below which a short pause would pass for a death"),
        "10",
        "seconds for which a silent node counts as alive; also keep_alive_interval x keep_alive_max_attempt",
    ),
    Parameter(
        "disconnect_ttl",
        _duration(),
        "1",
        "seconds for which a disconnected node counts as alive; at most ttl",
        default_text=f"{DISCONNECT_TTL:g}, or ttl if that is less",
        derive=lambda it: min(DISCONNECT_TTL, it.ttl),
    ),
    Parameter(
        "prefix",
        _PREFIX,
        "/rdzv",
        "where in the store runs are kept",
        aliases=("etcd_prefix",),
        default_text=f"{_TCP.prefix} (etcd: {_ETCD.prefix})",
        derive=lambda it: it.endpoint.info.prefix,
    ),
    Parameter(
        "is_host",
        _FLAG_OR_AUTO,
        "true",
        "whether to start the store here; auto: if the host is this machine and nobody listens",
        default_text="auto",
    ),
    Parameter(
        "data_dir",
        _PATH,
        "/var/lib/rdzv",
        "where the store started here keeps its data; in memory only without",
        family="tcp",
    ),
    Parameter("insecure", _FLAG, "true", "let the store started here be open to all who can reach it"),
    Parameter(
        "token",
        _SECRET,
        "...",
        "the shared secret itself; never in a URL",
        sources=_NOT_IN_A_URL,
        family="tcp",
        is_secret=True,
    ),
    Parameter("token_file", _PATH, "/run/secrets/rdzv", "a file with the shared secret", family="tcp"),
    Parameter(
        "tls",
        _TLS,
        "ssl.create_default_context()",
        "an ssl.SSLContext, instead of ca, cert and key; turns TLS on",
        sources=_KEYWORD_ONLY,
    ),
    Parameter("ca", _PATH, "/etc/rdzv/ca.pem", "a file with the certificates to trust", encrypted_only=True),
    Parameter("cert", _PATH, "/etc/rdzv/cert.pem", "a file with our certificate", encrypted_only=True),
    Parameter("key", _PATH, "/etc/rdzv/key.pem", "a file with its private key", encrypted_only=True),
    Parameter("user", _TEXT, "rdzv", "who to be in etcd", family="etcd"),
    Parameter("password_file", _PATH, "/run/secrets/etcd", "a file with etcd's password", family="etcd"),
    Parameter(
        "node_id",
        _NAME,
        "host10",
        "what this node is called; no two alive may share it",
        default_text="made up",
    ),
    Parameter(
        "address",
        _ADDRESS,
        "10.0.0.7",
        "where the others reach this node",
        default_text="what the store sees",
    ),
    Parameter("payload", _PAYLOAD, "8xH100", "anything small that every member may read"),
    Parameter(
        "attributes",
        _ATTRIBUTES,
        "rack:r1,zone:z2",
        "what an order by topology goes by",
        default_text="none",
        derive=lambda _: MappingProxyType({}),
    ),
    Parameter("rank_order", _RANK_ORDER, "topology:rack", "who gets which rank"),
    Parameter("requested_rank", _whole_number(0), "0", "the rank to ask for, with rank_order=requested"),
    Parameter(
        "health_check",
        _FUNCTION,
        "check_gpus",
        "is called before joining; a node that fails it stays out",
        sources=_KEYWORD_ONLY,
    ),
)

_DEFAULTS: Final = {declared.name: declared.default for declared in fields(Settings)}

PARAMETERS: Final[Mapping[str, Parameter]] = MappingProxyType(
    {parameter.name: replace(parameter, default=_DEFAULTS[parameter.name]) for parameter in _TABLE}
)
"""Every parameter by name, in the order in which `Settings` declares them."""

assert ["endpoint", "run_id", *PARAMETERS] == [*_DEFAULTS], "each field of Settings has its line in the table"

_RUN_ID: Final = Parameter("run_id", _NAME, "job-7", "which run to join")

_KEEP_ALIVE: Final = {
    "keep_alive_interval": Parameter(
        "keep_alive_interval", _duration(), "5", "PyTorch's first half of ttl", default=KEEP_ALIVE_INTERVAL
    ),
    "keep_alive_max_attempt": Parameter(
        "keep_alive_max_attempt",
        _whole_number(1),
        "3",
        "PyTorch's second half of ttl",
        default=KEEP_ALIVE_MAX_ATTEMPT,
    ),
}

_BY_WRITTEN_NAME: Final[Mapping[str, Parameter]] = {
    written: parameter
    for parameter in (*PARAMETERS.values(), *_KEEP_ALIVE.values())
    for written in (parameter.name, *parameter.aliases)
}

_RIVALS: Final = (
    ({"token"}, {"token_file"}),
    ({"tls"}, {"ca", "cert", "key"}),
    ({"ttl"}, {*_KEEP_ALIVE}),
)


def _rounded_up(nodes: int, unit: int) -> int:
    return -(-nodes // unit) * unit


def _check_that_it_applies(parameter: Parameter, endpoint: Endpoint) -> None:
    """Refuse what this kind of store would ignore: whoever set it believes that it does something."""
    if parameter.family not in ("", endpoint.info.family):
        _fail(
            f"{parameter.name} is for {parameter.family} and {parameter.family}s, but the scheme is "
            f"{endpoint.scheme}; leave out {parameter.name} (and RDZV_{parameter.name.upper()}), "
            f"or use a {parameter.family} store"
        )
    if parameter.encrypted_only and not endpoint.info.is_encrypted:
        _fail(
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
        "token and token_file={0.token_file!r} are both given, but only one can be the secret; leave one out",
    ),
    (
        lambda it: it.tls is not None and any((it.ca, it.cert, it.key)),
        (
            "tls and ca={0.ca!r}, cert={0.cert!r}, key={0.key!r} are given, but an SSLContext holds it all; "
            "leave out the one or the others"
        ),
    ),
    (
        lambda it: it.cert is not None and it.key is None,
        "cert={0.cert!r} is of no use without its private key; give key as well",
    ),
    (
        lambda it: it.key is not None and it.cert is None,
        "key={0.key!r} is of no use without its certificate; give cert as well",
    ),
    (
        lambda it: it.password_file is not None and it.user is None,
        "password_file={0.password_file!r} does not say whose password it is; give user as well",
    ),
    (
        lambda it: it.user is not None and it.password_file is None,
        "user={0.user!r} cannot log in without a password; give password_file as well",
    ),
)


# ----------------------------------------------------------------------------------------------------------
# From text to settings.


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlParts:
    """A URL taken apart, percent-decoded, and not yet judged; this is all a foreign backend needs of it.

    Attributes:
        authority: The hosts and ports, as written.
        run_id: Perhaps empty.
        parameters: In the order written; no name is there twice.
    """

    scheme: str
    authority: str
    run_id: str
    parameters: Mapping[str, str]


# RFC 3986, appendix B, with the underscore that PyTorch allows in names of backends. `urllib.parse.urlsplit`
# will not do: it drops newlines and tabs in silence, and not every version takes a list of IPv6 hosts.
_URL: Final = re.compile(
    r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<authority>[^/?#]*)(?P<path>/[^?#]*)?(\?(?P<query>[^#]*))?", re.ASCII
)


def split_url(url: str) -> UrlParts:
    """Take `scheme://host[:port]/run_id?parameters` apart.

    A "+" is a plus sign: these URLs are typed, not sent by forms.

    Raises:
        RendezvousSettingsError: It does not have that shape, or says one parameter twice.
    """
    # Up to the parameters, and without what may be a password: all of a URL that an error may show.
    visible = _shown(url.partition("?")[0] if "@" not in url else "...")
    if "://" not in url:
        _fail(f"the URL {visible} has no scheme; write for example tcp://head:29400/job-7")
    match = _URL.fullmatch(url)
    if not match or not url.isprintable() or " " in url:
        _fail(
            f"the URL {visible} must be scheme://host[:port]/run_id?parameters; "
            f"write %20, %23 and so on for blanks, # and other special characters"
        )
    if not match["authority"]:
        _fail(f"the URL {visible} has no host; write for example {match['scheme']}://head:29400/job-7")
    parameters: dict[str, str] = {}
    for item in filter(None, (match["query"] or "").split("&")):
        name, equals, value = item.partition("=")
        if not name or not equals:
            _fail(f"{_shown(item)} in the URL must be a parameter and its value; write {name or 'name'}=VALUE")
        if name in parameters:
            _fail(f"{name} is in the URL twice, with one value too many; leave one out")
        parameters[name] = _unquoted(value, name)
    return UrlParts(
        scheme=match["scheme"].lower(),
        authority=match["authority"],
        run_id=_unquoted((match["path"] or "/")[1:], "run_id"),
        parameters=parameters,
    )


def _unquoted(text: str, name: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        _fail(f"{name} in the URL must be UTF-8 behind its percent signs; write %C3%A4 for ä, for example")


def parse(url: str, overrides: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Put together what the environment, the URL and the keywords of `connect` say.

    Raises:
        RendezvousSettingsError: Anything is wrong with any of it.
    """
    parts = split_url(url)
    endpoint = Endpoint.parse(parts.scheme, parts.authority)
    if not parts.run_id:
        _fail(f"the URL {_shown(endpoint.url)} has no run_id; write for example {endpoint.url}/job-7")
    run_id = _RUN_ID.read(parts.run_id, source=Source.URL)

    chosen: dict[str, Any] = {}
    for source, given in (
        (Source.ENVIRONMENT, _from_environment(environ)),
        (Source.URL, parts.parameters),
        (Source.KEYWORD, {name: value for name, value in overrides.items() if value is not None}),
    ):
        _overlay(chosen, _read(given, source))
    keep_alive = {name: chosen.pop(name) for name in _KEEP_ALIVE if name in chosen}
    if keep_alive:
        written = " x ".join(_KEEP_ALIVE)
        chosen["ttl"] = PARAMETERS["ttl"].read(_keep_alive_ttl(keep_alive), written=written)
    return Settings(endpoint=endpoint, run_id=run_id, **chosen)


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the environment says about the parameters it may set; all else there is left alone."""
    spelled = {
        written: Source.ENVIRONMENT.spell(written)
        for written, parameter in _BY_WRITTEN_NAME.items()
        if Source.ENVIRONMENT in parameter.sources
    }
    return {written: environ[variable] for written, variable in spelled.items() if variable in environ}


def _read(given: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return what one source says, checked, by the parameters' own names."""
    values: dict[str, Any] = {}
    written_as: dict[str, str] = {}
    for written, raw in given.items():
        parameter = _look_up(written, source)
        value = parameter.read(raw, source=source, written=written)
        if values.setdefault(parameter.name, value) != value:
            first = written_as[parameter.name]
            _contradiction(f"{first}={_shown(given[first])} and {written}={_shown(raw)}", source)
        written_as[parameter.name] = written
    if "ttl" in values and values.keys() & _KEEP_ALIVE.keys():
        product = _keep_alive_ttl(values)
        if values["ttl"] != product:
            _contradiction(f"ttl={values['ttl']:g} and {' x '.join(_KEEP_ALIVE)}={product:g}", source)
        values = {name: value for name, value in values.items() if name not in _KEEP_ALIVE}
    return values


def _contradiction(both: str, source: Source) -> NoReturn:
    _fail(f"{both}{source.value} mean the same and must not differ; leave one out")


def _keep_alive_ttl(values: Mapping[str, Any]) -> float:
    interval, attempts = (values.get(name, parameter.default) for name, parameter in _KEEP_ALIVE.items())
    return float(interval * attempts)


def _overlay(chosen: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Let what a stronger source says replace the same parameters of weaker ones, and their rivals."""
    for one, other in _RIVALS:
        for mine, theirs in ((one, other), (other, one)):
            if mine & values.keys():
                for name in theirs:
                    chosen.pop(name, None)
    chosen.update(values)


def _look_up(written: str, source: Source) -> Parameter:
    parameter = _BY_WRITTEN_NAME.get(written)
    if parameter is None:
        _fail(
            f"there is no parameter {_shown(written)}{source.value}{_suggest(written, _BY_WRITTEN_NAME)}; "
            f"the parameters are {', '.join(PARAMETERS)}"
        )
    if source in parameter.sources:
        return parameter
    if parameter.is_secret:
        _fail(
            f"{written} was given in the URL, but secrets do not belong into a URL, which is shown in "
            f"process lists; put it into a file and name that: "
            f"{written}_file={PARAMETERS[f'{written}_file'].example}"
        )
    _fail(f"{written} in the URL must be {parameter.kind.limit}, which text cannot be; give it as a keyword")


def _suggest(name: str, known: Mapping[str, object]) -> str:
    """Return ", did you mean ...?" in brackets if there is a name so close that one may ask."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
