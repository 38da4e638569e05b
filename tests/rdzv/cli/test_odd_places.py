"""The commands in unusual environments: few open files, a full disk, a zip archive, a terminal in use, process 1."""

from __future__ import annotations

import argparse
import asyncio
import compileall
import contextlib
import fcntl
import importlib.util
import io
import os
import pty
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipapp
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rdzv.cli.command import Command, print_text, run_command
from rdzv.cli.main import main
from rdzv.loop import own_folder
from tests.support.processes import ROOT, free_port, start, start_python

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.some_here(3)

AS_ROOT = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root"
)


def ran(words: Sequence[str], **more: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    line = [sys.executable, "-m", "rdzv", *words]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **more)  # type: ignore[call-overload, no-any-return]


def alone(*command: str) -> list[str]:
    """Return the arguments of a launcher whose node is alone."""
    return ["run", f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1", "--", *command]


# ------------------------------------------------------------------------------------------ limits of this process


@pytest.mark.parametrize(("files", "processes", "needed"), [(24, 1, 45), (64, 8, 80)])
def test_a_low_limit_of_open_files_is_an_error_with_the_number_needed(files: int, processes: int, needed: int) -> None:
    """Regression: a node without a free descriptor waited 10 minutes for a store that it could not ask."""
    words = ["run", "--nproc", str(processes), *alone("true")[1:]]
    done = ran(words, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)))
    assert done.returncode == 121
    assert done.stderr == (
        f"rdzv run: the limit of open files is {files}, and --nproc {processes} needs {needed}; raise ulimit -n\n"
    )


@pytest.mark.parametrize("host", ["inside", "process"])
def test_a_store_that_cannot_serve_the_fewest_nodes_of_its_run_is_refused(host: str) -> None:
    """Regression: it admitted one connection, and the two nodes waited for `join_timeout`."""
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=2&host={host}"
    done = ran(["run", url, "--", "true"], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (70, 70)))
    said = r"rdzv run: the limit of open files is 70, and the store of a run of 2 nodes needs \d+; raise ulimit -n\n"
    assert re.fullmatch(said, done.stderr), done.stderr
    assert done.returncode == 121


def test_with_few_open_files_a_node_alone_has_its_rounds_store() -> None:
    """Regression: the store admitted one connection, and the first call of the round's store waited for ever."""
    script = "import rdzv.sync, sys\nfor one in rdzv.sync.rounds(sys.argv[1]):\n  with one: one.store.set('a', '')"
    line = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", sys.executable, "-c", script, alone()[1]]
    subprocess.run(line, cwd=ROOT, timeout=30, check=True)


@pytest.mark.parametrize("most", [0, 1024])
def test_a_low_limit_of_file_sizes_is_named(most: int) -> None:
    """Regression: it said "File too large", or that no folder for temporary files can be written to."""
    done = ran(alone("true"), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))
    assert done.stderr == f"rdzv run: File too large: this process may write files of {most} bytes; raise ulimit -f\n"
    assert done.returncode == 120


def test_a_limit_of_memory_is_named_if_no_thread_starts() -> None:
    script = "from store.net import dialing; import errno; print(dialing.exhausted_limit(OSError(errno.EAGAIN, '')))"
    limited = ["bash", "-c", 'ulimit -v 9000000; exec "$@"', "sh", sys.executable, "-c", script]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ", ulimit -v 9000000 kB of memory, and the cgroup's" in done.stdout


def test_a_node_that_cannot_leave_properly_exits_with_the_status_of_its_command() -> None:
    script = (
        "import sys; from rdzv.backends import hosting; from rdzv.cli.main import main\n"
        'async def fail(*_): raise RuntimeError("can\'t start new thread")\n'
        "hosting.HostedStore.aclose = fail; sys.exit(main(sys.argv[1:]))"
    )
    line = [sys.executable, "-c", script, *alone("echo", "trained")]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[0] trained\n")
    assert "the node did not leave properly: no more threads" in done.stderr


def said_without_a_file_left(work: str, *, left: int = 0) -> str:
    """Return the standard error of a script that does some work with `left` more descriptors to open."""
    script = f"""
import asyncio, os, resource, rdzv, rdzv.sync, store.sync
import rdzv.node.handler, store.client.client, store.net.racing
url = "tcp://127.0.0.1:{free_port()}"
resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    for file in held[len(held) - {left}:]:
        os.close(file)
{work}
"""
    line = [sys.executable, "-c", script]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False).stderr


def test_without_free_descriptors_joining_fails_at_once() -> None:
    work = """
async def main():
    async with rdzv.connect(url + "/job?min_nodes=1&is_host=false&join_timeout=60"):
        pass
asyncio.run(main())
"""
    began = time.monotonic()
    said = said_without_a_file_left(work, left=8 if importlib.util.find_spec("uvloop") else 6)  # for two event loops
    assert time.monotonic() - began < 20
    assert "Too many open files" in said


BLOCKING = {
    "a connection": "store.sync.connect(url, timeout=1)",
    "a name": "store.sync.connect('tcp://localhost:1', timeout=1)",
    "the node's thread": "rdzv.sync.connect(url + '/job?min_nodes=1&is_host=0&join_timeout=2')",
}


@pytest.mark.parametrize("what", BLOCKING)
def test_without_free_descriptors_a_blocking_call_reports_the_limit(what: str) -> None:
    """Regression: the error said that the name is unknown. Without a descriptor, the resolver finds no name."""
    said = said_without_a_file_left(f"with {BLOCKING[what]}:\n    pass")
    assert "Too many open files: this process may have 30 of at most 30; raise ulimit -n" in said


HOLDS_ALL_PORTS = """
import pathlib, socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40013")
server = socket.create_server(("127.0.0.1", 30000), backlog=64)
held = []
try:
    while True:
        held.append(socket.create_connection(("127.0.0.1", 30000)))
except OSError:
    sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""


@AS_ROOT
async def test_without_a_free_automatic_port_a_node_still_knows_its_own_address() -> None:
    """Regression: it took the address for another machine's, started no store, and waited 10 minutes for one."""
    url = "tcp://127.0.0.1:29400/job?min_nodes=1&join_timeout=20&master_port=29500"
    words = ("-c", HOLDS_ALL_PORTS, "-m", "rdzv", "run", url, "--", "echo", "trained")
    async with start("unshare", "--net", sys.executable, *words) as child:
        assert (await child.wait(), child.stdout) == (0, ["[0] trained"]), child.written()


@AS_ROOT
@pytest.mark.parametrize("host", ["[fe80::77%25lo]", "[fe80::77%lo]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"])
async def test_a_node_serves_and_meets_at_an_address_with_a_scope_or_a_mapped_one(host: str) -> None:
    """Regression: MASTER_ADDR had no scope, and a socket of IPv6 could not listen at a mapped address."""
    prepared = 'ip link set lo up; ip addr add fe80::77/64 dev lo nodad; exec "$@"'
    url = f"tcp://{host}:29400/job?min_nodes=1&join_timeout=20&insecure=1"
    words = (sys.executable, "-m", "rdzv", "run", url, "--", "sh", "-c", "echo at $MASTER_ADDR")
    async with start("unshare", "--net", "sh", "-c", prepared, "sh", *words) as child:
        assert await child.wait() == 0
        assert child.stdout == [f"[0] at {'127.0.0.1' if 'ffff' in host else 'fe80::77%lo'}"]


def test_the_limit_of_threads_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def no_thread(_: argparse.Namespace) -> int:
        raise RuntimeError("can't start new thread")

    async def no_store(_: argparse.Namespace) -> int:
        raise RuntimeError("the thread 'store' could not start: raise ulimit -u") from RuntimeError(
            "can't start new thread"
        )

    async def defect(_: argparse.Namespace) -> int:
        raise RuntimeError("something else")

    options = argparse.Namespace(debug=False, verbose=False)
    assert run_command(Command(name="run", help="", run=no_thread, takes_command=True), options) == 120
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rdzv run: no more threads or processes are started for this user: ulimit -u allows ")
    assert run_command(Command(name="run", help="", run=no_store, takes_command=True), options) == 120
    assert capsys.readouterr().err == "rdzv run: the thread 'store' could not start: raise ulimit -u\n"
    with pytest.raises(RuntimeError, match="something else"):
        run_command(Command(name="run", help="", run=defect), options)


@AS_ROOT
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="the limit does not hold for root")
@pytest.mark.parametrize("given", ["a process", "hosts", "names"])
@pytest.mark.parametrize("most", [3, 4])
def test_a_store_that_lacks_threads_is_reported_in_one_line(given: str, most: int) -> None:
    """Regression: its traceback, then that it has ended; or that a resource is "temporarily unavailable". With several
    hosts, the traceback of a group of tasks, or libuv's abort.
    """
    as_other = ["setpriv", "--reuid", "54321", "--clear-groups", "--inh-caps", "+dac_read_search"]
    limited = ["--ambient-caps", "+dac_read_search", "bash", "-c", f'ulimit -u {most}; exec "$@"', "sh"]
    words = alone("true")
    if given == "a process":
        words[1] += "&host=process"
    else:
        host = "localhost" if given == "names" else "127.0.0.1"
        words[1] = words[1].replace("127.0.0.1:", f"{host}:{free_port()},127.0.0.1:")
    line = [*as_other, *limited, sys.executable, "-m", "rdzv", *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    (said,) = done.stderr.splitlines()
    assert "ulimit -u allows" in said


# ------------------------------------------------------------------------------------------ disks and output


def test_a_log_that_cannot_be_written_does_not_end_a_node(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()  # where the directory would be made
    words = alone("echo", "trained")
    done = ran(["run", "--log-dir", str(tmp_path / "logs"), *words[1:]])
    assert (done.returncode, done.stdout) == (0, "[0] trained\n")
    assert "cannot be written: Not a directory; the job goes on without it" in done.stderr


@AS_ROOT
@pytest.mark.parametrize("full", ["nr_inodes=4", "size=4k"])
async def test_a_disk_that_fills_up_under_the_logs_does_not_end_a_node_at_the_next_round(
    full: str, tmp_path: Path
) -> None:
    """Regression: a healthy node ended. There is room for the first round's folder, or for a part of its output."""
    job = 'seq 2000; test "$RDZV_RESTARTS" = 1 || exit 3; echo trained'
    words = ["run", "--max-restarts", "1", "--log-dir", str(tmp_path), *alone("sh", "-c", job)[1:]]
    mounted = f'mount -t tmpfs -o {full} none {tmp_path}; exec "$@"'
    async with start("unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-m", "rdzv", *words) as child:
        assert await child.wait() == 0
        assert child.stdout.count("[0] 2000") == 2
        assert child.stdout[-1] == "[0] trained"
        said = [line for line in child.output if "No space left on device; the job goes on without it" in line]
        assert len(said) == (1 if "inodes" in full else 2), "once for each process of which something is lost"


def test_private_files_that_cannot_be_deleted_or_made_anew_do_not_end_a_node_at_the_next_round() -> None:
    """Regression: a healthy node ended, for example after a disk error had made the file system read-only."""
    spoil = (
        'rm -r "$RDZV_BEAT_DIR"; touch "$RDZV_BEAT_DIR"; mkdir "$TORCHELASTIC_ERROR_FILE"; test "$RDZV_RESTARTS" = 1'
    )
    done = ran(["run", "--max-restarts", "1", *alone("sh", "-c", f"{spoil} && echo trained")[1:]])
    assert (done.returncode, done.stdout) == (0, "[0] trained\n")


@pytest.mark.parametrize(
    ("words", "status"), [(["token"], 1), (alone("sh", "-c", "seq 99999 && echo trained >&2"), 0)], ids=["token", "run"]
)
def test_an_error_of_standard_output_is_named_and_ends_no_job(words: list[str], status: int) -> None:
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "rdzv", *words]
        done = subprocess.run(line, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert "standard output" in done.stderr
    assert "No space left on device" in done.stderr
    assert ("[0] trained" in done.stderr) == (status == 0)


def test_without_a_temporary_directory_TMPDIR_is_named(  # noqa: N802
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nonexistent"])
    assert main(alone("true")) == 120
    assert "set TMPDIR" in capsys.readouterr().err


def test_folders_of_killed_processes_are_deleted_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old = time.time() - 100

    def folder(name: str, *, changed: float) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "checkpoint").touch()
        os.utime(path, (changed, changed))
        return path

    left, fresh, other = folder("p-left", changed=old), folder("p-fresh", changed=time.time()), folder("q", changed=old)
    held = folder("p-held", changed=old)
    with open(held / own_folder.LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(held, (old, old))
        with own_folder.temporary_folder("p-") as mine:
            assert mine.is_dir()
            assert [path.is_dir() for path in (left, fresh, other, held)] == [False, True, True, True]
            os.utime(mine, (old, old))
            script = "from rdzv.loop.own_folder import make_process_folder; make_process_folder('p-')"
            subprocess.run(
                [sys.executable, "-c", script], cwd=ROOT, check=True, env={**os.environ, "TMPDIR": str(tmp_path)}
            )
            assert mine.is_dir(), "it is this process's"
        assert not mine.exists()


# ------------------------------------------------------------------------------------------ processes


@pytest.mark.parametrize("flags", [(), ("--preload", "json")], ids=["new", "warm"])
async def test_child_processes_of_a_worker_end_with_a_killed_guard(flags: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('pids', os.getppid(), child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1"
    async with start_python("-m", "rdzv", "run", *flags, url, "--", sys.executable, str(script)) as child:
        guard, grandchild = map(int, (await child.line("pids")).split()[-2:])
        os.kill(guard, signal.SIGKILL)
        assert await child.wait() == 128 + signal.SIGKILL
        async with asyncio.timeout(5):
            while Path(f"/proc/{grandchild}/stat").exists():  # noqa: ASYNC110, ASYNC240  there is no event to wait for
                await asyncio.sleep(0.05)


@AS_ROOT
async def test_as_process_1_a_launcher_reaps_orphans_and_keeps_the_status_of_its_own() -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "subprocess.run(['sh', '-c', 'setsid sleep 0.2 & setsid sleep 0.3 &'])\n"
        "time.sleep(3.5)\n"
        "stats = [open(f'/proc/{pid}/stat').read() for pid in os.listdir('/proc') if pid.isdecimal()]\n"
        "print('zombies', sum(stat.rpartition(')')[2].split()[0] == 'Z' for stat in stats), flush=True)\n"
        "sys.exit(7)\n"
    )
    line = (
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        sys.executable,
        "-m",
        "rdzv",
        *alone(sys.executable, "-c", script),
    )
    async with start(*line) as child:
        assert await child.line("zombies") == "[0] zombies 0"
        assert await child.wait() == 7


@AS_ROOT
@pytest.mark.parametrize("name", [b"a/b", b"\xff\xfe"])
async def test_a_host_name_that_is_no_name_of_a_node_is_made_one(name: bytes) -> None:
    """Regression: with a slash no round completed; what is not UTF-8 ended the node with an error of Python's codec."""
    words = [sys.executable, "-m", "rdzv", *alone("echo", "trained")]
    program = f"import os, socket; socket.sethostname({name!r}); os.execv({sys.executable!r}, {words!r})"
    async with start("unshare", "--uts", sys.executable, "-c", program) as child:
        async with asyncio.timeout(30):
            assert await child.line("trained") == "[0] trained"
            assert await child.wait() == 0


def test_a_host_name_that_cannot_be_looked_up_does_not_end_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "\udcff")
    monkeypatch.setattr("rdzv.cli.doctor.is_loopback", lambda _: False)  # else a store on loopback needs no such check
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}/job"
        assert main(["doctor", "--timeout", "0.5", url]) == 1
    assert "codec" not in capsys.readouterr().err


def test_letters_that_standard_output_cannot_encode_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `rdzv status` ended with an error of Python's codec, for a reason with an umlaut for example."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    print_text("z\xfc voll")
    assert written.getvalue() == b"z\\xfc voll\n"


@AS_ROOT
async def test_the_demo_says_at_once_that_there_is_no_loopback() -> None:
    async with start("unshare", "--net", sys.executable, "-m", "rdzv", "demo") as child:
        await child.line("is the loopback interface up?", timeout=20)
        assert await child.wait() == 1


def test_a_prompt_without_a_line_end_is_shown_and_lines_do_not_mix(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('you said', input('continue? '))\n"
        "else:\n"
        "    time.sleep(1.5)\n"
        "    print('beside it', flush=True)\n"
        "    time.sleep(1.5)\n"
    )
    url = f"tcp://127.0.0.1:{free_port()}/job?min_nodes=1"
    line = [sys.executable, "-m", "rdzv", "run", "--nproc", "2", url, "--", sys.executable, str(script)]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        line, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        text, answered = b"", False
        with contextlib.suppress(OSError):
            while chunk := os.read(ours, 4096):
                text += chunk
                if not answered and b"beside it" in text:
                    answered = bool(os.write(ours, b"yes\n"))
        assert process.wait(30) == 0
    os.close(ours)
    assert b"[0] continue? \r\n[1] beside it\r\n" in text
    assert b"you said yes" in text


# ----------------------------------------------------------------------------------------------- ways to install


def test_running_from_an_archive_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("rdzv", "store"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    zipapp.create_archive(source, tmp_path / "rdzv.pyz", main="rdzv.cli.main:main")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "rdzv.pyz"), "--version"], capture_output=True, text=True, check=False
    )
    assert "rdzv does not run from an archive" in done.stderr


def test_it_runs_from_compiled_files_without_sources(tmp_path: Path) -> None:
    for name in ("rdzv", "store"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(tmp_path, quiet=1, legacy=True)
    for path in tmp_path.rglob("*.py"):
        path.unlink()
    line = [sys.executable, "-m", "rdzv", *alone("echo", "trained")]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[0] trained\n"), done.stderr


# ----------------------------------------------------------------------------------------- mistyped arguments


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--foo"], "rdzv: there is no option '--foo'"),
        (["--foo", "status", "tcp://a/b"], "rdzv: there is no option '--foo'"),
        (["run", "--on-chnge", "usr1", "tcp://a/b", "--", "true"], "did you mean --on-change?"),
        (["run", "--on-change", "foo", "tcp://a/b", "--", "true"], "'foo' must be one of term, usr1, checkpoint"),
        (["status", "tcp://a/b?jointimeout=3"], "(did you mean join_timeout?)"),
        (["status", "tcp://a/b?nodes=3"], "(did you mean min_nodes?)"),
    ],
)
def test_a_mistyped_argument_is_named_with_the_probable_one(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_launcher_inside_a_launcher_is_an_error() -> None:
    inner = [sys.executable, "-m", "rdzv", "run", "--", "echo", "trained"]
    done = ran(alone(*inner))
    assert done.returncode == 121
    assert (
        "[0] rdzv run: RDZV_URL is the run of the rdzv run that has started this process" in done.stdout + done.stderr
    )


async def test_the_error_for_a_closed_run_mentions_rdzv_reopen() -> None:
    async with start_python("-m", "rdzv", "serve", "--port", "0") as server:
        url = (await server.says("listens on")).split("listens on ")[1].split(",")[0]
        line = ["run", f"tcp://{url}/job?min_nodes=1", "--", "true"]
        assert (await asyncio.to_thread(ran, line)).returncode == 0
        again = await asyncio.to_thread(ran, line)
    assert again.returncode == 122
    assert "rdzv run: rdzv reopen opens a closed run again; or give the job a run of its own\n" in again.stderr
