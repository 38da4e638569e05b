"""Every parameter: its name, what it may be, where it may be given, and what it is for.

`TABLE` drives the reading of URLs, keywords and the environment, the documentation and the command line alike. Its
lines are the fields of `settings.Settings`, in the same order; the defaults are stated there.

This room is pure.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from rdzv.config import value_types
from rdzv.config.config_errors import shown
from rdzv.config.endpoint import SCHEMES
from rdzv.config.value_types import duration, whole_number
from rdzv.errors import RendezvousSettingsError
from store.messages import GONE_TTL

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KEEP_ALIVE", "RUN_ID", "TABLE", "Parameter", "Source"]

TTL_MIN: Final = 0.5
"""In seconds. Leases are renewed several times per TTL; below this, a pause of 0.3 s (a garbage collection, a
busy hypervisor, one lost packet and its retransmission) would pass for a death."""

DISCONNECT_TTL: Final = 1.0
"""In seconds. Reconnecting takes milliseconds: a process disconnected for this long is taken to be gone."""

GONE_TTL_MIN: Final = 0.01
"""In seconds: a few round trips in one building, and a pause of the interpreter."""

STALL_TIMEOUT_MIN: Final = 1.0
"""In seconds. A step may be short, and a machine that is busy for a moment is not stuck."""

KEEP_ALIVE_INTERVAL: Final = 5.0
KEEP_ALIVE_MAX_ATTEMPT: Final = 3
"""What PyTorch's `dynamic_rendezvous.create_handler` takes for the one of the pair that is not given."""


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
        derive: Works out the default from the other settings, which it is given as a `settings.Settings`.
        aliases: Older names that mean the same.
        sources: The places it may be given in.
        family: The kind of store it is for, "tcp" or "etcd"; empty if any.
        encrypted_only: Whether it is for `tcps` and `etcds` only.
        is_secret: Whether its value must not be shown.
    """

    name: str
    kind: value_types.Kind
    example: str
    help: str
    _: KW_ONLY
    default: Any = None
    default_text: str = ""
    derive: Callable[[Any], Any] | None = None
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
            value = "(not shown)" if self.is_secret else shown(raw)
            detail = f", but {error}" if isinstance(error, value_types.Unfit) else ""
            raise RendezvousSettingsError(
                f"{written}={value}{source.value} must be {self.kind.limit}{detail}; "
                f"write for example {source.spell(self.name)}={self.example}"
            ) from None


_NOT_IN_A_URL: Final = frozenset({Source.KEYWORD, Source.ENVIRONMENT})
_KEYWORD_ONLY: Final = frozenset({Source.KEYWORD})

TABLE: Final = (
    Parameter(
        "min_nodes",
        whole_number(1),
        "2",
        "the fewest nodes a round may have; needed to join",
        aliases=("min_workers",),
    ),
    Parameter(
        "max_nodes",
        whole_number(1),
        "4",
        "the most nodes a round may have; more stay as spares",
        aliases=("max_workers",),
        default_text="min_nodes",
        derive=lambda it: it.min_nodes,
    ),
    Parameter("node_unit", whole_number(1), "1", "the world size is a multiple of this"),
    Parameter(
        "unit_within",
        value_types.TEXT,
        "rack",
        "an attribute whose value a unit of node_unit nodes never straddles",
        default_text="none",
    ),
    Parameter(
        "join_timeout",
        duration(),
        "600",
        "seconds after which joining fails if too few nodes came",
        aliases=("timeout",),
    ),
    Parameter("last_call_timeout", duration(), "30", "seconds to wait for more nodes once min_nodes are in"),
    Parameter("early_last_call", value_types.FLAG, "true", "end the last call once nobody else is known to be coming"),
    Parameter(
        "expected",
        value_types.NAMES,
        "gpu-001,gpu-002",
        "names of nodes that are missed by name until they have come",
        default_text="none",
        derive=lambda _: (),
    ),
    Parameter(
        "expected_file",
        value_types.PATH,
        "/etc/rdzv/nodes",
        "a file with more of them, one a line; what follows a # is a comment",
    ),
    Parameter(
        "waits_end_on_loss",
        value_types.FLAG,
        "false",
        "whether waits in the round's shared store end when a member is lost",
    ),
    Parameter("close_timeout", duration(), "30", "seconds that leaving and closing may take"),
    Parameter(
        "closed_ttl",
        duration(1.0, because=", long enough for every node to see it"),
        "86400",
        "seconds for which a closed run is remembered",
    ),
    Parameter(
        "ttl",
        duration(TTL_MIN, because=", below which a short pause would pass for a death"),
        "10",
        "seconds for which a silent node counts as alive; also keep_alive_interval x keep_alive_max_attempt",
    ),
    Parameter(
        "disconnect_ttl",
        duration(GONE_TTL_MIN, because=", which a connection that was cut needs to come back"),
        "1",
        "seconds for which a disconnected node counts as alive; at most ttl",
        default_text=f"{DISCONNECT_TTL:g}, or ttl if that is less",
        derive=lambda it: min(DISCONNECT_TTL, it.ttl),
    ),
    Parameter(
        "gone_ttl",
        duration(GONE_TTL_MIN, because=", which a living process needs to come back"),
        f"{GONE_TTL:g}",
        "seconds for which a process counts as alive whose connections have all closed",
    ),
    Parameter(
        "stall_timeout",
        duration(STALL_TIMEOUT_MIN, because=", which a busy machine may take"),
        "5m",
        "seconds without a step after which a member is lost, if others get on",
        default_text="off",
    ),
    Parameter(
        "first_step_timeout",
        duration(STALL_TIMEOUT_MIN, because=", which a busy machine may take"),
        "30m",
        "the same for the first step of a round, which compiles and loads",
        default_text="off",
    ),
    Parameter(
        "ban_after",
        value_types.FAILURES,
        "3/1h",
        "a node that fails so often within so long is banned for as long",
        default_text="off",
    ),
    Parameter(
        "prefix",
        value_types.PREFIX,
        "/rdzv",
        "where in the store runs are kept",
        aliases=("etcd_prefix",),
        default_text=f"{SCHEMES['tcp'].prefix} (etcd: {SCHEMES['etcd'].prefix})",
        derive=lambda it: it.endpoint.info.prefix,
    ),
    Parameter(
        "is_host",
        value_types.FLAG_OR_AUTO,
        "true",
        "whether to start the store here; auto: if the host is this machine and nobody listens",
        default_text="auto",
    ),
    Parameter(
        "data_dir",
        value_types.PATH,
        "/var/lib/rdzv",
        "where the store started here keeps its data; in memory only without",
        family="tcp",
    ),
    Parameter("insecure", value_types.FLAG, "true", "let the store started here be open to all who can reach it"),
    Parameter(
        "limits",
        value_types.LIMITS,
        "keys_max:100000,memory_bytes_max:1000000000",
        "what clients may ask of the store started here",
        default_text="those of `rdzv serve`",
        family="tcp",
    ),
    Parameter(
        "http_port",
        value_types.HTTP_PORT,
        "29401",
        "where the store started here also serves its page, JSON and metrics over HTTP",
        default_text="none",
        family="tcp",
    ),
    Parameter(
        "metrics_port",
        value_types.HTTP_PORT,
        "29402",
        "where this node's own process serves its metrics over HTTP",
        default_text="none",
    ),
    Parameter(
        "token",
        value_types.SECRET,
        "...",
        "the shared secret itself; never in a URL",
        sources=_NOT_IN_A_URL,
        family="tcp",
        is_secret=True,
    ),
    Parameter("token_file", value_types.PATH, "/run/secrets/rdzv", "a file with the shared secret", family="tcp"),
    Parameter(
        "tls",
        value_types.TLS,
        "ssl.create_default_context()",
        "an ssl.SSLContext, instead of ca, cert and key; turns TLS on",
        sources=_KEYWORD_ONLY,
    ),
    Parameter("ca", value_types.PATH, "/etc/rdzv/ca.pem", "a file with the certificates to trust", encrypted_only=True),
    Parameter("cert", value_types.PATH, "/etc/rdzv/cert.pem", "a file with our certificate", encrypted_only=True),
    Parameter("key", value_types.PATH, "/etc/rdzv/key.pem", "a file with its private key", encrypted_only=True),
    Parameter("user", value_types.TEXT, "rdzv", "who to be in etcd", family="etcd"),
    Parameter("password_file", value_types.PATH, "/run/secrets/etcd", "a file with etcd's password", family="etcd"),
    Parameter(
        "node_id",
        value_types.NAME,
        "host10",
        "what this node is called; no two alive may share it",
        default_text="made up",
    ),
    Parameter(
        "address",
        value_types.ADDRESS,
        "10.0.0.7",
        "where the others reach this node",
        default_text="what the store sees",
    ),
    Parameter(
        "master_port",
        value_types.PORTS,
        "29500-29599",
        "the port at which the members meet at rank 0, or the range it is taken from",
        default_text="any free one",
    ),
    Parameter(
        "bootstrap_check",
        value_types.FLAG,
        "true",
        "whether a round is given up if not all its members reach rank 0 within 5 seconds",
        default_text="true under torchrun and rdzv run",
    ),
    Parameter("payload", value_types.PAYLOAD, "8xH100", "anything small that every member may read"),
    Parameter(
        "attributes",
        value_types.ATTRIBUTES,
        "rack:r1,zone:z2",
        "what an order by topology goes by",
        default_text="none",
        derive=lambda _: MappingProxyType({}),
    ),
    Parameter("rank_order", value_types.RANK_ORDER, "topology:rack", "who gets which rank"),
    Parameter("requested_rank", whole_number(0), "0", "the rank to ask for, with rank_order=requested"),
    Parameter(
        "torch_store",
        value_types.TORCH_STORE,
        "tcp",
        "which store PyTorch gets with a round: this one (rdzv), or a TCPStore that rank 0 hosts (tcp)",
    ),
    Parameter(
        "health_check",
        value_types.FUNCTION,
        "check_gpus",
        "is called before joining; a node that fails it stays out",
        sources=_KEYWORD_ONLY,
    ),
)

RUN_ID: Final = Parameter("run_id", value_types.NAME, "job-7", "which run to join")

KEEP_ALIVE: Final = {
    "keep_alive_interval": Parameter(
        "keep_alive_interval", duration(), "5", "PyTorch's first half of ttl", default=KEEP_ALIVE_INTERVAL
    ),
    "keep_alive_max_attempt": Parameter(
        "keep_alive_max_attempt",
        whole_number(1),
        "3",
        "PyTorch's second half of ttl",
        default=KEEP_ALIVE_MAX_ATTEMPT,
    ),
}
