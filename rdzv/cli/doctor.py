"""Shell: `rdzv doctor`: looks from this node for what keeps a run from meeting, and says what to do about it.

It goes the way that a node goes, one step after the other: the name, its addresses, the port, the store with its token
and TLS, how quickly that answers, the clock by which it counts leases, and then the run: its releases, rank 0's
address, the nodes that are expected. A step that cannot be taken ends the way: what comes after it would fail, too.

Under `srun rdzv doctor URL` each node looks for itself, and names itself in each line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import anyio
from anyio.abc import SocketAttribute

import store
from rdzv._version import __version__
from rdzv.backends.builtin import connect
from rdzv.backends.credentials import with_expected_nodes
from rdzv.cli.command import DONE, FAILED, JSON, STORE, argument, command
from rdzv.cli.runs import open_store
from rdzv.config.endpoint import split_url
from rdzv.config.settings import parse
from rdzv.core.addresses import is_loopback
from rdzv.core.keys import Keys
from store.connecting import is_etcd
from store.net.address import host_and_port
from store.printable import printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from rdzv.core.report import RunStatus

VERSION: Final = 1
"""Of what `--json` prints; it steps when a field goes or changes its meaning."""

STEPS = 3  # looking a name up, connecting, being greeted: each may take this part of `--timeout`
PINGS = 5
SLOW = 0.25  # seconds for an answer: a quarter of the default `disconnect_ttl`
LEASE_TTL = 30.0
LEASE_WATCHED = 1.0  # seconds in which the store's clock is compared with ours
CLOCK_OFF = 0.25  # seconds by which they may differ then, beside what the answers take
NAMED_MOST = 8
ETCD_34, ETCD_35 = (3, 4, 22), (3, 5, 6)
"""The first releases of etcd's two lines without a known defect that loses data or makes its members differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One step.

    Attributes:
        name: What was looked at.
        good: Whether it is as it should be.
        found: What was found.
        remedy: What to do; empty if it is good.
    """

    name: str
    good: bool
    found: str
    remedy: str = ""


@command(
    "doctor",
    "look from this node for what keeps a run from meeting, and say what to do",
    *STORE,
    argument("--expected", metavar="FILE", help="names of nodes, one a line, that should be in the run"),
    JSON,
    limited=False,
)
async def _doctor(options: argparse.Namespace) -> int:
    checks: list[Check] = []
    with anyio.move_on_after(options.timeout) as limit:
        await _examine(options, checks)
    if limit.cancelled_caught:
        checks.append(
            Check(
                name="timeout",
                good=False,
                found=f"the store took the connection, and then did not answer in time ({options.timeout:g} s in all)",
                remedy="it is overloaded; or large packets are lost on the way: see that the MTU is the same "
                "everywhere, and that no firewall drops ICMP's word that a packet is too large",
            )
        )
    good, node = all(check.good for check in checks), socket.gethostname()
    if options.json:
        told = {"version": VERSION, "node": node, "url": options.url, "release": __version__, "good": good}
        print(json.dumps(told | {"checks": [asdict(check) for check in checks]}))
    else:
        print("\n".join(map(printable, _table(node, checks))))
    return DONE if good else FAILED


def _table(node: str, checks: Iterable[Check]) -> list[str]:
    lines = []
    for check in checks:
        lines.append(f"{node}: {'good' if check.good else 'BAD '}  {check.name:<12}  {check.found}")
        if check.remedy:
            lines.append(f"{node}:       {'':<12}  -> {check.remedy}")
    return lines


async def _examine(options: argparse.Namespace, checks: list[Check]) -> None:
    """Look at one thing after the other, until one is wrong that the others rest on."""
    run_id = split_url(options.url).run_id
    where, question_mark, parameters = options.url.partition("?")
    url = options.url if run_id else f"{where.rstrip('/')}/any{question_mark}{parameters}"
    given = {"expected_file": options.expected} if options.expected else {}
    settings = with_expected_nodes(parse(url, given, os.environ))
    own_address, step = "", options.timeout / STEPS
    for host, port in settings.endpoint.hosts:
        addresses = await _resolve(host, port, checks, timeout=step)
        own_address = (addresses and await _reach(host, port, addresses, checks, step)) or own_address
    if not own_address:
        return
    if not is_loopback(own_address):
        own_name = socket.gethostname()
        chosen = os.environ.get("GLOO_SOCKET_IFNAME")
        checks.append(gloo_check(own_name, await _addresses_of(own_name, step), own_address, chosen=chosen))
    try:
        async with open_store(options.url, timeout=step) as (_, client):
            checks.append(_answered(settings.endpoint.url, has_token=settings.token_file or settings.token))
            seconds = await _time(client, checks)
            etcd = is_etcd(settings.endpoint.url)
            await _compare_clocks(client, checks, seconds=seconds, etcd=etcd)
            if etcd:
                checks.append(etcd_check((await client.stats())["version"]))
            exists = bool(run_id) and bool(await client.count(Keys(settings.prefix, settings.run_id).root))
    except store.StoreError as error:
        checks.append(_refused(error))
        return
    if run_id and not exists:
        checks.append(Check(name="run", good=not settings.expected, found=f"the store has no run {run_id} yet"))
    elif run_id:
        async with connect(options.url, is_host=False, join_timeout=options.timeout) as handler:
            await _look_at_run(await handler.status(), settings.expected, checks, timeout=options.timeout)


async def _resolve(host: str, port: int, checks: list[Check], *, timeout: float) -> list[str]:
    """Look a name up, as this node's system does; the addresses."""
    try:
        with anyio.fail_after(timeout):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or f"no answer within {timeout:g} s"
        checks.append(
            Check(
                name="name",
                good=False,
                found=f"{host} is not known here: {why}",
                remedy="write an address instead of the name, or put the name into DNS or /etc/hosts of every node",
            )
        )
        return []
    addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    trapped = [address for address in addresses if is_loopback(address)]
    named = ", ".join(addresses)
    if trapped and host != "localhost" and not is_loopback(host):
        checks.append(
            Check(
                name="name",
                good=False,
                found=f"{host} is {named} here, which is this machine only",
                remedy=f"take {host} off the line of {trapped[0]} in /etc/hosts of this node, or write an address that "
                "all nodes reach",
            )
        )
    else:
        only_here = ", which only this machine reaches" if trapped else ""
        checks.append(Check(name="name", good=True, found=f"{host} is {named}{only_here}"))
    return addresses


async def _reach(host: str, port: int, addresses: list[str], checks: list[Check], timeout: float) -> str:
    """Connect to each address; from which address of ours one takes us, or nothing."""
    problems, reached, own_address = [], [], ""
    for address in addresses:
        try:
            with anyio.fail_after(timeout / len(addresses)):
                stream = await anyio.connect_tcp(address, port)
                own_address = str(stream.extra(SocketAttribute.local_address)[0])  # noqa: S610  it is not Django's
                await stream.aclose()
                reached.append(address)
        except TimeoutError:
            problems.append(f"{host_and_port(address, port)} does not answer: a firewall, or a machine that is down")
        except OSError as error:
            cause = error.__cause__ or error
            why = "nobody listens there" if isinstance(cause, ConnectionRefusedError) else str(cause)
            problems.append(f"{host_and_port(address, port)}: {why}")
    if reached:
        checks.append(Check(name="port", good=True, found=f"{host_and_port(reached[0], port)} can be reached"))
    else:
        checks.append(
            Check(
                name="port",
                good=False,
                found="; ".join(problems),
                remedy=f"start the store there (rdzv serve --port {port}), or the node whose machine {host} is; "
                f"let port {port} through the firewall",
            )
        )
    return own_address


async def _addresses_of(name: str, timeout: float) -> list[str]:
    """What a name stands for here; nothing if that is not known in time."""
    with anyio.move_on_after(timeout), contextlib.suppress(OSError):
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(one[4][0]) for one in found))
    return []


def gloo_check(own_name: str, own: Sequence[str], leads_there: str, *, chosen: str | None) -> Check:
    """Return whether PyTorch's gloo will listen where other hosts reach it: it goes by what the host's name stands for.

    Args:
        own_name: This host's name.
        own: What that stands for here.
        leads_there: The address of this host from which it reaches the store.
        chosen: The interface that gloo is told to take, if it is.
    """
    if chosen:
        return Check(name="gloo", good=True, found=f"GLOO_SOCKET_IFNAME={chosen}")
    if leads_there in own[:1]:
        return Check(name="gloo", good=True, found=f"gloo will listen on {leads_there}, as {own_name} stands for that")
    why = f"{own_name}, this host's own name, stands for {own[0]}" if own else f"{own_name} has no address here"
    return Check(
        name="gloo",
        good=False,
        found=f"gloo will not listen on {leads_there}, from which this host reaches the store: {why}",
        remedy=f"for PyTorch's gloo set GLOO_SOCKET_IFNAME to the interface of {leads_there} (ip address show), and "
        "NCCL_SOCKET_IFNAME to the same",
    )


def _answered(url: str, *, has_token: object) -> Check:
    how = " and ".join(
        [*(["TLS"] if "s://" in url else []), *(["a token that both sides proved"] if has_token else [])]
    )
    return Check(name="store", good=True, found=f"{url} answers, with {how or 'neither token nor TLS'}")


def _refused(error: store.StoreError) -> Check:
    match error:
        case store.AuthenticationError():
            remedy = "give the store's own token (token_file=), and certificates that it trusts (ca=, cert=, key=)"
        case store.ProtocolError():
            remedy = "is it the port of a store, is tcps:// meant, are both of releases that work together?"
        case _:
            remedy = "is it the port of a store, is tcps:// meant, and is the store alive?"
    return Check(name="store", good=False, found=str(error), remedy=remedy)


async def _time(client: store.Store, checks: list[Check]) -> float:
    """Measure how long an answer takes; the median."""
    times = sorted([await client.ping() for _ in range(PINGS)])
    median = times[PINGS // 2]
    slow = median > SLOW
    checks.append(
        Check(
            name="time",
            good=not slow,
            found=f"an answer takes {median * 1000:.1f} ms, at most {times[-1] * 1000:.1f} ms of {PINGS}",
            remedy=f"more than {SLOW * 1000:g} ms: raise ttl and disconnect_ttl, or move the store closer"
            if slow
            else "",
        )
    )
    return median


async def _compare_clocks(client: store.Store, checks: list[Check], *, seconds: float, etcd: bool) -> None:
    """See whether the clock by which the store counts leases goes as ours does; nobody's hour matters."""
    lease = await client.grant(LEASE_TTL)
    try:
        began, left = client.time(), await lease.time_to_live()
        await anyio.sleep(LEASE_WATCHED)
        passed_there = left - await lease.time_to_live()
        passed_here = client.time() - began
    finally:
        with anyio.move_on_after(1.0, shield=True):
            await lease.revoke()
    allowed = CLOCK_OFF + 2 * seconds + (1.0 if etcd else 0.0)  # etcd counts whole seconds
    off = abs(passed_there - passed_here) > allowed
    checks.append(
        Check(
            name="clock",
            good=not off,
            found=f"in {passed_here:.2f} s here the store's leases aged by {passed_there:.2f} s",
            remedy="the store's machine stands still at times, or is overloaded: leases live longer there than here"
            if off
            else "",
        )
    )


def etcd_check(version: str) -> Check:
    """Return whether a release of etcd keeps what it has acknowledged; one whose version cannot be read passes."""
    number = tuple(int(part) for part in version.split(".") if part.isdecimal())
    loses = (3, 5, 0) <= number < (3, 5, 3)
    good = not number or number >= ETCD_35 or ETCD_34 <= number < (3, 5)
    return Check(
        name="etcd",
        good=good,
        found=f"etcd {version}" + (", which loses data when it crashes (etcd-io/etcd#13766)" if loses else ""),
        remedy="" if good else "run 3.4.22 or later, or 3.5.6 or later: earlier ones have lost data",
    )


async def _look_at_run(status: RunStatus, expected: tuple[str, ...], checks: list[Check], *, timeout: float) -> None:
    checks.append(Check(name="run", good=True, found=f"{status.phase.value}: {status.reason}"))
    majors = {release.partition(".")[0] for release in (*status.releases, __version__)}
    releases = ", ".join(f"{count} of {release}" for release, count in sorted(status.releases.items()))
    checks.append(
        Check(
            name="versions",
            good=len(majors) == 1,
            found=f"this is rdzv {__version__}; nodes: {releases or 'none'}",
            remedy="" if len(majors) == 1 else "install one release, or releases of one major number, on all nodes",
        )
    )
    if status.bootstrap_address is not None:
        host, port = status.bootstrap_address
        steps: list[Check] = []
        await _resolve(host, port, steps, timeout=timeout)
        checks.extend(Check(name="rank 0", good=one.good, found=one.found, remedy=one.remedy) for one in steps)
    here = {member.node_id for member in status.members} | set(status.waiting)
    if expected:
        missing = [f"{name} ({status.missing.get(name, 'never seen')})" for name in expected if name not in here]
        more = f" and {len(missing) - NAMED_MOST} more" if len(missing) > NAMED_MOST else ""
        checks.append(
            Check(
                name="expected",
                good=not missing,
                found=f"missing: {', '.join(missing[:NAMED_MOST])}{more}"
                if missing
                else f"all {len(expected)} are here",
                remedy="look at these nodes: run rdzv doctor there" if missing else "",
            )
        )
