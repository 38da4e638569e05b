"""A process that has imported the workers' modules, and forks the workers.

    python [OPTIONS OF THE COMMAND] preload_server.py REQUESTS FOLDER MODULES STANDBY SIGNALS

REQUESTS is a socket to the launcher; when the launcher closes its end, this process ends. FOLDER is the first in
`sys.path` while MODULES, separated by commas, are imported. A request is four bytes of length, in the machine's order,
and JSON of that length. The files control, report, stdin, stdout and stderr are sent with a request's first byte:

    {"command": [...], "argv": [...], "module": bool, "env": {...}, "files": n}

This process forks a guard for each request, STANDBY of them ahead; the guard forks the worker
(`fork_and_guard_child`), which runs the script or module as the interpreter would. Its `sys.stdout` is buffered like
this process's.

Workers share the state of the imported modules, but not random states. If a module has started a Python thread or used
CUDA, which no fork survives, this process reports that and ends.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import types
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Prepare = Callable[[], Callable[[], object]]

READY = b"ready\n"
FILES = 5  # files sent with each request
REQUEST_BYTES_MAX = 16 * 1024 * 1024  # above Linux's limit for environment and arguments


def serve_forks(requests: socket.socket, folder: str, modules: list[str], standby: int, signals: str) -> Prepare:
    """Import modules and fork a worker per request; return only in workers, with a function that prepares the code."""
    guard, startup = _load_sibling_module("guard"), _load_sibling_module("worker_startup")
    guard.close_inherited_files(requests.fileno())
    guard.block_and_ignore(signals)
    here = ""  # empty if the working folder was deleted
    with contextlib.suppress(OSError):
        here = os.getcwd()  # read now: a module may change the working folder
    _put_first_in_sys_path(folder)
    for name in modules:
        importlib.import_module(name)
    problem = _why_no_fork()
    if problem is not None:
        requests.sendall(problem.encode() + b"\n")
        sys.exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps guards, as each reports to the launcher itself
    requests.sendall(READY)
    waiting: list[socket.socket] = []
    while True:
        while len(waiting) < standby:
            ours, theirs = socket.socketpair()
            if os.fork() == 0:
                for other in (requests, ours, *waiting):
                    other.close()
                return _worker(guard, startup, here, *_receive_request(theirs))
            theirs.close()
            waiting.append(ours)
        request, files = _receive_request(requests)
        if waiting:
            with waiting.pop(0) as first:
                socket.send_fds(first, [len(request).to_bytes(4, sys.byteorder)], files)
                first.sendall(request)
        elif os.fork() == 0:
            requests.close()
            return _worker(guard, startup, here, request, files)
        for file in files:
            os.close(file)


def _worker(guard: types.ModuleType, startup: types.ModuleType, here: str, request: bytes, files: list[int]) -> Prepare:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    wanted = json.loads(request)
    control, report, *streams = files
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    guard.fork_and_guard_child(control, wanted["files"], report=report)
    # `fork_and_guard_child` restores the default signal actions. Python changes three at its start: do the same.
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(wanted["env"])
    startup.register_stack_dumps()
    with contextlib.suppress(OSError):  # the folder was deleted: stay in it
        os.chdir(here)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # otherwise all workers draw the same numbers
    sys.argv[:] = wanted["argv"]
    sys.orig_argv[:] = wanted["command"]
    renew_native_id = getattr(threading.main_thread(), "_set_native_id", None)  # a fork keeps the parent's native id
    if renew_native_id is not None:
        renew_native_id()
    return partial(_make_module_runner if wanted["module"] else _compile_script, here)


def _put_first_in_sys_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _compile_script(here: str) -> Callable[[], object]:
    path = os.path.join(here, sys.argv[0])
    _put_first_in_sys_path(os.path.dirname(os.path.realpath(path)))
    source = Path(path).read_bytes()
    main = _replace_main_module()
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    return partial(exec, compile(source, path, "exec", dont_inherit=True), main.__dict__)  # the user's command


def _make_module_runner(here: str) -> Callable[[], object]:
    import runpy

    _put_first_in_sys_path(here)
    _replace_main_module()
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # the interpreter's code for -m
    return partial(run, sys.argv[0])


def _replace_main_module() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main


def _why_no_fork() -> str | None:
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"a preloaded module has started a thread ({', '.join(threads)[:200]}), which no fork would have"
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "a preloaded module has touched CUDA, which cannot be used in a fork"
    return None


def _receive_request(requests: socket.socket) -> tuple[bytes, list[int]]:
    first, files, _, _ = socket.recv_fds(requests, 4, FILES)
    if not first:
        os._exit(0)
    first += _receive_exactly(requests, 4 - len(first))
    return _receive_exactly(requests, min(int.from_bytes(first, sys.byteorder), REQUEST_BYTES_MAX)), files


def _receive_exactly(requests: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        chunk = requests.recv(count - len(received))
        if not chunk:
            os._exit(0)
        received += chunk
    return bytes(received)


def _load_sibling_module(name: str) -> types.ModuleType:
    """Load a module from the folder of this file, as `import rdzv` may fail in this process."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _hide_own_frames() -> None:
    shown = sys.excepthook

    def show_user_traceback(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_user_traceback


def _preload_server_main(requests: str, folder: str, modules: str, standby: str, signals: str) -> Prepare:
    with socket.socket(fileno=int(requests)) as channel:
        return serve_forks(channel, folder, [name for name in modules.split(",") if name], int(standby), signals)


if __name__ == "__main__":
    _prepare = _preload_server_main(*sys.argv[1:])
    try:
        _prepare()()  # called here, so that a worker's stack has only one frame of this file
    except BaseException:
        _hide_own_frames()
        raise
