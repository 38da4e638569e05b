"""The keywords of `connect`, for type checkers.

A keyword's value may be text, as in a URL or on a command line. Parameters of third
parties' backends are no keywords: users write them in the URL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence  # noqa: TC003  so that annotations can be evaluated
from pathlib import PurePath
from typing import Any, TypeAlias, TypedDict

from store.limits import Limits  # noqa: TC001  so that annotations can be evaluated

Count: TypeAlias = int | str | None
Seconds: TypeAlias = float | str | None
Flag: TypeAlias = bool | str | None
File: TypeAlias = str | PurePath | None


class Overrides(TypedDict, total=False):
    """The keywords of `connect` and `rounds`: the parameters of docs/all-parameters.md."""

    min_nodes: Count
    max_nodes: Count
    node_unit: Count
    join_timeout: Seconds
    last_call_timeout: Seconds
    early_last_call: Flag
    expected: Sequence[str] | str | None
    expected_file: File
    waits_end_on_loss: Flag
    close_timeout: Seconds
    store_gone_timeout: Seconds
    closed_ttl: Seconds
    ttl: Seconds
    disconnect_ttl: Seconds
    gone_ttl: Seconds
    unit_within: str | None
    stall_timeout: Seconds
    first_step_timeout: Seconds
    prefix: str | None
    is_host: Flag
    host: str | None
    data_dir: File
    insecure: Flag
    http_port: int | str | None
    metrics_port: int | str | None
    limits: Limits | Mapping[str, float] | str | None
    token: str | bytes | None
    token_file: File
    tls: Any  # an ssl.SSLContext; `Any`, as pure modules import no `ssl`
    ca: File
    cert: File
    key: File
    user: str | None
    password_file: File
    node_id: str | None
    address: str | None
    master_port: str | int | None
    bootstrap_check: Flag
    payload: Any
    attributes: Mapping[str, str] | str | None
    rank_order: str | Callable[..., Any] | None
    requested_rank: Count
    torch_store: str
    agent_store: Flag
    health_check: Callable[..., Any] | None
