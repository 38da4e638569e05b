"""The sample in docs/roles.md: two runs in one store, one of which continues if the other ends or fails."""

import re
from contextlib import AsyncExitStack
from pathlib import Path

import store
from tests.support.processes import ROOT, Child, start_python


async def test_actors_join_and_leave_while_trainers_train_and_end_with_them(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "roles.md").read_text(), re.M | re.S)
    async with store.serve() as server, AsyncExitStack() as stack:
        path = tmp_path / "sample.py"
        path.write_text(code.replace("tcp://head:29400", server.url))

        async def begin(role: str) -> Child:
            return await stack.enter_async_context(start_python("-W", "error", str(path), role))

        trainers = [await begin("trainer") for _ in range(2)]
        first, second = await begin("actor"), await begin("actor")
        await first.says("of 2: ('127.0.0.1'", timeout=30)
        second.kill()
        await first.says("actor 0 of 1: ('127.0.0.1'", timeout=30)
        assert [each.returncode for each in trainers] == [None, None], "they have not noticed"
        for each in trainers:
            assert await each.wait(timeout=60) == 0, each.written()
            assert any("trained" in line for line in each.output), each.written()
        assert await first.wait(timeout=30) == 0, first.written()
        assert any("acted" in line for line in first.output)
