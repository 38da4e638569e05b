"""Pure: the description of a parameter: its values, and the places in which it may be given.

The parameters are the fields of `settings.Settings`. Their declarations drive the parsing of URLs, keywords and the
environment, and the documentation.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from rdzv.config import value_types
from rdzv.config.config_errors import shown
from rdzv.config.value_types import duration, whole_number
from rdzv.errors import RendezvousSettingsError

if TYPE_CHECKING:
    from collections.abc import Callable


class Source(Enum):
    """A place in which a parameter may be given; the value completes "ttl=0 ... must be"."""

    ENVIRONMENT = " in the environment"
    URL = " in the URL"
    KEYWORD = ""

    def spell(self, name: str) -> str:
        """Return the parameter's name as written in this place."""
        return f"RDZV_{name.upper()}" if self is Source.ENVIRONMENT else name


@dataclass(frozen=True, slots=True)
class Parameter:
    """One setting of the user."""

    name: str  # the field of `Settings`
    kind: value_types.Kind  # its type
    _: KW_ONLY
    default: Any = None  # `default_text` describes a derived default
    default_text: str = ""
    # Returns the default for a `settings.Settings`.
    derive: Callable[[Any], Any] | None = None
    aliases: tuple[str, ...] = ()  # older names
    sources: frozenset[Source] = frozenset(Source)  # the places in which it may be given
    family: str = ""  # the kind of store it is for, "tcp" or "etcd"; empty for any
    encrypted_only: bool = False  # for `tcps` and `etcds` only
    is_secret: bool = False  # its value must not be shown

    def called(self, name: str) -> Parameter:
        """Return it with its name."""
        return replace(self, name=name)

    def read(self, raw: object, *, source: Source = Source.KEYWORD, written: str = "") -> Any:
        """Return the canonical value, or raise an error that names `source` and `written`, its place and text."""
        try:
            return self.kind.convert(raw)
        except (ValueError, TypeError, OverflowError) as error:
            written = source.spell(written or self.name)
            value = "(not shown)" if self.is_secret else shown(raw)
            detail = f", but {error}" if isinstance(error, value_types.Unfit) else ""
            raise RendezvousSettingsError(
                f"{written}={value}{source.value} must be {self.kind.limit}{detail}; "
                f"write for example {source.spell(self.name)}={self.kind.example}"
            ) from None


def parameter(default: Any, kind: value_types.Kind, **more: Any) -> Any:
    """Declare a field of `settings.Settings`, with the parameter's description except its name."""
    said = Parameter("", kind, default=default, **more)
    return field(default=default, repr=not said.is_secret and kind is not value_types.TLS, metadata={"parameter": said})


RUN_ID: Final = Parameter("run_id", replace(value_types.NAME, example="job-7"))
# The defaults of PyTorch's `dynamic_rendezvous.create_handler` for the missing one of the pair.
KEEP_ALIVE: Final = {
    one.name: one
    for one in (
        Parameter("keep_alive_interval", duration(), default=5.0),
        Parameter("keep_alive_max_attempt", whole_number(1), default=3),
    )
}
