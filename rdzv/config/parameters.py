"""Descriptions of parameters: their types, defaults and permitted places. `settings.Settings` has a field for each."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from rdzv.config import value_types
from rdzv.config.config_errors import brief
from rdzv.config.value_types import duration, whole_number
from rdzv.errors import RendezvousSettingsError

if TYPE_CHECKING:
    from collections.abc import Callable


class Source(Enum):
    """A place where a parameter may be given. The enum's value completes errors: "ttl=0 in the URL must be"."""

    ENVIRONMENT = " in the environment"
    URL = " in the URL"
    RDZV_CONF = " in --rdzv-conf"
    KEYWORD = ""

    def name_of(self, name: str) -> str:
        """Return a parameter's name as written in this place."""
        return f"RDZV_{name.upper()}" if self is Source.ENVIRONMENT else name


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter's description."""

    name: str
    kind: value_types.ValueType
    _: KW_ONLY
    default: Any = None
    default_text: str = ""  # the default in words, if the value of `default` does not say it
    derive: Callable[[Any], Any] | None = None  # computes the default from the other settings
    aliases: tuple[str, ...] = ()  # older names, valid in URLs and `--rdzv-conf`
    sources: frozenset[Source] = frozenset(Source)
    family: str = ""  # the kind of store that has the parameter, "tcp" or "etcd"; empty: both
    encrypted_only: bool = False  # True: only for the schemes `tcps` and `etcds`
    is_secret: bool = False  # True: errors and `repr` hide the value

    def read(self, raw: object, *, source: Source = Source.KEYWORD, written: str = "") -> Any:
        """Return the canonical value of `raw`; errors name the parameter as `written` in `source`."""
        try:
            return self.kind.convert(raw)
        except (ValueError, TypeError, OverflowError) as error:
            written = source.name_of(written or self.name)
            value = "(not shown)" if self.is_secret else brief(raw)
            detail = f", but {error}" if isinstance(error, value_types.InvalidValue) else ""
            raise RendezvousSettingsError(
                f"{written}={value}{source.value} must be {self.kind.limit}{detail}; "
                f"write for example {source.name_of(self.name)}={self.kind.example}"
            ) from None


def parameter(default: Any, kind: value_types.ValueType, **more: Any) -> Any:
    """Declare a field of `settings.Settings`; `more` are further fields of `Parameter`."""
    said = Parameter("", kind, default=default, **more)
    return field(default=default, repr=not said.is_secret and kind is not value_types.TLS, metadata={"parameter": said})


RUN_ID: Final = Parameter("run_id", replace(value_types.NAME, example="job-7"))
# If only one is given, the other has the default of PyTorch's `dynamic_rendezvous.create_handler`.
KEEP_ALIVE: Final = {
    "keep_alive_interval": Parameter("keep_alive_interval", duration(), default=5.0),
    "keep_alive_max_attempt": Parameter("keep_alive_max_attempt", whole_number(1), default=3),
}
