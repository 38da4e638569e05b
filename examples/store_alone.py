"""The store alone, without rendezvous: compare-and-set, a watch, a lease, and a leader election made of these.

python examples/store_alone.py
"""

from __future__ import annotations

import asyncio

import anyio

import store


async def count_together(url: str, times: int) -> None:
    """Increment a counter beside other clients. A failed compare-and-set returns the present value."""
    async with store.connect(url) as client:
        entry = await client.get("counter")
        for _ in range(times):
            while True:
                value = int(entry.value) + 1 if entry else 1
                revision = entry.mod_revision if entry else 0  # 0: the key must not exist
                result = await client.compare_and_set("counter", b"%d" % value, expected_revision=revision)
                entry = result.entry
                if result.succeeded:
                    break


async def lead(url: str, name: str, elected: list[str]) -> None:
    """Stand for election until elected. The key is on a lease, so a dead leader makes room for the next."""
    async with store.connect(url) as client, client.watch("leader", snapshot=True) as watch:
        leader: bytes | None = None
        async for event in watch:
            leader = event.value if event.kind == "put" else None if event.kind == "delete" else leader
            if leader is None and event.kind != "put":
                lease = await client.grant(ttl=5, disconnect_ttl=0.1)  # keep_alive() would extend it
                if (await client.compare_and_set("leader", name.encode(), expected_revision=0, lease=lease)).succeeded:
                    break
        elected.append(name)
        print(f"{name} leads")
        await anyio.sleep(0.1)  # then disconnects, which counts as leaving


async def main() -> None:
    """Run all parts on a store of our own, and verify them."""
    async with store.serve() as server, store.connect(server.url) as client:
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(count_together, server.url, 20)
        entry = await client.get("counter")
        assert entry is not None
        print(f"5 clients counted to {entry.value.decode()} together")
        assert entry.value == b"100"

        async with client.watch("config/", snapshot=True) as watch:
            await client.put("config/colour", b"green", ttl=0.2)  # without `ttl` it would stay
            async for event in watch:
                print(f"revision {event.revision}: {event.kind} {event.key}")
                if event.kind == "delete":
                    break
        assert await client.get("config/colour") is None

        elected: list[str] = []
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                for name in ("ada", "ben", "cleo"):
                    group.start_soon(lead, server.url, name, elected)
        assert sorted(elected) == ["ada", "ben", "cleo"]
    print("verified: no count was lost, the key expired, and each led in turn")


if __name__ == "__main__":
    asyncio.run(main())
