"""`rdzv serve` serves a store that outlives the nodes of its runs, also under a service manager.

systemd is notified once the store listens. A signal shuts the server down; another one, a second or more later, ends it
at once. After SIGHUP an authority removed from the file stays trusted until a restart (OpenSSL).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import signal
import socket
from typing import TYPE_CHECKING, Any, Final

import anyio

import store
from rdzv.backends.builtin import make_client
from rdzv.backends.credentials import Credentials
from rdzv.backends.monitoring import http_module
from rdzv.backends.succession import HostSuccession
from rdzv.cli.command import DONE, Argument, RepeatedSignalFilter, argument_type, call_on_signal, command, flag, option
from rdzv.config import value_types
from rdzv.config.endpoint import SCHEMES
from rdzv.config.parameters import Parameter
from rdzv.config.settings import parse
from rdzv.display.standard_error import flush_standard_error, say_error
from rdzv.errors import RendezvousSettingsError
from store.net.address import DEFAULT_PORT, join_host_port
from store.net.collector import collect_garbage, short_gc_pauses
from store.net.tasks import cancel_and_wait

if TYPE_CHECKING:
    import ssl

    from rdzv.config.settings import Settings

log: logging.Logger = logging.getLogger(__name__)

EVERY_ADDRESS, LOOPBACK = "", "localhost"  # addresses for IPv4 and IPv6
TIDY_EVERY = 60.0  # seconds between checks for clients; a long garbage collection runs only while none is connected
AT_ONCE = 1  # the exit status if a second signal ends the server
LOOK_EVERY: Final = 0.2  # seconds between checks whether another host serves the store
ENDS_WITHIN: Final = 5.0  # seconds for clients to move to the next host

PORT: Final = argument_type(value_types.HTTP_PORT)
LIMIT: Final = Parameter(
    "--limit", dataclasses.replace(value_types.LIMITS, limit="names of limits with numbers", example="keys_max=100000")
)


def _old_flag_of_limit(limit: dataclasses.Field[Any]) -> Argument:
    """Return the hidden flag of a limit, such as `--keys-max N`, for scripts older than `--limit`."""
    name = limit.name
    flags = [name, name.replace("group_", "run_")] if name in ("group_keys_max", "group_bytes_max") else [name]
    return Argument(
        *(f"--{one.replace('_', '-')}" for one in flags),
        dest="limit",
        action="append",
        type=lambda raw: f"{name}={raw}",
        help=argparse.SUPPRESS,
    )


@command(
    "serve",
    "serve a store that outlives the nodes of its runs",
    option(
        "--host ADDRESS",
        None,
        "address or name to listen on; '' is every address, IPv4 and IPv6 (default: every address if a token, mutual "
        "TLS or --insecure says who may come, else loopback)",
    ),
    option("--port PORT", PORT, "port; 0 takes a free one", default=DEFAULT_PORT),
    option(
        "--hosts A,B,C:PORT",
        None,
        "instead of --host and --port: the hosts in the runs' URLs, of which this machine is one; it serves while no "
        "other host does, in memory only",
    ),
    option("--data-dir DIR", None, "keep the store here, through restarts; without, in memory only"),
    option(
        "--token-file FILE",
        None,
        "file with the secret that clients must prove to know; without, RDZV_TOKEN_FILE or RDZV_TOKEN is taken",
    ),
    option("--cert FILE", None, "PEM file with the certificate; turns TLS on"),
    option("--key FILE", None, "PEM file with its private key"),
    option("--ca FILE", None, "PEM file with the authorities that clients' certificates must come from"),
    flag("--insecure", "listen beyond loopback without token or mutual TLS"),
    option("--port-file FILE", None, "write the port here once the store listens"),
    option(
        "--http-port PORT",
        PORT,
        "also serve health, metrics, JSON and a page about the runs over HTTP; 0 takes a free port; with a token and "
        "no TLS on loopback only",
    ),
    option(
        "--limit NAME=N",
        None,
        "a limit of docs/limits.md, once for each that is not the default: "
        + ", ".join(f"{one.name}={one.default}" for one in dataclasses.fields(store.Limits)),
        action="append",
    ),
    *map(_old_flag_of_limit, dataclasses.fields(store.Limits)),
)
async def _serve_store(options: argparse.Namespace) -> int:
    stop = asyncio.Event()
    credentials = Credentials(_settings_of_options("tcps://localhost/any", options))
    tls, token = credentials.server_tls(), credentials.server_token_getter()
    host = options.host
    if host is None:
        says_who_may_come = options.insecure or token is not None or options.ca is not None
        host = EVERY_ADDRESS if says_who_may_come else LOOPBACK

    wish, starting = RepeatedSignalFilter(), options.hosts is None

    def on_stop_signal(number: signal.Signals) -> None:
        if not wish.accept(number):
            return
        if stop.is_set():
            os._exit(AT_ONCE)
        stop.set()
        call_on_signal(signal.SIGHUP, on_stop_signal, signal.SIGHUP)
        _print_notice(f"{number.name}: leaving; again after a second: at once")
        if starting:  # the start may hang, resolving the host's name or opening the disk
            flush_standard_error()
            os._exit(DONE)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        call_on_signal(number, on_stop_signal, number)
    call_on_signal(signal.SIGHUP, _reload_credentials, credentials, tls)
    if options.hosts is not None:
        return await _serve_as_one_of_hosts(options, stop)
    serving = store.serve(
        host,
        options.port,
        token=token,
        tls=tls,
        insecure=options.insecure,
        limits=_limits_from_options(options),
        data_dir=options.data_dir,
    )
    async with serving as server, contextlib.AsyncExitStack() as stack:
        starting = False
        if options.http_port is not None:
            serve, prefix = http_module("app", "--http-port").serve, SCHEMES["tcp"].prefix
            http = serve(
                server, host, options.http_port, token=token, tls=tls, insecure=options.insecure, prefix=prefix
            )
            _print_notice(f"HTTP at {await stack.enter_async_context(http)}")
        where = join_host_port(host or "*", server.port)
        kept = f"kept in {options.data_dir}" if options.data_dir else "in memory only: it ends with this process"
        if options.port_file:
            _write_atomically(options.port_file, f"{server.port}\n")
        _print_notice(f"store {server.store_id} listens on {where}, {kept}")
        notify_service_manager("READY=1")
        server.on_failure(stop.set)  # if the server fails, end this process: a service manager restarts it
        beating = asyncio.create_task(_notify_watchdog(), name="tell the watchdog that this loop runs")
        stack.push_async_callback(cancel_and_wait, beating)
        stack.enter_context(short_gc_pauses())
        while not stop.is_set():
            with anyio.move_on_after(TIDY_EVERY):
                await stop.wait()
            if not server.connections:
                collect_garbage()
        notify_service_manager("STOPPING=1")
        _print_notice(f"leaving, {server.connections} connections are told")
    return DONE


async def _serve_as_one_of_hosts(options: argparse.Namespace, stop: asyncio.Event) -> int:
    """Serve the store while no other host of `--hosts` does, until `stop` is set."""
    if options.port_file:
        raise RendezvousSettingsError("--port-file is for one host; leave it out, as the ports are in --hosts")
    given = {name: getattr(options, name) for name in ("insecure", "http_port", "data_dir")}
    given |= {"limits": _limits_from_options(options), "close_timeout": ENDS_WITHIN}
    settings = _settings_of_options(f"{'tcps' if options.cert else 'tcp'}://{options.hosts}/any", options, **given)
    if not settings.endpoint.has_successors:
        raise RendezvousSettingsError(f"--hosts={options.hosts[:80]} names one host; give --host and --port for that")
    credentials = Credentials(settings)
    call_on_signal(signal.SIGHUP, _reload_credentials, credentials, credentials.server_tls())
    succession = HostSuccession(settings, credentials, lambda _: make_client(settings, credentials), random.Random())
    beating = asyncio.create_task(_notify_watchdog(), name="tell the watchdog that this loop runs")
    said = ""
    try:
        while not stop.is_set():
            await succession.try_to_start()
            state = f"serves the store at {settings.endpoint.url}" if succession.is_hosting else "waits for its turn"
            if state != said:
                said = state
                _print_notice(state)
                notify_service_manager(f"READY=1\nSTATUS={state}")
            with anyio.move_on_after(LOOK_EVERY):
                await stop.wait()
        notify_service_manager("STOPPING=1")
    finally:
        await cancel_and_wait(beating)
        await succession.aclose()
    return DONE


def notify_service_manager(state: str) -> None:
    """Send a state to the service manager, if NOTIFY_SOCKET names its socket; "@" begins an abstract name."""
    name = os.environ.get("NOTIFY_SOCKET")
    if not name:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), f"\0{name[1:]}" if name.startswith("@") else name)
    except OSError as error:
        log.warning("%s cannot be told %s: %s", name, state, error.strerror or error)


async def _notify_watchdog() -> None:
    microseconds, of = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", str(os.getpid()))
    while microseconds.isdecimal() and int(microseconds) and of == str(os.getpid()):
        await anyio.sleep(int(microseconds) / 2e6)
        notify_service_manager("WATCHDOG=1")


def _print_notice(what: str) -> None:
    say_error(f"rdzv serve: {what}")


def _limits_from_options(options: argparse.Namespace) -> store.Limits:
    text = ",".join(one.replace("=", ":", 1) for one in options.limit or ())
    limits: store.Limits = LIMIT.read(text) if options.limit else store.Limits()
    return limits


def _settings_of_options(url: str, options: argparse.Namespace, **given: Any) -> Settings:
    """Return settings with the options' credentials and `given`; the environment contributes only a token."""
    if options.ca is not None and options.cert is None:
        raise store.StoreUsageError("--ca needs --cert beside it")
    key = options.key or options.cert  # the certificate's file may contain the key, too
    given |= {"token_file": options.token_file, "cert": options.cert, "key": key, "ca": options.ca}
    environment = {name: value for name, value in os.environ.items() if name in ("RDZV_TOKEN", "RDZV_TOKEN_FILE")}
    return parse(url, given, environment)


def _reload_credentials(credentials: Credentials, tls: ssl.SSLContext | None) -> None:
    """Reload the credentials; if one is invalid, keep the present ones."""
    if tls is None and credentials.renew is None:
        _print_notice("there is no certificate to read again, and no file with a token")
        return
    what = "the token" if tls is None else "the certificate"
    try:
        token = credentials.read_token()
        credentials.server_tls()
    except RendezvousSettingsError as error:
        _print_notice(f"{what} stays as it was: {error}")
    else:
        credentials.token = token
        _print_notice(f"{what} was read again, and is shown to new connections")


def _write_atomically(path: str, text: str) -> None:
    """Write a file under another name and rename it, so that no reader sees half of the text."""
    partial = f"{path}.{os.getpid()}"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)
