"""`rdzv doctor` looks from this node for problems that keep nodes from meeting, and names a remedy for each.

The doctor looks up, reaches and greets the store as a joining node does. If the store answers, it then reads the run.
Each line begins with the node's name, for `srun rdzv doctor URL`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import anyio.to_thread
from anyio.abc import SocketAttribute

import store
from rdzv._version import __version__
from rdzv.backends.bind_address import LET_ONE_HOST, hosts_text, split_own_addresses
from rdzv.backends.credentials import Credentials, with_full_paths
from rdzv.backends.host_queries import ask_hosts_for_answers
from rdzv.cli.command import DONE, FAILED, JSON, NAMED_MOST, STORE, command, option, print_text, say
from rdzv.cli.reach import open_run, open_store, url_settings
from rdzv.config.endpoint import split_url
from rdzv.core.hosts.succession import Answer
from rdzv.node.link.wakeup import Wakeup
from store.connecting import is_etcd_url
from store.limits import is_loopback
from store.net.address import join_host_port
from store.net.threads import in_thread
from store.printable import short_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdzv.core.report import RunStatus

VERSION: Final = 1  # the version of the `--json` format, raised if a field is removed or changes its meaning
STEPS = 3  # looking up, connecting and greeting get an equal part of `--timeout`
PINGS = 5
SLOW = 0.25  # seconds; a median answer time above this is bad: a quarter of the default `disconnect_ttl`
LEASE_TTL = 30.0
LEASE_WATCHED = 1.0  # seconds between two readings of a lease's remaining time
CLOCK_OFF = 0.25  # seconds by which a lease may age faster or slower, besides two round trips
ETCD_34, ETCD_35 = (3, 4, 22), (3, 5, 6)  # the first releases of etcd 3.4 and 3.5 that lose no data
PROVES: Final = ", so no store is there, unless a proxy, a load balancer or a firewall has answered"
IF_SILENT: Final = (
    "let the port through the firewall, which must not reject packets; if the machine is off: rdzv lost URL"
)
SHARED: Final = "list each machine once, by a name of its own: of no proxy, Service or load balancer"
TWO_STORES: Final = "a host said to be lost was at work: its nodes go to the later store soon; if not, end its process"


class Check(NamedTuple):
    """The result of one step of the doctor: its subject, the finding, and a remedy if the finding is bad."""

    name: str
    found: str
    remedy: str = ""

    @property
    def passed(self) -> bool:
        """True if the step found no problem."""
        return not self.remedy

    def lines(self, node: str) -> list[str]:
        """Return the result as lines of text that begin with `node`."""
        told = [f"{node}: {'good' if self.passed else 'BAD '}  {self.name:<12}  {self.found}"]
        return told if self.passed else [*told, f"{node}:       {'':<12}  -> {self.remedy}"]


@command(
    "doctor",
    "look from this node for what keeps a run from meeting, and say what to do",
    *STORE,
    option("--expected FILE", None, argparse.SUPPRESS),  # hidden; for scripts from before `expected_file`
    JSON,
    limited=False,
)
async def _run_doctor(options: argparse.Namespace) -> int:
    checks: list[Check] = []
    with anyio.move_on_after(options.timeout) as limit:
        await _run_checks(options, checks)
    if limit.cancelled_caught:
        found = "the store took the connection, and then did not answer"
        remedy = (
            "it is overloaded; or large packets are lost on the way: see that the MTU is the same everywhere, and that "
            "no firewall drops ICMP's word that a packet is too large"
        )
        if not any(check.name == "port" and check.passed for check in checks):
            found, remedy = "no port was reached", "let the ports through the firewall, or give more time: --timeout 30"
        checks.append(Check("timeout", f"{found} in time ({options.timeout:g} s in all)", remedy))
    good, node = all(check.passed for check in checks), socket.gethostname()
    if options.json:
        told = {"version": VERSION, "node": node, "url": options.url, "release": __version__, "good": good}
        print_text(json.dumps({**told, "checks": [{**check._asdict(), "good": check.passed} for check in checks]}))
    else:
        say(*(line for check in checks for line in check.lines(node)))
    return DONE if good else FAILED


async def _run_checks(options: argparse.Namespace, checks: list[Check]) -> None:
    settings = with_full_paths(url_settings(options.url, expected_file=options.expected))
    url, run_id = settings.endpoint.url, split_url(options.url).run_id
    own_address, step = "", options.timeout / STEPS
    each = step / len(settings.endpoint.hosts)
    replies = await ask_hosts_for_answers(settings, Credentials(settings))
    answers = {host: asked.answer for host, asked in replies.items()}
    for host, port in settings.endpoint.hosts:
        addresses = await _check_dns(host, port, checks, timeout=each)
        where = join_host_port(host, port)
        answer = answers.get(where, Answer.SERVES)
        if answer is not Answer.SERVES:  # a host without a store should answer that, or refuse
            remedy = f"{IF_SILENT} {where}" if answer is Answer.SILENT else ""
            checks.append(Check("host", f"{where} {replies[where]}{PROVES * (answer is Answer.REFUSED)}", remedy))
        elif addresses:
            reached_from, check = await _probe_port(host, port, addresses, each, etcd=is_etcd_url(url))
            checks.append(check)
            own_address = reached_from or own_address
        if addresses and not is_etcd_url(url):
            await _check_single_machine(host, port, checks)
    serving = [host for host, answer in answers.items() if answer is Answer.SERVES]
    if answers and not serving:
        checks.append(Check("store", "no host serves it", "start a node on one of them"))
    elif len(serving) > 1:
        of_one = len({replies[host].name for host in serving}) == 1
        what = "these names share a store" if of_one else "each has a store of its own, so runs are in two parts"
        remedy = SHARED if of_one else TWO_STORES
        each = " and ".join(f"{host} {replies[host]}" for host in serving)
        checks.append(Check("hosts", f"{each} at once: {what}", remedy))
    if not own_address:
        return
    if not is_loopback(own_address):
        own_name = socket.gethostname()
        own: list[str] = []
        with anyio.move_on_after(step), contextlib.suppress(OSError, UnicodeError):
            own = await _look_up_addresses(own_name, None)
        checks.append(check_gloo_listens_at(own_name, own, own_address, chosen=os.environ.get("GLOO_SOCKET_IFNAME")))
    try:
        async with open_store(options.url, timeout=step) as (client, keys):
            proved = ["TLS"] if "s://" in url else []
            proved += ["a token that both sides proved"] if settings.token_file or settings.token else []
            checks.append(Check("store", f"{url} answers, with {' and '.join(proved) or 'neither token nor TLS'}"))
            seconds = await _check_answer_time(client, checks)
            checks.append(await _check_clocks(client, seconds=seconds, etcd=is_etcd_url(url)))
            if is_etcd_url(url):
                checks.append(check_etcd_release((await client.stats())["version"]))
            exists = bool(run_id) and bool(await client.count(keys.root))
    except store.StoreError as error:
        checks.append(_check_of_error(error))
        return
    if exists:
        async with open_run(options, follow=Wakeup()) as run:
            await _check_run(await run.status(), settings.expected, checks, timeout=options.timeout)
    elif run_id:
        remedy = "start the nodes that are expected in it" if settings.expected else ""
        checks.append(Check("run", f"the store has no run {run_id} yet", remedy))


async def _look_up_addresses(name: str, port: int | None) -> list[str]:
    found = await in_thread(partial(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(one[4][0]) for one in found))


async def _check_dns(host: str, port: int, checks: list[Check], *, timeout: float, what: str = "name") -> list[str]:
    try:
        with anyio.fail_after(timeout):
            addresses = await _look_up_addresses(host, port)
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or f"no answer within {timeout:g} s"
        remedy = "write an address instead of the name, or put the name into DNS or /etc/hosts of every node"
        checks.append(Check(what, f"{host} is not known here: {why}", remedy))
        return []
    trapped = [address for address in addresses if is_loopback(address)]
    found, remedy = f"{host} is {', '.join(addresses)}", ""
    if trapped and host != "localhost" and not is_loopback(host):
        found += " here, which is this machine only"
        remedy = (
            f"take {host} off the line of {trapped[0]} in /etc/hosts of this node, or write an address that all nodes "
            f"reach"
        )
    elif trapped:
        found += ", which only this machine reaches"
    checks.append(Check(what, found, remedy))
    return addresses


async def _check_single_machine(host: str, port: int, checks: list[Check]) -> None:
    """Report a `host` whose addresses belong to several machines: each machine would start a store."""
    with contextlib.suppress(OSError):
        ours, others = await anyio.to_thread.run_sync(split_own_addresses, host, port)
        if ours and others:
            found = f"{host} is {hosts_text(ours)} of this machine, and {hosts_text(others)}, which it does not have"
            checks.append(Check("machines", found, LET_ONE_HOST))


async def _probe_port(host: str, port: int, addresses: list[str], timeout: float, *, etcd: bool) -> tuple[str, Check]:
    """Connect to the first address that accepts; return the connection's local address, or "", and the check."""
    problems = []
    for address in addresses:
        at = join_host_port(address, port)
        try:
            with anyio.fail_after(timeout / len(addresses)):
                async with await anyio.connect_tcp(address, port) as stream:
                    own_address = str(stream.extra(SocketAttribute.local_address)[0])  # noqa: S610  not Django's `extra`
                    return own_address, Check("port", f"{at} can be reached")
        except TimeoutError:
            problems.append(f"{at} does not answer: a firewall, or a machine that is down")
        except OSError as error:
            cause = error.__cause__ or error
            problems.append(f"{at}: {'nobody listens there' if isinstance(cause, ConnectionRefusedError) else cause}")
    serve = f"rdzv serve --host {host} --port {port}"
    start = "etcd there" if etcd else f"the store there ({serve}), or the node whose machine {host} is"
    return "", Check("port", "; ".join(problems), f"start {start}; let port {port} through the firewall")


def check_gloo_listens_at(own_name: str, own: Sequence[str], leads_there: str, *, chosen: str | None) -> Check:
    """Check that gloo, which listens on `own[0]` or interface `chosen`, uses `leads_there`, the way to the store."""
    if chosen:
        return Check("gloo", f"GLOO_SOCKET_IFNAME={chosen}")
    if leads_there in own[:1]:
        return Check("gloo", f"gloo will listen on {leads_there}, as {own_name} stands for that")
    why = f"{own_name}, this host's own name, stands for {own[0]}" if own else f"{own_name} has no address here"
    return Check(
        "gloo",
        f"gloo will not listen on {leads_there}, from which this host reaches the store: {why}",
        f"for PyTorch's gloo set GLOO_SOCKET_IFNAME to the interface of {leads_there} (ip address show), and "
        "NCCL_SOCKET_IFNAME to the same",
    )


def _check_of_error(error: store.StoreError) -> Check:
    remedy = "is it the port of a store, is tcps:// meant, and is the store alive?"
    if isinstance(error, store.ProtocolError):
        remedy = "is it the port of a store, is tcps:// meant, are both of releases that work together?"
    elif isinstance(error, store.AuthenticationError):
        remedy = (
            "give the store's own token (token_file=), or the user that etcd knows (user=, password_file=), and "
            "certificates that it trusts (ca=, cert=, key=)"
        )
    return Check("store", str(error), remedy)


async def _check_answer_time(client: store.Store, checks: list[Check]) -> float:
    times = sorted([await client.ping() for _ in range(PINGS)])
    median = times[PINGS // 2]
    found = f"an answer takes {median * 1000:.1f} ms, at most {times[-1] * 1000:.1f} ms of {PINGS}"
    remedy = f"more than {SLOW * 1000:g} ms: raise ttl and disconnect_ttl, or move the store closer"
    checks.append(Check("time", found, remedy if median > SLOW else ""))
    return median


async def _check_clocks(client: store.Store, *, seconds: float, etcd: bool) -> Check:
    lease = await client.grant(LEASE_TTL)
    try:
        began, left = client.time(), await lease.time_to_live()
        await anyio.sleep(LEASE_WATCHED)
        passed_there = left - await lease.time_to_live()
        passed_here = client.time() - began
    finally:
        with anyio.move_on_after(1.0, shield=True):
            await lease.revoke()
    allowed = CLOCK_OFF + 2 * seconds + (1.0 if etcd else 0.0)  # etcd reports a lease's remaining time in whole seconds
    found = f"in {passed_here:.2f} s here the store's leases aged by {passed_there:.2f} s"
    remedy = "the store's machine stands still at times, or is overloaded: leases live longer there than here"
    return Check("clock", found, remedy if abs(passed_there - passed_here) > allowed else "")


def check_etcd_release(version: str) -> Check:
    """Check that this release of etcd keeps acknowledged data; an unreadable version passes."""
    number = tuple(int(part) for part in version.split(".") if part.isdecimal())
    loses = (3, 5, 0) <= number < (3, 5, 3)
    good = not number or number >= ETCD_35 or ETCD_34 <= number < (3, 5)
    found = f"etcd {version}" + (", which loses data when it crashes (etcd-io/etcd#13766)" if loses else "")
    return Check("etcd", found, "" if good else "run 3.4.22 or later, or 3.5.6 or later: earlier ones have lost data")


async def _check_run(status: RunStatus, expected: tuple[str, ...], checks: list[Check], *, timeout: float) -> None:
    checks.append(Check("run", f"{status.phase.value}: {status.reason}"))
    majors = {release.partition(".")[0] for release in (*status.releases, __version__)}
    releases = ", ".join(f"{count} of {release}" for release, count in sorted(status.releases.items()))
    remedy = "install one release, or releases of one major number, on all nodes"
    found = f"this is rdzv {__version__}; nodes: {releases or 'none'}"
    checks.append(Check("versions", found, remedy if len(majors) > 1 else ""))
    if status.bootstrap is not None:
        await _check_dns(*status.bootstrap, checks, timeout=timeout, what="rank 0")
    here = {member.node_id for member in status.members} | set(status.waiting)
    fates = {one.node_id: one.describe() for one in status.missing}
    missing = [f"{name} ({fates.get(name, 'never seen')})" for name in expected if name not in here]
    if missing:
        found = f"missing: {short_names(missing, NAMED_MOST)}"
        checks.append(Check("expected", found, "look at these nodes: run rdzv doctor there"))
    elif expected:
        checks.append(Check("expected", f"all {len(expected)} are here"))
