"""The laboratory in a browser: its controls, what its pictures say, and the order of things on a phone."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from live.visits import LATE_PAGE, Page, until

VIEWS = ("race", "lanes", "loss", "staleness", "bytes", "optimizers", "break")
#: What a visitor sees at points of the picture: colours, and texts of the tip.
LOOK = """(points) => {
  const canvas = document.querySelector("#panel canvas.figure");
  const scale = canvas.width / canvas.clientWidth;
  const box = canvas.getBoundingClientRect();
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return points.map(([x, y]) => {
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x, clientY: box.top + y }));
    const tip = document.querySelector("#panel .tip");
    const at = 4 * (Math.round(y * scale) * canvas.width + Math.round(x * scale));
    const colour = data.slice(at, at + 4).join();
    return { tip: tip.hidden ? "" : tip.textContent, colour };
  });
}"""


@pytest.fixture
def page(browser: Any, exported: str) -> Iterator[Page]:
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    page = Page(context, exported)
    yield page
    context.close()
    assert page.errors == []


def size(page: Page) -> tuple[int, int]:
    """Width and height of the picture."""
    wide, high = page.tab.eval_on_selector(
        "#panel canvas.figure", "(one) => [one.clientWidth, one.clientHeight]"
    )
    return wide, high


def look(page: Page, points: list[tuple[float, float]]) -> list[dict[str, str]]:
    """What there is at points of the picture."""
    found: list[dict[str, str]] = page.tab.evaluate(LOOK, points)
    return found


def test_controls_are_folded_in_groups_that_say_what_is_chosen(page: Page) -> None:
    page.tab.goto(f"{page.base}#paused=1&momentum=0.5&codec=int8&problem=booth&mode=sync")
    page.tab.wait_for_selector("#page:not([hidden]) .group", timeout=LATE_PAGE)
    page.settle()
    seen = page.tab.eval_on_selector_all(
        "aside :is(input, select)",
        "(all) => all.filter((one) => one.checkVisibility()).map((one) => one.name)",
    )
    assert seen == ["workers", "mode", "lr"]
    texts = page.tab.eval_on_selector_all(".group summary", "(all) => all.map((one) => one.innerText)")
    assert texts == [
        "Problem Booth, Start x -8, Start y -6",
        "Workers exponential",
        "Mode as usual",
        "Optimizer SGD, Momentum 0.5",
        "Codec Int8",
    ]
    page.tab.focus(".group summary")  # by keys
    page.tab.keyboard.press("Enter")
    assert page.tab.is_visible("#control-problem")


def test_colours_tell_heights_and_the_scale_names_them(page: Page) -> None:
    for fragment in ("problem=beale", "problem=rastrigin&whole=1"):
        page.open(f"{fragment}&paused=1")
        wide, high = size(page)
        strip = [one["colour"] for one in look(page, [(x, high - 29) for x in range(12, wide - 12, 3)])]
        bands = [colour for colour, _ in itertools.groupby(strip)]
        assert len(bands) == len(set(bands)) == 18
        points = [(float(x), float(y)) for x in range(20, wide, 37) for y in range(20, high - 60, 29)]
        heights = [
            (float(found[1].replace(",", "")), bands.index(one["colour"]))
            for one in look(page, points)
            if (found := re.search(r"height ([\d.,e-]+)$", one["tip"])) and one["colour"] in bands
        ]
        assert len(heights) > 100
        heights.sort()
        # Where two bands meet, a point may be in the one and its pixel in the other.
        steps = [b - a for (_, a), (_, b) in itertools.pairwise(heights)]
        assert min(steps) >= -1
        assert sum(step < 0 for step in steps) <= 0.05 * len(steps)
        about = page.tab.get_attribute("#panel canvas.figure", "aria-label")
        low, most = (
            float(one.replace(",", "")) for one in re.findall(r"(?:from|to) ([\d.,e-]+\d)", about)[:2]
        )
        assert low <= heights[0][0]
        assert heights[-1][0] <= most * 1.01


def test_the_map_uses_its_area(page: Page) -> None:
    page.open("paused=1&t=8")
    wide, high = size(page)

    def plane(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        found = [re.match(r"x ([-\d.]+), y ([-\d.]+)", one["tip"]) for one in look(page, points)]
        return [(float(one[1]), float(one[2])) for one in found if one]

    corners = [(2.0, 2.0), (wide - 2.0, high - 45.0)]
    (left, top), (right, bottom) = plane(corners)
    assert right - left < 4  # of nine
    assert left < 1 < 3 < right  # start and minimum
    assert bottom < -0.7 < 1 < top
    page.tab.click("#whole")
    page.settle()
    (left, top), (right, bottom) = plane(corners)
    assert (round(left, 1), round(right, 1)) == (-4.5, 4.5)
    page.open(page.fragment)
    assert plane(corners) == [(left, top), (right, bottom)]


def grid(page: Page, across: int, down: int) -> list[tuple[float, float]]:
    """Points all over the picture."""
    wide, high = size(page)
    return [(float(x), float(y)) for x in range(0, wide, across) for y in range(0, high - 42, down)]


def test_hovering_tells_workers_and_server(page: Page) -> None:
    # At the start all workers have the server's values: they stand beside it, and each is told.
    page.open("paused=1&workers=12")
    tips = {one["tip"] for one in look(page, grid(page, 11, 11))}
    assert {found[0] for tip in tips if (found := re.match(r"worker \d+", tip))} == {
        f"worker {k}" for k in range(12)
    }
    assert [tip for tip in tips if tip.startswith("server: x 1, y 1, loss 14.2")]


def test_hovering_tells_what_workers_do(page: Page) -> None:
    page.open("view=lanes&paused=1&t=8&mode=sync&backup=0")
    tips = {one["tip"] for one in look(page, grid(page, 5, 19))}
    assert [tip for tip in tips if re.match(r"worker 3 computes from [\d.]+ to ", tip)]
    assert [tip for tip in tips if re.match(r"worker \d waits for others from [\d.]+ to ", tip)]


def test_hovering_tells_numbers_of_curves(page: Page) -> None:
    page.open("paused=1")
    for view in ("loss", "staleness", "bytes"):
        page.go(f"view={view}&paused=1&t=8&codec=int8")
        page.tab.locator(".u-over").first.hover()
        told = page.text(".u-legend")
        assert re.match(r"[a-z ]+[\d.,]+[a-z ]+[\d.,]+$", told), (view, told)


def test_hovering_tells_results_of_optimizers(page: Page) -> None:
    page.open("view=optimizers&problem=booth&workers=1&paused=1")
    until(lambda: page.tab.locator("#panel .legend li").count() > 1)
    tips = {one["tip"] for one in look(page, grid(page, 14, 14))}
    assert [tip for tip in tips if re.match(r"[\w. ]+: (\d+ updates|not within 400) \(rate [\d.]+\)", tip)]


def content(page: Page) -> str:
    """Why a view has nothing to show, or how many marks its picture has."""
    return page.tab.evaluate(
        """() => {
          const seen = (one) => one.checkVisibility();
          const said = [...document.querySelectorAll("#panel .nothing")].find(seen);
          if (said !== undefined) return said.textContent;
          const drawn = [...document.querySelectorAll("#panel canvas")].filter(seen);
          const colours = (one) => {
            const { data } = one.getContext("2d").getImageData(0, 0, one.width, one.height);
            const counts = new Map();
            for (const one of new Uint32Array(data.buffer)) counts.set(one, (counts.get(one) ?? 0) + 1);
            return [...counts.values()].filter((count) => count > 30).length;
          };
          if (drawn.length > 0 && drawn.every((one) => colours(one) >= 3)) return "drawn";
          return document.querySelector("#panel .log li") ? "told" : "";
        }"""
    )


def test_no_state_is_without_content(page: Page) -> None:
    modes = ("async", "local", "bounded", "sync", "warm")
    codecs = ("float32", "bfloat16", "int8", "stochastic", "onebit")
    page.open("paused=1")
    for problem, time in itertools.product(("beale", "digits"), (0, 3)):
        for view in VIEWS:
            others = ["mode=async"]
            if time > 0 and view == "bytes":
                others = [f"codec={codec}" for codec in codecs] + ["codec=onebit&error_feedback=0"]
            elif time > 0 and view in ("race", "lanes", "staleness"):
                others = [f"mode={mode}" for mode in modes] + ["workers=1"]
            for other in others:
                page.go(f"view={view}&problem={problem}&{other}&t={time}&paused=1")
                assert until(lambda: content(page)), (view, problem, other, time)
    said = {
        "view=bytes&t=3": "Float32 drops nothing",
        "view=bytes&codec=int8&error_feedback=0&t=3": "nobody keeps what the codec drops",
        "view=loss": "press Play or Step",
        "view=lanes": "No time has passed",
        "view=staleness": "No gradient has been applied",
        "view=race&problem=digits": "All workers have the server's values",
        "view=race&lr=5&t=4": "Diverged at update",
    }
    for fragment, reason in said.items():
        page.go(f"{fragment}&paused=1")
        assert reason in content(page), fragment
    # The residual is there after a jump, too, and the optimizers run on the net.
    page.go("view=bytes&codec=onebit&t=8&paused=1")
    assert content(page) == "drawn"
    page.go("view=optimizers&problem=digits&workers=1&paused=1")
    until(lambda: page.tab.locator("#panel .legend li").count() > 1)
    assert "(rate" in page.text("#panel .legend")


def test_on_a_phone_the_picture_comes_first(browser: Any, exported: str) -> None:
    context = browser.new_context(offline=True, viewport={"width": 390, "height": 844})
    page = Page(context, exported)
    page.open("paused=1&t=4")
    order = [
        "#panel canvas",
        "#control-workers",
        "#control-mode",
        "#control-lr",
        "#play",
        "#control-problem",
        "#lessons a",
    ]
    tops = [page.tab.locator(one).first.bounding_box()["y"] for one in order]
    assert tops == sorted(tops)
    # Picture and controls fit on one screen, and the keyboard goes the same way.
    page.tab.evaluate("document.getElementById('laboratory').scrollIntoView()")
    box = page.tab.locator("#control-lr").bounding_box()
    assert box["y"] + box["height"] <= 844
    page.tab.focus("#panel canvas")
    reached = []
    for _ in range(8):
        page.tab.keyboard.press("Tab")
        reached.append(page.tab.evaluate("document.activeElement.id"))
    assert [one for one in reached if one.startswith("control-")] == [
        "control-workers",
        "control-mode",
        "control-lr",
    ]
    page.tab.set_viewport_size({"width": 1280, "height": 900})
    page.settle()
    assert page.tab.locator("aside #control-workers").count() == 1
    context.close()
    assert page.errors == []
