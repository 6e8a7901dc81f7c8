"""The page in a browser: from a file without a network, and from `fastps-lab live`."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastps_lab.live.export import one_file
from live.visits import LATE_PAGE as LATE
from live.visits import Page, Served, faults, frame_with, until

ROOT = Path(__file__).resolve().parents[3]
#: Folder of the pictures that people look at.
PICTURES = ROOT / "target/live"
#: Milliseconds of the numbers of lessons, which take a core for some seconds.
LONG = 110_000
LESSONS = {
    "momentum": r"0\.\d+ for M = 2 .* 0\.\d+ for M = 16",
    "tune": r"The best momentum is 0\.9, 0\.8, 0\.[67] for M = 1, 4, 16",
    "adagrad": r"SGD grows [\d.]+ ×, that of Adagrad [\d.]+ ×",
    "onebit": r"Loss (0\.9|1\.0)\d × that of Float32 .* 2[89]\.?\d* × fewer bytes",
    "backup": r": [\d.]+ × less",
    "stale": r": [\d.]+ × lower",
}


@pytest.fixture
def page(browser: Any, exported: str) -> Iterator[Page]:
    """The page from its file, with the network off: nothing else is asked for, and nothing goes wrong."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    page = Page(context, exported)
    yield page
    context.close()
    assert [url for url in page.requests if not url.startswith((exported, "about:", "data:", "blob:"))] == []
    assert page.errors == []


@pytest.fixture
def live(browser: Any, served: Served) -> Iterator[Page]:
    """The page of a `fastps-lab live`."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = Page(context, served.link.partition("#")[0])
    yield page
    context.close()
    assert page.errors == []


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_lesson_computes_its_number(page: Page, lesson: str) -> None:
    page.open("paused=1")
    link = page.tab.locator("#lessons a").nth(list(LESSONS).index(lesson))
    link.click()
    page.tab.wait_for_selector("#lesson .good, #lesson .bad", timeout=LONG)
    result = page.text("#lesson .result")
    assert result.startswith("✓")
    assert re.search(LESSONS[lesson], result)
    assert page.text("#said") == result[2:]
    assert f"lesson={lesson}" in page.fragment


CHANGES = [
    ("problem", "rosenbrock", ""),
    ("x", "0.5", ""),
    ("y", "0.5", ""),
    ("workers", "3", ""),
    ("durations", "pareto", ""),
    ("spread", "4", ""),
    ("straggler", "10", ""),
    ("delay", "1", ""),
    ("seed", "7", ""),
    ("mode", "sync", ""),
    ("push_every", "3", "mode=local"),
    ("pull_every", "3", "mode=local"),
    ("local_lr", "0.005", "mode=local"),
    ("bound", "0", "mode=bounded"),
    ("backup", "4", "mode=sync"),
    ("warm_steps", "3", "mode=warm"),
    ("max_staleness", "2", ""),
    ("on_stale", "reject", "max_staleness=4"),
    ("delay_adaptive", False, "straggler=10"),
    ("momentum_matching", True, "momentum=0.9"),
    ("optimizer", "adam", ""),
    ("lr", "0.02", ""),
    ("momentum", "0.5", ""),
    ("nesterov", True, "momentum=0.5"),
    ("codec", "bfloat16", ""),
    ("error_feedback", False, "codec=onebit"),
]


def test_each_control_changes_the_run_and_the_address(page: Page) -> None:
    page.open("paused=1")
    for name, value, base in CHANGES:
        page.go(f"{base}&paused=1&t=8")
        before = page.table()
        page.go(f"{base}&paused=1")
        set_control(page, name, value)
        shown = str(int(value)) if isinstance(value, bool) else value
        assert re.search(rf"{name}[=:]{re.escape(shown)}(&|$)", page.fragment), name
        if name == "error_feedback":
            assert "the product refuses this" in page.text("#controls")
        page.go(re.sub(r"&t=[\d.]+", "", page.fragment) + "&t=8")
        assert page.table() != before, name


def set_control(page: Page, name: str, value: Any) -> None:
    """As a visitor does it."""
    control = page.tab.locator(f"#control-{name}")
    kind = control.evaluate("(input) => input.type")
    if kind == "checkbox":
        control.set_checked(value)
    elif kind.startswith("select"):
        control.select_option(value)
    else:
        control.evaluate(
            "(input, value) => { input.value = value; input.dispatchEvent(new Event('change')); }", value
        )
    page.settle()


def test_the_same_address_is_the_same_run(page: Page) -> None:
    events = "did=2:kill:1:0,3:set:lr:0.002,4:join:-1:0"
    page.open(f"problem=himmelblau&workers=5&momentum=0.5&codec=int8&{events}&t=6.25&paused=1")
    first = page.table()
    for _ in range(2):
        page.open(page.fragment)
        assert page.table() == first
    # Stepping there, and scrubbing back, leads to the same place.
    page.tab.click("#step10")
    scrub(page, 6.25)
    assert page.table() == first


def scrub(page: Page, time: float) -> None:
    """Moves the slider of the time."""
    page.tab.locator("#scrub").evaluate(
        "(range, time) => { range.value = time; range.dispatchEvent(new Event('input')); }", time
    )
    page.settle()


def test_settings_are_those_of_the_moment_that_is_shown(page: Page) -> None:
    did = "did=3:set:lr:0.002,4:set:codec:onebit,5:set:momentum:0.5"
    shown = {2: ("0.001", "float32", "0"), 4.5: ("0.002", "onebit", "0"), 5: ("0.002", "onebit", "0.5")}
    for start in (5, 2):
        page.open(f"problem=beale&lr=0.001&{did}&t={start}&view=bytes&paused=1")
        for time in (start, 2, 4.5, 5, 2):
            scrub(page, time)
            controls = [page.tab.input_value(f"#control-{name}") for name in ("lr", "codec", "momentum")]
            assert tuple(controls) == shown[time]
            assert page.cell("Time") == f"{time:g} s"
            # Bytes count for the codec that sent them, however the moment was reached.
            codecs = page.tab.eval_on_selector_all(
                ".barline span:first-child", "(all) => all.map((x) => x.innerText)"
            )
            assert [text.partition(":")[0] for text in codecs[:-1]] == ["Float32", "OneBit"][: 1 + (time > 4)]
            assert f"t={time:g}&" in page.fragment
            assert did in page.fragment
    # The same moment is the same run, reached by scrubbing or by its address.
    scrub(page, 4.5)
    table = page.table()
    page.open(page.fragment)
    assert page.table() == table
    # Time that passes brings the later events; what is done now replaces them.
    scrub(page, 2)
    page.tab.select_option("#control-codec", "int8")
    assert "did=2:set:codec:int8&" in page.fragment


def test_a_step_does_all_that_happens_at_its_time(page: Page) -> None:
    page.open("durations=constant&workers=4&paused=1")
    page.tab.click("#step")
    page.settle()
    table, updates = page.table(), page.cell("Updates")
    page.open(page.fragment)
    assert (page.table(), page.cell("Updates")) == (table, updates)


def test_back_and_forward(page: Page) -> None:
    page.open("paused=1&t=3")
    first = page.table()
    page.tab.select_option("#control-problem", "booth")
    page.tab.click("#tab-loss")
    assert "view=loss" in page.fragment
    page.tab.go_back()
    page.tab.go_back()
    page.settle()
    assert page.tab.input_value("#control-problem") == "beale"
    assert page.table() == first
    page.tab.go_forward()
    page.settle()
    assert page.tab.input_value("#control-problem") == "booth"


def test_the_start_is_chosen_by_mouse_and_by_keys(page: Page) -> None:
    page.open("paused=1")
    page.tab.click("#whole")
    assert "whole=1" in page.fragment
    page.tab.click("canvas.figure", position={"x": 100, "y": 100})
    assert re.search(r"x=-\d", page.fragment)
    page.tab.focus("canvas.figure")
    for key in ("ArrowRight", "ArrowUp", "Enter"):
        page.tab.keyboard.press(key)
    page.settle()
    assert page.text("#said").startswith("start at ")


@pytest.mark.parametrize(
    "fragment",
    [
        "workers=1000000000&lr=Infinity&x=NaN&momentum=-5",
        "problem=%FF%FE&mode=&view=<script>&codec=zip",
        "did=1:kill:99999,nonsense,:::,2:set:lr:NaN&t=1e300",
        "&&&==&=x",
        "x" * 1_000_000,
    ],
    ids=["numbers", "words", "events", "signs", "a megabyte"],
)
def test_garbage_becomes_the_nearest_valid_state(page: Page, fragment: str) -> None:
    page.open(f"{fragment}&paused=1" if len(fragment) < 1000 else fragment)
    assert page.text("#notice").startswith("Changed: ") or fragment.startswith("&&&")
    assert len(page.fragment) < 9000
    page.tab.click("#step")
    page.settle()
    assert page.cell("Updates") != "–"


def test_divergence_is_said_and_survived(page: Page) -> None:
    page.open("lr=5&speed=64")
    page.tab.wait_for_selector("text=Diverged at update", timeout=LATE)
    page.tab.fill("#control-lr", "0.01")
    page.tab.click("#restart")
    page.tab.click("#play")
    page.settle()
    assert "Diverged" not in page.text("#panel")


def test_kill_pause_join_and_nan_in_the_page(page: Page) -> None:
    page.open("view=break&paused=1&t=2")
    for key in ("kill0", "pause1", "nan2"):
        page.tab.click(f"[data-key={key}]")
    page.tab.click("text=Let one more worker join")
    for _ in range(3):
        page.tab.click("#step10")
    log = page.text(".log")
    assert "killed" in log
    assert "paused" in log
    assert "join" in log
    assert "expected finite values, got NaN" in log or "not finite" in log


VIEWS = ("race", "lanes", "loss", "staleness", "bytes", "optimizers", "break")


PICTURED = VIEWS[:3]


@pytest.mark.parametrize(("scheme", "views"), [("light", VIEWS), ("dark", PICTURED)], ids=["light", "dark"])
def test_nothing_serious_against_accessibility(
    browser: Any, exported: str, scheme: str, views: tuple[str, ...]
) -> None:
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": 1280, "height": 900})
    page = Page(context, exported)
    page.open("paused=1")
    for view in views:
        page.go(f"view={view}&paused=1&t=5&workers=10")
        page.table()
        assert faults(page) == [], view
        page.tab.evaluate("document.getElementById('numbers').open = false")
        if view in PICTURED:
            PICTURES.mkdir(parents=True, exist_ok=True)
            page.tab.screenshot(path=PICTURES / f"{view}-{scheme}.png", full_page=True)
    context.close()
    assert page.errors == []


def test_narrow_and_without_motion(browser: Any, exported: str) -> None:
    context = browser.new_context(
        offline=True, reduced_motion="reduce", viewport={"width": 360, "height": 740}
    )
    page = Page(context, exported)
    page.open("view=race")
    for view in VIEWS:
        page.go(f"view={view}")
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= 360, view
    assert not page.tab.is_visible("#play")
    before = page.cell("Updates")
    page.tab.wait_for_timeout(300)
    assert page.cell("Updates") == before
    page.tab.click("#step")
    page.settle()
    assert page.cell("Updates") != before
    context.close()


def test_without_webassembly_there_are_pictures(browser: Any, exported: str) -> None:
    context = browser.new_context(offline=True)
    context.add_init_script("delete globalThis.WebAssembly")
    page = Page(context, exported)
    page.tab.goto(exported)
    page.tab.wait_for_selector("#without img")
    sizes = page.tab.eval_on_selector_all("#without img", "(all) => all.map((one) => one.naturalWidth)")
    assert len(sizes) == len(LESSONS)
    assert min(sizes) > 300
    assert "no WebAssembly" in page.text("#trouble")
    context.close()


def test_the_program_does_the_same(page: Page) -> None:
    did = "did=1:kill:0:0,1.5:pause:1:2,2:join:-1:0,2.5:set:lr:0.002,9:kill:2:0"
    for fragment in (
        "mode=sync&codec=int8&backup=9&workers=3",
        "problem=digits&optimizer=adagrad&lr=0.1&workers=2",
        f"max_staleness=0&{did}",
    ):
        page.open(f"{fragment}&paused=1&t=4")
        page.tab.click("#program")
        code = page.text("#dialog pre")
        page.tab.click("#close")
        exec(compile(code, "program", "exec"), {"print": lambda *_: None})
    assert (
        "events=[simulate.Kill(0, at=1), simulate.Pause(1, at=1.5, seconds=2), simulate.Join(at=2)]" in code
    )
    assert "lr=0.002" in code
    assert code.startswith("# The page changed settings")


def test_the_page_is_small() -> None:
    assert len(gzip.compress(one_file().encode())) <= 600 * 1024


# -- for real ------------------------------------------------------------------------------------------------


def test_real_workers_and_servers(live: Page, served: Served) -> None:
    live.open(f"token={served.token}&lr=0.004&mode=async&way=real")
    assert "token" not in live.tab.url
    with served.listen() as frame:  # the settings of an address are sent as soon as the page is connected
        frame_with(frame, lambda f: f["settings"]["lr"] == 0.004)
    assert live.text("#way").startswith("For real")
    until(lambda: int(live.cell("Updates").replace(",", "").replace("–", "0")) > 20)
    assert faults(live) == []
    live.tab.click("#tab-staleness")
    fitted = "dt:has-text('Momentum fitted to this path') + dd"
    until(lambda: re.match(r"-?\d", live.text(fitted)))  # 3.2e-4 is a momentum, too

    live.tab.click("#tab-break")
    live.tab.wait_for_selector("[data-key=kill2]:enabled", timeout=LATE)
    victim = int(re.search(r"worker 0, process (\d+)", live.text("#panel"))[1])
    live.tab.click("[data-key=kill0]")
    until(lambda: not os.path.exists(f"/proc/{victim}"), late=2.0)
    live.tab.wait_for_selector("text=worker 0 killed (SIGKILL)", timeout=LATE)
    live.tab.click("[data-key=kill_server0]")
    live.tab.wait_for_selector("text=server of shard 0 is back", timeout=LATE)
    assert "VersionsLost" in live.text("#panel")
    live.tab.click("[data-key=nan1]")
    live.tab.wait_for_selector("text=NonFiniteError", timeout=LATE)

    second = Page(live.tab.context, live.base)
    second.tab.goto(f"{served.link}&way=real")
    second.tab.wait_for_selector("text=Another tab has the controls", timeout=LATE)
    assert second.tab.is_disabled("#control-mode")
    live.tab.close()  # in the middle
    second.tab.wait_for_selector("#control-mode:enabled", timeout=LATE)
    second.tab.select_option("#control-mode", "bounded")
    second.tab.click("#tab-break")
    second.tab.wait_for_selector("text=the workers were restarted from the present point", timeout=LATE)
    second.tab.wait_for_selector("#notice:has-text('The workers were restarted')", timeout=LATE)
    assert second.tab.is_disabled("#control-error_feedback")


def test_a_wrong_token_is_said(live: Page) -> None:
    live.tab.goto(f"{live.base}#token=wrong&way=real")
    live.tab.wait_for_selector("text=wrong token", timeout=LATE)
    live.errors.clear()  # the browser notes the refusal


@pytest.mark.parametrize(
    "lesson",
    [lesson if lesson == "backup" else pytest.param(lesson, marks=pytest.mark.nightly) for lesson in LESSONS],
)
def test_each_lesson_on_the_served_page(browser: Any, served: Served, lesson: str) -> None:
    context = browser.new_context(reduced_motion="reduce")  # only the numbers are computed
    page = Page(context, served.link.partition("#")[0])
    page.open("view=race")
    page.tab.locator("#lessons a").nth(list(LESSONS).index(lesson)).click()
    assert f"lesson={lesson}" in page.fragment
    page.tab.wait_for_selector("#lesson .good, #lesson .bad", timeout=LONG)
    result = page.text("#lesson .result")
    context.close()
    assert result.startswith("✓")
    assert re.search(LESSONS[lesson], result)
    assert page.errors == []
