"""The `rdzv` command: argparse, exit statuses, and one line per error.

    0 done    1 failed    2 wrong usage    3 closed    4 timed out    5 no connection

Everything it does is the library's; nothing is decided here. Commands that only look at a run, or close it, need no
`min_nodes`, and never host a store: with nobody listening there is nothing to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import ssl
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import anyio

import store
from rdzv import demo
from rdzv.backends import Credentials, connect
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousSettingsError,
    RendezvousTimeoutError,
)
from rdzv.handler import Handler
from rdzv.settings import parse
from rdzv.state import Participant, RunStatus
from store.address import DEFAULT_PORT, host_and_port
from store.loops import loop_factory

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

__all__ = ["main"]

DONE, FAILED, WRONG_USAGE, CLOSED, TIMED_OUT, NO_CONNECTION = range(6)

LOOK_WITHIN = 10.0  # seconds in which a store must answer somebody who only looks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.debug else logging.INFO if options.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            status: int = runner.run(options.run(options))
            return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has enough of it, and of what is still to be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (RendezvousError, store.StoreError, OSError, ValueError) as error:
        if options.debug:
            raise
        sys.stderr.write(f"rdzv {options.command}: {error}\n")
        return _status_of(error)


def _status_of(error: Exception) -> int:
    match error:
        case RendezvousSettingsError() | store.StoreUsageError():
            return WRONG_USAGE
        case RendezvousClosedError():
            return CLOSED
        case RendezvousTimeoutError() | store.StoreTimeoutError():
            return TIMED_OUT
        case RendezvousConnectionError() | store.ConnectionLost() | store.AuthenticationError():
            return NO_CONNECTION
        case _:
            return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rdzv", description="Rendezvous for elastic training jobs: who is in, with what rank, and meeting again."
    )
    parser.add_argument("--version", action="version", version=f"rdzv {version('rdzv')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], Coroutine[Any, Any, int]], help: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(run=run)
        sub.add_argument("-v", "--verbose", action="store_true", help="log what happens")
        sub.add_argument("--debug", action="store_true", help="log everything, and show tracebacks")
        return sub

    command("demo", _demo, "an elastic run on this machine: join, kill, regroup, grow, close")

    sub = command("serve", _serve, "serve a store that outlives the nodes of its runs")
    sub.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; '' is all interfaces (default: %(default)s)"
    )
    sub.add_argument("--port", type=_port, default=DEFAULT_PORT, help="port; 0 takes a free one (default: %(default)s)")
    sub.add_argument("--data-dir", metavar="DIR", help="keep the store here, through restarts; without, in memory only")
    sub.add_argument("--token-file", metavar="FILE", help="file with the secret that clients must prove to know")
    sub.add_argument("--cert", metavar="FILE", help="PEM file with the certificate; turns TLS on")
    sub.add_argument("--key", metavar="FILE", help="PEM file with its private key")
    sub.add_argument(
        "--ca", metavar="FILE", help="PEM file with the authorities that clients' certificates must come from"
    )
    sub.add_argument("--insecure", action="store_true", help="listen beyond loopback without token or mutual TLS")
    sub.add_argument("--port-file", metavar="FILE", help="write the port here once the store listens")

    sub = _looking_at_a_run(command("status", _status, "show how a run stands, and what it waits for"))
    sub.add_argument("--json", action="store_true", help="as one JSON object")
    sub.add_argument("--watch", action="store_true", help="again at every change, until the run is closed")

    sub = _looking_at_a_run(command("close", _close, "close a run for all its nodes"))
    sub.add_argument("--reason", default="", help="why; every node is told")

    sub = _looking_at_a_run(command("ban", _ban, "keep a node out of a run"))
    sub.add_argument("node", metavar="NODE", help="the node's id")
    sub.add_argument("--reason", default="", help="why; the node is told")
    sub.add_argument("--now", action="store_true", help="put it out of its round at once, not only of the next one")

    sub = _looking_at_a_run(command("unban", _unban, "let a banned node come again"))
    sub.add_argument("node", metavar="NODE", help="the node's id")

    sub = command("ping", _ping, "measure how quickly a store answers")
    sub.add_argument("url", metavar="URL", help="scheme://host[:port][/run_id]")
    sub.add_argument("--count", type=int, default=5, help="how often (default: %(default)s)")
    return parser


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not from 0 to 65535")
    return port


def _looking_at_a_run(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
    sub.add_argument("url", metavar="URL", help="scheme://host[:port]/run_id[?parameters]")
    return sub


async def _demo(_: argparse.Namespace) -> int:
    return DONE if await demo.run(print) else FAILED


# ---------------------------------------------------------------------------------------------------- serve


async def _serve(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends it at once."""
    stop = anyio.Event()
    loop = asyncio.get_running_loop()

    def asked_to_stop() -> None:
        if stop.is_set():
            os._exit(FAILED)
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, asked_to_stop)
    serving = store.serve(
        options.host,
        options.port,
        token=_token_in(options.token_file),
        tls=_server_tls(options),
        insecure=options.insecure,
        data_dir=options.data_dir,
    )
    async with serving as server:
        where = host_and_port(options.host or "*", server.port)
        kept = f"kept in {options.data_dir}" if options.data_dir else "in memory only: it ends with this process"
        sys.stderr.write(f"rdzv serve: store {server.store_id} listens on {where}, {kept}\n")
        if options.port_file:
            _write_whole(options.port_file, f"{server.port}\n")
        await stop.wait()
        sys.stderr.write(f"rdzv serve: leaving, {server.connections} connections are told\n")
    return DONE


def _token_in(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            token = file.read().strip()
    except OSError as error:
        raise store.StoreUsageError(f"--token-file {path} cannot be read: {error.strerror or error}") from error
    if not token:
        raise store.StoreUsageError(f"--token-file {path} is empty; write the shared secret into it")
    return token


def _server_tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    if options.cert is None:
        if options.key is not None or options.ca is not None:
            raise store.StoreUsageError("--key and --ca need --cert beside them")
        return None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.cert, options.key)
        if options.ca is not None:
            context.load_verify_locations(options.ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise store.StoreUsageError(
            f"--cert {options.cert}, --key {options.key}, --ca {options.ca} cannot be used: {error}; "
            f"they must be readable PEM files, and the key the certificate's"
        ) from error
    return context


def _write_whole(path: str, text: str) -> None:
    """Write a file so that whoever waits for it never reads half of it."""
    partial = f"{path}.{os.getpid()}"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)


# ---------------------------------------------------------------------------------------------------- looking


async def _status(options: argparse.Namespace) -> int:
    show = _as_json if options.json else _in_words
    async with connect(options.url, is_host=False, join_timeout=LOOK_WITHIN) as handler:
        if options.watch and isinstance(handler, Handler):
            shown = ""
            async with contextlib.aclosing(handler.statuses()) as statuses:
                async for status in statuses:
                    if shown != (shown := show(status)):
                        print(shown, flush=True)
        else:
            print(show(await handler.status()), flush=True)
        return DONE


def _as_json(status: RunStatus) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, Participant):
            return {
                "node_id": value.node_id,
                "rank": value.rank,
                "address": value.address,
                "payload": value.payload,
                "attributes": dict(value.attributes),
            }
        return repr(value)

    fields = {field.name: getattr(status, field.name) for field in dataclasses.fields(status)}
    fields["phase"] = status.phase.value
    fields["refused"] = dict(status.refused)
    return json.dumps(fields, default=plain)


def _in_words(status: RunStatus) -> str:
    lines = [f"run {status.run_id}: {status.phase.value}: {status.reason}"]
    if status.round is not None and status.bootstrap_address is not None:
        where = host_and_port(*status.bootstrap_address)
        lines.append(f"round {status.round}: world size {status.world_size}, rank 0 at {where}")
    lines.extend(f"  rank {member.rank:>4}  {member.node_id}  {member.address}" for member in status.members)
    lines.extend(f"  {'spare' if node_id in status.spares else 'waiting':>9}  {node_id}" for node_id in status.waiting)
    lines.extend(f"    refused  {node_id}: {reason}" for node_id, reason in status.refused.items())
    lines.append(f"coordinator: {status.coordinator or 'none'}")
    return "\n".join(lines)


async def _close(options: argparse.Namespace) -> int:
    async with connect(options.url, is_host=False, join_timeout=LOOK_WITHIN) as handler:
        await handler.set_closed(options.reason)
        print(f"run {handler.run_id} is closed")
    return DONE


async def _ban(options: argparse.Namespace) -> int:
    async with connect(options.url, is_host=False, join_timeout=LOOK_WITHIN) as handler:
        await handler.ban(options.node, options.reason, now=options.now)
        print(f"node {options.node} is banned from run {handler.run_id}")
    return DONE


async def _unban(options: argparse.Namespace) -> int:
    async with connect(options.url, is_host=False, join_timeout=LOOK_WITHIN) as handler:
        await handler.unban(options.node)
        print(f"node {options.node} may come again to run {handler.run_id}")
    return DONE


async def _ping(options: argparse.Namespace) -> int:
    url = options.url if options.url.rpartition("://")[2].count("/") else f"{options.url}/ping"
    settings = parse(url, {}, os.environ)
    credentials = Credentials.of(settings)
    connecting = store.connect(
        settings.endpoint.url, token=credentials.token, tls=credentials.client_tls(), timeout=LOOK_WITHIN
    )
    async with connecting as client:
        times = [await client.ping() for _ in range(max(options.count, 1))]
        for seconds in times:
            print(f"{settings.endpoint.url} answers in {seconds * 1000:.3f} ms")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
