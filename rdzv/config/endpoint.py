"""The parts of a URL. Its endpoint is the store's address.

    tcp://head:29400/job-7?min_nodes=2&max_nodes=4
    ─┬─   ────┬─────  ─┬──  ──────────┬──────────
   scheme  endpoint  run_id       parameters

`split_url` checks only the form of a URL; each backend checks the parts. `Endpoint` checks scheme and hosts, not DNS.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import re
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from rdzv.config.config_errors import brief, refuse, suggest

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The properties of a URL's scheme."""

    family: str  # "tcp" or "etcd"
    is_encrypted: bool
    port: int
    prefix: str  # the default `prefix`


# 29400 and /torchelastic/p2p are PyTorch's defaults, 2379 is etcd's.
_TCP: Final = Scheme(family="tcp", is_encrypted=False, port=29400, prefix="/rdzv")
_ETCD: Final = Scheme(family="etcd", is_encrypted=False, port=2379, prefix="/torchelastic/p2p")
SCHEMES: Final[Mapping[str, Scheme]] = MappingProxyType(
    {"tcp": _TCP, "tcps": replace(_TCP, is_encrypted=True), "etcd": _ETCD, "etcds": replace(_ETCD, is_encrypted=True)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The store's address."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]  # host names or addresses without brackets, each with its port

    def __post_init__(self) -> None:
        _check_scheme(self.scheme)
        if not self.hosts:
            refuse(f"{self.scheme} needs a host; write for example {self.scheme}://head")
        twice = next((host for host in self.hosts if self.hosts.count(host) > 1), None)
        if twice is not None and self.scheme_info.family == "tcp":
            refuse(f"the URL lists {_join_host_and_port(*twice)} twice; name each host once")

    @classmethod
    @functools.lru_cache(maxsize=16)  # cached: nodes of one process mostly have the same store
    def parse(cls, scheme: str, authority: str) -> Endpoint:
        """Parse the hosts in a URL; raise `RendezvousSettingsError` if wrong."""
        _check_scheme(scheme)  # report an unknown scheme first
        if "@" in authority:  # do not show the authority: it may contain a password
            refuse(
                'the URL\'s host contains "@", but users and passwords do not belong into a URL, which is '
                "shown in process lists; give user= and password_file= for etcd, token_file= for tcp"
            )
        written = authority.split(",")
        port = SCHEMES[scheme].port
        if len(written) > 1 and SCHEMES[scheme].family == "tcp":  # a host without a port gets the last port in the URL
            port = next((last for host in reversed(written) if (last := _parse_host_and_port(host, 0)[1])), port)
        return cls(scheme=scheme, hosts=tuple(_parse_host_and_port(host, port) for host in written))

    @property
    def scheme_info(self) -> Scheme:
        """The scheme's properties."""
        return SCHEMES[self.scheme]

    @property
    def has_successors(self) -> bool:
        """True if the URL's next host takes the store over when a host dies."""
        return len(self.hosts) > 1 and self.scheme_info.family == "tcp"

    @property
    def url(self) -> str:
        """The URL without run id and parameters."""
        return f"{self.scheme}://{','.join(_join_host_and_port(*one) for one in self.hosts)}"


def _check_scheme(scheme: str) -> None:
    if scheme not in SCHEMES:
        refuse(
            f"the scheme {brief(scheme)} is not one of {', '.join(SCHEMES)}{suggest(scheme, SCHEMES)}; write for "
            f"example tcp://head:29400/job-7"
        )


_HOST_AND_PORT: Final = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(:(?P<port>.*))?", re.DOTALL)


def _parse_host_and_port(text: str, default_port: int) -> tuple[str, int]:
    match = _HOST_AND_PORT.fullmatch(text)
    host, is_host = unquote(match["host"]) if match else "", False
    with contextlib.suppress(ValueError):  # UnicodeError: no resolver takes the name
        if host.startswith("["):
            host = host[1:-1]
            mapped = ipaddress.IPv6Address(host).ipv4_mapped
            host, is_host = str(mapped or host), True  # as IPv4: an IPv6-only socket rejects IPv4-mapped addresses
        else:
            if not host.isascii():
                host.encode("idna")
            is_host = re.fullmatch(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?", host) is not None  # DNS names, roughly, and IPv4
    if not match or not is_host:
        refuse(
            f"{brief(text)} in the URL must be a host name or an IP address, and perhaps a port; "
            f"write for example head:29400, and IPv6 addresses in brackets: [::1]:29400"
        )
    port = match["port"]
    if port is None:
        return host, default_port
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        refuse(
            f"the port {brief(port)} of {brief(host)} in the URL must be a whole number from 1 to 65535; "
            f"leave it out for {default_port or _TCP.port}"
        )
    return host, int(port)


def _join_host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


quote_part: Final = functools.partial(quote, safe="", errors="surrogatepass")  # `split_url` refuses lone surrogates


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlParts:
    """A URL's parts. The run id and the parameters' values are percent-decoded, not checked."""

    scheme: str
    authority: str  # hosts and ports, as written
    run_id: str  # may be empty
    parameters: Mapping[str, str]  # in the order written, each name once

    @property
    def url(self) -> str:
        """The URL of these parts."""
        query = "&".join(f"{name}={quote_part(value)}" for name, value in self.parameters.items())
        return f"{self.scheme}://{self.authority}/{quote_part(self.run_id)}" + (f"?{query}" if query else "")


# RFC 3986's pattern (appendix B). Schemes may also contain underscores, as the names of PyTorch's backends do.
# `urllib.parse.urlsplit` is not used: it drops newlines and tabs, and some versions reject several IPv6 hosts.
_URL: Final = re.compile(
    r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<authority>[^/?#]*)(?P<path>/[^?#]*)?(\?(?P<query>[^#]*))?", re.ASCII
)


def split_url(url: str) -> UrlParts:
    """Split `scheme://host[:port]/run_id?parameters`; raise `RendezvousSettingsError` for another form."""
    given: object = url
    if not isinstance(given, str):
        refuse(f"the URL {brief(given)} must be a str; write for example tcp://head:29400/job-7")
    return _parse_url(url)


@functools.lru_cache(maxsize=16)  # cached: the registry and the backend parse the same URL
def _parse_url(url: str) -> UrlParts:
    visible = brief(url.partition("?")[0] if "@" not in url else "...")  # errors show no parameters and no passwords
    if "://" not in url:
        refuse(f"the URL {visible} has no scheme; write for example tcp://head:29400/job-7")
    match = _URL.fullmatch(url)
    if not match or not url.isprintable() or " " in url:
        refuse(
            f"the URL {visible} must be scheme://host[:port]/run_id?parameters; "
            f"write %20, %23 and so on for blanks, # and other special characters"
        )
    if not match["authority"]:
        refuse(f"the URL {visible} has no host; write for example {match['scheme']}://head:29400/job-7")
    parameters: dict[str, str] = {}
    for item in filter(None, (match["query"] or "").split("&")):
        name, equals, value = item.partition("=")
        if not name or not equals:
            refuse(f"{brief(item)} in the URL must be a parameter and its value; write {name[:80] or 'name'}=VALUE")
        if name in parameters:
            refuse(f"{brief(name)} is in the URL twice, with one value too many; leave one out")
        parameters[name] = _url_decode(value, name)
    return UrlParts(
        scheme=match["scheme"].lower(),
        authority=match["authority"],
        run_id=_url_decode((match["path"] or "/")[1:], "run_id"),
        parameters=parameters,
    )


def _url_decode(text: str, name: str) -> str:
    try:
        return unquote(text, errors="strict")  # "+" stays a plus sign; in HTML forms it means a blank
    except UnicodeDecodeError:
        refuse(f"{brief(name)} in the URL must be UTF-8 behind its percent signs; write %C3%A4 for ä, for example")
