"""Real processes for tests: started, listened to, stopped, killed, and never left behind.

    async with start_python("-m", "rdzv", "serve", "--port", "0") as server:
        line = await server.line(containing="listening", timeout=10)
        server.kill()
        assert await server.wait(timeout=10) == -signal.SIGKILL

A child leads a process group of its own. When the block is left, whatever happened, the whole group is killed,
and the child reaped. If the block fails, all that the child has written is added to the error.
"""

import asyncio
import contextlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STDOUT, STDERR = 1, 2
PATIENCE = 60.0  # seconds; an interpreter takes 10 to start where the machine is busy enough, and no test is about that
_named_ports: set[int] = set()  # by free_port


class ChildError(AssertionError):
    """A child did not do what the test waits for; the message ends with the child's output."""


class Child(asyncio.SubprocessProtocol):
    """A running process, and its output so far.

    Attributes:
        output: All lines, of both streams, in the order they came.
        stdout: Those on standard output.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.output: list[str] = []
        self.stdout: list[str] = []
        self._stdout_seen = 0
        self._unfinished = {STDOUT: b"", STDERR: b""}
        self._open_streams = {STDOUT, STDERR}
        self._transport: asyncio.SubprocessTransport
        self._changed = asyncio.Event()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._transport.get_pid()

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for the signal that ended it; None while it runs."""
        return self._transport.get_returncode()

    async def line(self, containing: str = "", *, timeout: float = PATIENCE) -> str:
        """Return the next line on standard output that contains this; those before it are passed over.

        Raises:
            ChildError: The time is up, or the output ended, without one.
        """
        found: list[str] = []

        def is_settled() -> bool:
            while not found and self._stdout_seen < len(self.stdout):
                line = self.stdout[self._stdout_seen]
                self._stdout_seen += 1
                if containing in line:
                    found.append(line)
            return bool(found) or STDOUT not in self._open_streams

        await self._until(is_settled, timeout, f"wrote no line containing {containing!r}")
        if not found:
            raise ChildError(self._tell(f"ended its output without a line containing {containing!r}"))
        return found[0]

    async def says(self, containing: str, *, timeout: float = PATIENCE) -> str:
        """Return the first line on either stream that contains this, also if it has come already."""
        await self._until(
            lambda: any(containing in line for line in self.output) or not self._open_streams,
            timeout,
            f"wrote no line containing {containing!r}",
        )
        found = [line for line in self.output if containing in line]
        if not found:
            raise ChildError(self._tell(f"ended its output without a line containing {containing!r}"))
        return found[0]

    async def wait(self, *, timeout: float = PATIENCE) -> int:
        """Wait until it has exited and all its output is in; returns the exit status."""
        await self._until(lambda: self.returncode is not None and not self._open_streams, timeout, "did not exit")
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """SIGKILL: it is gone at once, and cleans nothing up."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: ask it to leave."""
        self._signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """SIGINT: what Ctrl-C sends."""
        self._signal(signal.SIGINT)

    def stop(self) -> None:
        """SIGSTOP: it stands still, its sockets stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT: it goes on as if no time had passed."""
        self._signal(signal.SIGCONT)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Called by the loop."""
        *lines, self._unfinished[fd] = (self._unfinished[fd] + data).split(b"\n")
        for line in lines:
            self._add_line(fd, line)
        self._notify()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        """Called by the loop."""
        if self._unfinished[fd]:
            self._add_line(fd, self._unfinished.pop(fd))
        self._open_streams.discard(fd)
        self._notify()

    def process_exited(self) -> None:
        """Called by the loop."""
        self._notify()

    async def end(self) -> None:
        """Kill it and all it started, and reap it."""
        # The group may outlive the child that leads it, and then still carries its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            await self.wait()
        finally:
            self._transport.close()

    def written(self) -> str:
        """All it has written, for error messages."""
        lines = self.output or ["(nothing)"]
        return f"{self.name} wrote:\n" + "\n".join(f"  {line}" for line in lines)

    def send_signal(self, number: signal.Signals) -> None:
        """Any other signal."""
        self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        # As the transport does not raise for a signal that comes too late, a test that sends one finds out here.
        if self.returncode is not None:
            raise ChildError(self._tell(f"had exited before it could be sent {number.name}"))
        self._transport.send_signal(number)

    def _add_line(self, fd: int, line: bytes) -> None:
        text = line.decode(errors="backslashreplace")
        self.output.append(text)
        if fd == STDOUT:
            self.stdout.append(text)

    async def _until(self, condition: Callable[[], bool], timeout: float, otherwise: str) -> None:
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            raise ChildError(self._tell(f"{otherwise} within {timeout:g} s")) from None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _tell(self, what: str) -> str:
        status = "still running" if self.returncode is None else f"exit status {self.returncode}"
        return f"{self.name} {what} ({status}); {self.written()}"


@contextlib.asynccontextmanager
async def start(*command: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> AsyncIterator[Child]:
    """Run a command for as long as the block lasts; `env` adds to this process's environment."""
    child = Child(" ".join([Path(command[0]).name, *command[1:]]))
    await asyncio.get_running_loop().subprocess_exec(
        lambda: child,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    try:
        yield child
    except BaseException as error:
        # ChildError says it already, unless it is another child that it speaks of.
        if not (isinstance(error, ChildError) and child.name in str(error)):
            error.add_note(child.written())
        raise
    finally:
        await child.end()


def start_python(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> contextlib.AbstractAsyncContextManager[Child]:
    """Run this Python, with this repository's packages to import; output comes line by line, unbuffered."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return start(sys.executable, *arguments, env={"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(env or {})}, cwd=cwd)


def free_port() -> int:
    """Return a port without a listener; only for programs that cannot listen on port 0.

    No port is returned twice in a process. All lie below the range that Linux and macOS use for port 0 and for outgoing
    connections, so the system gives none of them away between this call and its use.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 29_000)  # a test may have seeded the other
        if port not in _named_ports:
            _named_ports.add(port)
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                return port


def require(name: str) -> str:
    """Skip this test (or module) unless a command or Python module of this name is installed.

    With `RDZV_TEST_REQUIRE_ALL=1` it fails instead: where everything is meant to be installed, a skipped test
    is one that silently does not run.

    Returns:
        The path of the command, or of the module.
    """
    command = shutil.which(name)
    if command is not None:
        return command
    with contextlib.suppress(ModuleNotFoundError):  # raised for "a.b" when there is no "a"
        module = importlib.util.find_spec(name)
        # Any folder of that name is found as a namespace package, without an origin; it is not installed.
        if module is not None and module.origin is not None:
            return module.origin
    if os.environ.get("RDZV_TEST_REQUIRE_ALL") == "1":
        pytest.fail(f"not installed: {name}, and RDZV_TEST_REQUIRE_ALL=1 forbids skipping", pytrace=False)
    pytest.skip(f"skipped, not installed: {name}", allow_module_level=True)
