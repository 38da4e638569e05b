"""The settings that all nodes of a run must share (promise R18), and an operator's changes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from rdzv.config.config_errors import brief, refuse
from rdzv.config.endpoint import SCHEMES
from rdzv.config.resizing import describe_size, differs_by_resize, unit_limits
from rdzv.config.settings import describe_difference
from rdzv.core.decision import Rules
from rdzv.core.ranks import rank_order_named
from rdzv.core.state import pack_settings, unpack_settings
from rdzv.errors import RendezvousSettingsError
from rdzv.node.run.status import read_nodes
from store import Entry, Lease
from store.printable import make_logger

if TYPE_CHECKING:
    from rdzv.config.settings import Settings
    from rdzv.core.keys import Keys
    from store import Store, TransactionResult

log: Final = make_logger(__name__)


class RunSettings:
    """The settings that a run's nodes share, as this node knows them. A resize changes `min_nodes` and `max_nodes`."""

    def __init__(self, settings: Settings) -> None:
        self._run_id = settings.run_id
        self._ours = settings.shared()
        self._agreed = self._ours
        self.value: bytes = pack_settings(self._ours)  # the value that this node expects in the settings key
        self.rules: Rules = Rules(  # the settings by which a coordinator decides
            needed=settings.needed,
            capacity=settings.capacity,
            unit=settings.node_unit,
            last_call=settings.last_call_timeout,
            early_last_call=settings.early_last_call,
            order=rank_order_named(settings.rank_order),
            expected=settings.expected,
            unit_within=settings.unit_within or "",
            ttl=settings.ttl,
        )

    def accept_or_explain(self, there: bytes) -> str:
        """Accept the run's settings, and return ""; if they differ by more than a resize, return how."""
        theirs = unpack_settings(there)
        difference = describe_difference(self._ours, theirs)
        if difference and not differs_by_resize(theirs, self._ours):
            return difference
        before, now = (describe_size(one["min_nodes"], one["max_nodes"]) for one in (self._agreed, theirs))
        if before != now:
            text = "run %s was resized to %s; this node uses these numbers now, instead of %s"
            log.warning(text, self._run_id, now, before)
        self._agreed, self.value = theirs, there
        needed, capacity = unit_limits(theirs)
        self.rules = replace(self.rules, needed=needed, capacity=capacity)
        return ""

    def reset_to_own(self) -> None:
        """Return to this node's own settings, as no other node is in the run."""
        assert self.accept_or_explain(pack_settings(self._ours)) == "", "they do not differ from themselves"


async def agree_on_settings(
    store: Store, keys: Keys, agreed: RunSettings, lease: Lease, *, incarnation: str, there: Entry | None
) -> None:
    """Ensure that the run has this node's settings; rewrite them if no other node is in the run.

    If the settings differ only by a resize, this node adopts the run's numbers. If the run has nodes with other
    settings, raise RendezvousSettingsError. The write of a node that arrives meanwhile makes the rewrite fail.
    """
    if there is None:
        await store.compare_and_set(keys.settings, agreed.value, expected_revision=0, lease=lease)
    elif difference := agreed.accept_or_explain(there.value):
        records = (await read_nodes(store, keys)).values()
        if any(record.incarnation != incarnation for record in records):
            now = await store.get(keys.settings)
            if now is None or now.value != there.value:
                return
            what = f"was started with other settings: {difference}; give all nodes the same"
            raise RendezvousSettingsError(f"run {keys.run_id} {what}")
        agreed.reset_to_own()
        await store.compare_and_set(keys.settings, agreed.value, expected_revision=there.mod_revision, lease=lease)


async def refuse_nested_prefix(store: Store, prefix: str) -> None:
    """Raise RendezvousSettingsError if keys with this prefix would be among another run's keys."""
    parts = prefix.split("/")
    above = ["/".join(parts[:count]) for count in range(3, len(parts) + 1)]  # for example "/rdzv/job-7"
    if not above or prefix in {scheme.prefix for scheme in SCHEMES.values()}:
        return
    for entry in await store.get_many([f"{run}/settings" for run in above]):
        if entry is not None:
            run = brief(entry.key.removesuffix("/settings"))
            refuse(f"prefix={brief(prefix)} is among the keys of the run {run}; choose another")


class SettingsChangedError(Exception):
    """The run's settings have changed, and no longer fit this node's."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__("the run now has other settings")
        self.settings = settings


def adopt_changed_settings(refused: TransactionResult, agreed: RunSettings) -> bool:
    """If other settings caused a refusal, adopt them and return True; raise SettingsChangedError if they do not fit."""
    entry = refused.results[-1]
    if not isinstance(entry, Entry) or entry.value == agreed.value:
        return False
    if agreed.accept_or_explain(entry.value):
        raise SettingsChangedError(unpack_settings(entry.value))
    return True
