"""The page in a real browser: every state, 4 to 10,000 nodes, a lost store, hostile names, keys, print."""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import rdzv
from rdzv.core.live.changes import server_sent_event
from rdzv.core.stuck.pace import NODE_STATES
from tests.rdzv.http.test_app import HOSTILE, LIMIT, node, served
from tests.support.processes import require, start_python
from tools.page_states import HOSTILE as HOSTILE_NAMES
from tools.page_states import play
from tools.pictures import CHROMIUM, NODE, Page, browser

pytestmark = pytest.mark.some_here(2)

if CHROMIUM is None:
    require("chromium")  # skips all of these tests, or fails them where everything is meant to be installed


@contextlib.asynccontextmanager
async def page_of() -> AsyncIterator[Page]:
    async with asyncio.timeout(3 * LIMIT), browser() as page:
        for domain in ("Runtime", "Log", "Page"):
            await page.call(f"{domain}.enable")
        await page.resize(1600, 1000)
        yield page


async def until(page: Page, expression: str) -> Any:
    """Wait until an expression of the page is true, and return its value."""
    return await page.evaluate(f"""new Promise((done) => {{
        const look = () => {{
            let found = null;
            try {{ found = {expression}; }} catch {{ }}
            if (found) done(found); else setTimeout(look, 10);
        }};
        look();
    }})""")


async def open_run(page: Page, url: str, run_id: str) -> None:
    await page.call("Page.navigate", url="about:blank")  # a change of the fragment alone loads nothing
    await page.call("Page.navigate", url=f"{url}/#{run_id}")
    await until(page, f"now && now.run.run_id === {json.dumps(run_id)} && (now.run.round === null || drawn.timeline)")


async def text(page: Page, element: str) -> str:
    return str(await page.evaluate(f"at('{element}').innerText"))


STATES = {
    "gather-8": "○ Waiting: 2 of 8 here",
    "lastcall-40": "◔ Last call: 38 of up to 40",
    "train-4": "▶ Training",
    "stuck-300": "! Training: 1 stuck",
    "stand-40": "! Training: all stand still",
    "slow-300": "▲ Training: 3 slow",
    "loss-300": "▲ Training: 1 missing",
    "drain-40": "▼ Training: 2 draining",
    "closed-40": "■ Closed: done",
    "givenup-40": "✕ Given up",
}


@pytest.mark.in_ci
async def test_each_state_has_its_words_its_shape_and_its_name() -> None:
    async with play(("train-4", "closed-40", "stuck-300")) as played, page_of() as page:
        for run_id, words in STATES.items():
            await open_run(page, played.url, run_id)
            assert await text(page, "state") == words
            assert await page.evaluate("document.title") == f"{words}: {run_id}"
            trouble, slow = await text(page, "trouble"), await text(page, "slow")
            match run_id:
                case "gather-8":
                    assert [name in trouble for name in ("gpu-00002", "gpu-00003", "gpu-00004")] == [True] * 3
                    assert "3 more nodes are needed; no name of theirs is known" in trouble
                case "stuck-300":
                    assert re.search(r"gpu-00150 stuck: no step for 1 min .*at step 48,000", trouble)
                    assert "rank 150, stuck" in slow
                    assert (await page.evaluate("at('map').ariaLabel")).startswith("300 nodes: 1 stuck, ")
                case "stand-40":
                    assert "no member is to blame" in trouble
                    assert "gpu-" not in slow
                case "slow-300":
                    assert slow.count("steps/s, the median is") == 3
                case "loss-300":
                    assert re.search(r"gpu-00200 lost .* ago, at .*: its process ended", trouble)
                    await page.evaluate("select(0)")
                    assert "rack=r" in await text(page, "told"), "a lost node has its attributes while its round stands"
                case "drain-40":
                    reasons = ("maintenance of rack 1", "ECC errors on GPU 3", "min more: switch")
                    assert [one for one in reasons if one not in trouble] == []
                case "givenup-40":
                    assert "with status 93" in await text(page, "reason")
                case "closed-40":
                    assert (await page.evaluate("at('map').ariaLabel")).startswith("40 nodes"), (
                        "those of its last round"
                    )
                    assert trouble == ""
        await page.call("Page.navigate", url="about:blank")
        await page.call("Page.navigate", url=played.url)
        await until(page, "document.querySelectorAll('.cards a').length === 3")
        cards = await page.evaluate("[...document.querySelectorAll('.cards bdi')].map((one) => one.textContent)")
        assert cards == ["stuck-300", "train-4", "closed-40"], "the troubled first, those that are over last"
        await page.evaluate("document.querySelector('.cards a').click()")
        await until(page, "now && now.run.run_id === 'stuck-300'")
        for fragment in ("100%", "%E0%A4%A", "no-such"):
            await page.call("Page.navigate", url="about:blank")
            await page.call("Page.navigate", url=f"{played.url}/#{fragment}")
            await until(page, "at('name').textContent.startsWith('no run')")
        assert page.problems == []


async def test_a_fragment_that_names_no_run_leaves_the_page_alive() -> None:
    """Regression: the page stayed empty at "/#%", which decodeURIComponent does not take."""
    async with play(("train-4",)) as played, page_of() as page:
        for fragment, run_id in (("%", "%"), ("%E0%A4%A", "%E0%A4%A"), ("100%25", "100%")):
            await page.call("Page.navigate", url="about:blank")
            await page.call("Page.navigate", url=f"{played.url}/#{fragment}")
            await until(page, f"document.body.innerText.includes({json.dumps(f'no run {run_id} in this store')})")
        await page.evaluate("location.hash = 'train-4'")
        await until(page, "now && now.run.run_id === 'train-4'")


async def test_one_of_many_runs_is_found_by_its_name_and_by_its_state() -> None:
    listed = ("stuck-30", *(f"train-{count}" for count in range(2, 132)))
    async with play(listed) as played, page_of() as page:
        await page.call("Page.navigate", url=played.url)
        await until(page, "document.querySelectorAll('.cards a').length === 100")
        assert await text(page, "morecards") == "and 31 more: find them by name"

        async def find(sought: str) -> list[str]:
            await page.evaluate(f"at('findrun').value = '{sought}'; at('findrun').dispatchEvent(new Event('input'))")
            cards = "[...document.querySelectorAll('.cards bdi')].map((one) => one.textContent)"
            return list(await page.evaluate(cards))

        assert await find("N-131") == ["train-131"]
        assert await find("1 stuck") == ["stuck-30"]
        assert (await find("no-such"), await text(page, "morecards")) == ([], "no such run")
        assert page.problems == []


async def test_hostile_names_are_text_and_never_wider_than_the_window() -> None:
    async with play() as played, page_of() as page:
        await open_run(page, played.url, "hostile-12")
        for width in (320, 375, 1600):
            await page.resize(width, 900)
            await page.evaluate("at('list').open = true; again(); showTable(now.run, now.found)")
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, width
        shown = await page.evaluate("document.body.innerText")
        assert HOSTILE_NAMES[0] in shown
        assert "\u202e" not in shown
        assert "\\u202e" in shown
        assert await page.evaluate("[document.images.length, document.querySelectorAll('script').length]") == [0, 1]
        assert (await page.evaluate("document.title")).endswith(": hostile-12")
        assert page.problems == []


@pytest.mark.some_of(0)
async def test_ten_thousand_nodes_are_visible_at_once_and_an_update_is_cheap() -> None:
    async with play() as played, page_of() as page:
        await page.resize(1920, 1080)
        await open_run(page, played.url, "slow-10000")
        await page.evaluate("source.close(); clearTimeout(silence)")
        assert await page.evaluate("at('map').getBoundingClientRect().bottom") <= 1080 + 60
        assert await page.evaluate("document.querySelectorAll('*').length") < 1500
        spent, sent = [], []
        before = played.state("slow-10000")
        await page.evaluate(f"source.onmessage({{data: {json.dumps(server_sent_event(None, before)[6:].decode())}}})")
        for _ in range(5):
            await asyncio.sleep(1.0)
            now = played.state("slow-10000", before)
            data = server_sent_event(before, now).split(b"data: ", 1)[1].decode()
            before = now
            sent.append(len(data))
            spent.append(
                await page.evaluate(f"""(() => {{
                    const data = {json.dumps(data)}, began = performance.now();
                    source.dispatchEvent(new MessageEvent("changed", {{ data }}));
                    document.body.offsetHeight;
                    return performance.now() - began;
                }})()""")
            )
        assert min(spent) < 100, spent  # 25 to 50 on an idle machine
        assert max(sent) < 1_000_000, "steps only, of 3.5 MB"
        for wanted, name in (("9999", r"rank 9999\b"), ("gpu-09999", "gpu-09999")):
            await page.evaluate(f"at('find').value = '{wanted}'; at('find').dispatchEvent(new Event('input'))")
            assert re.search(name, await text(page, "told"))
        assert (await page.call("Runtime.getHeapUsage"))["usedSize"] < 100e6
        assert page.problems == []


async def test_arrow_keys_move_on_the_map_only_if_it_has_the_focus() -> None:
    async with play() as played, page_of() as page:
        await open_run(page, played.url, "drain-40")

        async def press(key: str) -> str:
            named = {"key": key, "code": key, **({"text": key} if len(key) == 1 else {})}
            await page.call("Input.dispatchKeyEvent", type="keyDown", **named)
            await page.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)
            return await text(page, "told")

        assert (await press("n")).startswith("Point at a node")
        await page.evaluate("at('skip').click()")
        assert "unfit" in await press("n")
        assert "draining: leaves within" in await press("n")
        assert "draining: leaves within" in await press("n")
        assert "unfit" in await press("n"), "round about"
        names = [(await press(key)).split()[0] for key in ("End", "ArrowLeft", "ArrowRight", "Home", "ArrowDown")]
        assert names[0] == names[2] != names[1]
        assert names[3] != names[4]
        assert (await press("Escape")).startswith("Point at a node")
        await page.evaluate("at('time').focus()")
        await press("Home")
        assert (await text(page, "span")).startswith("round 0: 40 nodes, from ")
        await page.call("Accessibility.enable")
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        controls = [
            one for one in tree if one.get("role", {}).get("value") in ("combobox", "searchbox", "link", "button")
        ]
        assert controls
        assert [one for one in controls if not one.get("name", {}).get("value")] == []


async def test_dragging_on_the_rounds_zooms_and_escape_shows_all_again() -> None:
    async with play() as played, page_of() as page:
        await open_run(page, played.url, "loss-300")
        await page.evaluate("at('time').scrollIntoView()")
        seconds = "scale.end - scale.begin"
        whole = await page.evaluate(seconds)
        left, top, middle = await page.evaluate(
            "(({ left, top }) => [left + scale.names, top, top + TOP + BAND / 2])(at('time').getBoundingClientRect())"
        )
        wide = await page.evaluate("scale.wide")

        async def mouse(kind: str, part: float, y: float = middle, **more: Any) -> None:
            await page.call("Input.dispatchMouseEvent", type=kind, x=left + part * wide, y=y, button="left", **more)

        await mouse("mousePressed", 0.5, clickCount=1)
        await mouse("mouseMoved", 0.6, buttons=1)
        await mouse("mouseReleased", 0.75, clickCount=1)
        await mouse("mouseReleased", 0.75)
        assert await page.evaluate(seconds) == pytest.approx(whole / 10, rel=0.02)
        assert await page.evaluate("scale.begin") == pytest.approx(whole / 2, rel=0.02)
        assert "zoomed; Esc" in await page.evaluate("drawn.note")
        await page.evaluate("at('time').focus(); bandAfter('Escape')")
        assert await page.evaluate(seconds) == pytest.approx(whole, rel=0.02)
        await page.evaluate("bandAfter('Home'); bandAfter('Enter')")
        assert await page.evaluate("scale.begin") == 0
        assert await page.evaluate(seconds) < whole / 2, "the first round alone"
        await page.evaluate("at('range').value = '3600'; at('range').dispatchEvent(new Event('change'))")
        assert await page.evaluate(seconds) == pytest.approx(3600)
        row = await page.evaluate("bands.find((one) => !one.span)")
        await page.call(
            "Input.dispatchMouseEvent",
            type="mouseMoved",
            x=left - await page.evaluate("scale.names") + row["from"] + 1,
            y=top + row["top"] + 5,
        )
        assert (await text(page, "span")).startswith("gpu-"), "the rows of nodes have labels"
        assert page.problems == []


SHAPES = """(size) => {
    const pen = Object.assign(document.createElement("canvas"), { width: size, height: size }).getContext("2d");
    const grey = Object.fromEntries(["bg", ...TONES].map((tone) => [tone, tone === "bg" ? "#fff" : "#000"]));
    return NAMES.map((_, kind) => { shape(pen, kind, 0, 0, size, size, grey);
        const dots = pen.getImageData(0, 0, size, size).data;
        return Array.from(dots, (value, at) => at % 4 === 3 ? value : 255 - value).join(); });
}"""
CONTRAST = """(() => {
    const light = (hex) => {
        const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
        const [r, g, b] = parts.map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const whole = (hex) => hex.length === 4 ? "#" + [...hex.slice(1)].map((one) => one + one).join("") : hex;
    const of = (one, other) => {
        const [a, b] = [one, other].map((name) => light(whole(css("--" + name)))).sort((a, b) => b - a);
        return (a + 0.05) / (b + 0.05);
    };
    const texts = ["ink", "soft", "okText", "warnText", "badText", "waitText"];
    const cells = ["ok", "warn", "bad", "wait", "over", "drain"];
    return [
        Math.min(...texts.flatMap((name) => [of(name, "bg"), of(name, "card")])),
        Math.min(...cells.map((name) => of(name, "bg"))),
    ];
})()"""


async def test_states_are_readable_without_colour_and_text_has_contrast_in_every_theme() -> None:
    async with play() as played, page_of() as page:
        await open_run(page, played.url, "loss-300")
        assert await page.evaluate("NAMES") == list(NODE_STATES)
        for size in (5, 9, 24):
            assert len(set(await page.evaluate(f"({SHAPES})({size})"))) == len(NODE_STATES), size
        features: list[dict[str, str]] = []
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            await page.call("Emulation.setEmulatedMedia", features=features)
            texts, cells = await page.evaluate(CONTRAST)
            assert texts >= 4.5, scheme
            assert cells >= 3, scheme
        await page.call("Emulation.setEmulatedMedia", media="print", features=features)
        await page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert await page.evaluate("at('rows').children.length") == 100
        assert "gpu-00200" in await page.evaluate("at('rows').firstElementChild.textContent"), (
            "runs with problems come first"
        )


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Asia/Kathmandu"])
async def test_a_loss_in_a_real_run_is_on_the_page_within_a_second_in_the_readers_zone(zone: str) -> None:
    async with (
        served() as (server, url),
        node(server, "stays", ttl=5) as stays,
        node(server, HOSTILE) as goes,
        page_of() as page,
    ):
        await asyncio.gather(stays.next_rendezvous(), goes.next_rendezvous())
        await page.call("Emulation.setTimezoneOverride", timezoneId=zone)
        await page.resize(375, 800)
        await open_run(page, url, "job")
        began = time.monotonic()
        await goes.aclose()
        await until(page, "at('trouble').textContent.includes('left')")
        assert time.monotonic() - began < 1.0
        assert HOSTILE in await text(page, "trouble")
        resolved = await page.evaluate(
            "Intl.DateTimeFormat().resolvedOptions().timeZone"
        )  # browsers may spell it in another way
        assert f"times in {resolved}" in await text(page, "zone")
        at = await until(page, "document.querySelector('#events time')?.dateTime")
        shown = await page.evaluate("document.querySelector('#events time').textContent")
        offset = {"Europe/Berlin": 60, "Asia/Kathmandu": 345}[zone]
        minutes = int(at[11:13]) * 60 + int(at[14:16]) + offset
        summer = 60 if zone == "Europe/Berlin" else 0
        hours = {f"{(minutes + more) // 60 % 24:02}:{minutes % 60:02}" for more in (0, summer)}
        assert shown[-8:-3] in hours
        assert await page.evaluate("document.documentElement.scrollWidth") <= 375
        assert page.problems == [], "the security policy allows all that the page does"


@pytest.mark.in_ci
async def test_a_kill_is_on_the_page_within_half_a_second() -> None:
    async with (
        start_python("-m", "rdzv", "serve", "--port", "0", "--http-port", "0") as child,
        page_of() as page,
        contextlib.AsyncExitStack() as started,
    ):
        url = f"http://127.0.0.1:{(await child.says('HTTP')).rpartition(':')[2].strip()}"
        listens = re.search(r"listens on (\S+:\d+)", await child.says("listens on"))
        assert listens is not None
        run = f"tcp://{listens[1]}/job?min_nodes=1&max_nodes=3&last_call_timeout=60"
        nodes = [await started.enter_async_context(start_python("-c", NODE, run, f"gpu-{at}")) for at in range(3)]
        await open_run(page, url, "job")
        took = []
        for at in (2, 1):  # the second change comes just after the page was told of the first
            await until(page, f"now.run.members.length === {at + 1} && now.run.phase === 'training'")
            began = time.monotonic()
            os.kill(nodes[at].pid, signal.SIGKILL)
            await until(page, f"at('trouble').textContent.includes('gpu-{at} lost')")
            took.append(time.monotonic() - began)
            assert re.search(rf"gpu-{at} lost .*: its process ended", await text(page, "trouble"))
            assert "missing" in await text(page, "state")
        assert min(took) < 0.5, took
        assert max(took) < 1.0, took  # tests that run beside this one may use the processor


async def test_a_stopped_store_is_shown_and_durations_stop_until_it_is_back() -> None:
    async with start_python("-m", "rdzv", "serve", "--port", "0", "--http-port", "0") as child, page_of() as page:
        url = f"http://127.0.0.1:{(await child.says('HTTP')).rpartition(':')[2].strip()}"
        listens = re.search(r"listens on (\S+:\d+)", await child.says("listens on"))
        assert listens is not None
        async with rdzv.connect(f"tcp://{listens[1]}/job?min_nodes=1&max_nodes=1", is_host=False) as handler:
            await handler.next_rendezvous()
            await open_run(page, url, "job")
            os.kill(child.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                await until(page, "!at('away').hidden")
                assert time.monotonic() - began < 2.5
                assert await text(page, "state") == "? Unknown (was: Training)"
                assert (await page.evaluate("document.title")) == "no answer: job"
                facts = await text(page, "facts")
                await asyncio.sleep(2.0)
                assert await text(page, "facts") == facts
            finally:
                os.kill(child.pid, signal.SIGCONT)
            await until(page, "at('away').hidden && at('state').textContent === '▶ Training'")
