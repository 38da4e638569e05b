"""`import rdzv` loads little. Modules that only a server needs are loaded when it starts, and may be missing before."""

import subprocess
import sys
import textwrap

import pytest


def run(script: str) -> str:
    """Run a script in a fresh Python and return its output."""
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


def test_importing_the_packages_loads_nothing_until_a_name_is_asked_for() -> None:
    loaded = run("""
        import sys
        before = set(sys.modules)
        import rdzv, store
        new = set(sys.modules) - before
        print(sorted(name for name in new if name.split(".")[0] in ("rdzv", "store")))
        assert not new & {"asyncio", "anyio", "msgpack", "ssl", "socket", "dataclasses", "inspect", "logging"}, new
        assert {"connect", "sync", "NodesLost"} <= set(dir(rdzv)) and "connect" in dir(store)
        assert rdzv.RendezvousClosedError is sys.modules["rdzv.errors"].RendezvousClosedError
        assert "rdzv.node.handler" not in sys.modules
        try:
            rdzv.conect
        except AttributeError as error:
            assert "no attribute 'conect'" in str(error)
        else:
            assert False
    """)
    ours = ["rdzv", "rdzv._import_guard", "rdzv._version", "store", "store._platform_guard", "store.lazy_names"]
    assert loaded == str(ours)


def test_a_module_of_the_same_name_does_not_hide_a_function() -> None:
    run("""
        import store.connecting, rdzv.cli.doctor, store, rdzv
        assert callable(store.connect) and callable(rdzv.connect) and callable(store.sync.connect)
    """)


def test_neither_server_nor_journal_is_loaded_before_it_is_used() -> None:
    loaded = run("""
        import sys, rdzv.sync, store.sync
        rdzv.connect, store.connect, store.Client
        servers = ("store.server", "store.disk", "store.engine", "sqlite3")
        print(sorted(name for name in sys.modules if name.startswith(servers)))
        assert callable(store.serve)
        assert "store.server.server" in sys.modules
        assert "store.server.journal" not in sys.modules
    """)
    assert loaded == "[]"


def test_a_client_and_a_store_in_memory_need_no_sqlite3() -> None:
    said = run("""
        import sys
        sys.modules["sqlite3"] = None  # as on a Python that was built without it
        import rdzv, store
        with store.sync.serve() as server, store.sync.connect(server.url) as client:
            client.put("k", b"v")
            assert client.get("k").value == b"v"
        try:
            store.sync.serve(data_dir="/nowhere").__enter__()
        except store.StoreUsageError as error:
            print(error)
    """)
    assert "data_dir= needs Python's module sqlite3, which this Python does not have" in said


@pytest.mark.parametrize("package", ["rdzv", "store", "rdzv.sync"])
def test_without_fcntl_the_error_names_the_supported_systems(package: str) -> None:
    said = run(f"""
        import sys
        class NotHere:
            def find_spec(self, name, path=None, target=None):
                if name == "fcntl":
                    raise ModuleNotFoundError("No module named 'fcntl'", name="fcntl")
        sys.modules.pop("fcntl", None)
        sys.meta_path.insert(0, NotHere())  # as on Windows
        try:
            import {package}
        except ImportError as error:
            print(error)
    """)
    assert said.startswith("rdzv and its store run on Linux and macOS")
    assert "use WSL 2" in said
    assert "\n" not in said
