"""Pure: which parameters may not stand beside each other, and which not beside which kind of store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rdzv.config.config_errors import refuse, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdzv.config.endpoint import Endpoint
    from rdzv.config.parameters import Parameter

__all__ = ["check_that_it_applies", "check_together"]


def check_that_it_applies(parameter: Parameter, endpoint: Endpoint) -> None:
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
_RULES: Final[tuple[tuple[Callable[[Any], bool], str], ...]] = (
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


def check_together(settings: object) -> None:
    """Refuse `settings.Settings` of which two contradict each other.

    Raises:
        RendezvousSettingsError: They do; the message names both, and what to do.
    """
    for is_broken, sentence in _RULES:
        if is_broken(settings):
            refuse(sentence.format(_Shown(settings)))


class _Shown:
    """Settings as sentences show them: text as a literal, and not at any length."""

    def __init__(self, settings: object) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._settings, name)
        return value if isinstance(value, int | float) else shown(value)
