"""The essay in a browser: its sentences tell what its figures show."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastps_lab.live.export import PAGE
from fastps_lab.repro.catalogue import CLAIMS, FIGURES
from live.visits import LATE_PAGE, Page, Served, faults, until

Rows = list[list[str]]

#: Frames come at once, so that computing takes no longer than it must; they are counted.
QUICK = """
globalThis.frames_asked = 0;
globalThis.requestAnimationFrame = (draw) => {
  globalThis.frames_asked += 1;
  return setTimeout(() => draw(performance.now()));
};
"""


def numbers(rows: Rows, column: int, **where: str) -> list[float]:
    """A column of the rows whose run or kind is the given one."""
    wanted = list(where.values())
    return [float(row[column]) for row in rows if row[: len(wanted)] == wanted and row[column] != ""]


def waiting(rows: Rows) -> float:
    """Percent of the time of run A that is waiting."""
    spent = {
        kind: sum(float(row[4]) - float(row[3]) for row in rows if row[:2] == ["A", kind])
        for kind in ("computes", "waits")
    }
    return 100 * spent["waits"] / (spent["waits"] + spent["computes"])


def fitted(path: list[float]) -> float:
    """The momentum of a path: least squares of each step on the one before and the slope."""
    steps = [b - a for a, b in itertools.pairwise(path)]
    rows = [(past, -x, step) for past, x, step in zip(steps, path[1:], steps[1:], strict=False)]
    dd, dg, gg = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    nd, ng = (sum(r[i] * r[2] for r in rows) for i in (0, 1))
    return (nd * gg - ng * dg) / (dd * gg - dg * dg)


def step(rows: Rows, chosen: dict[str, str]) -> dict[str, float]:
    (x, y, before), (to_x, to_y, after) = ([float(one) for one in row[1:]] for row in rows[:2])
    length = math.hypot(to_x - x, to_y - y)
    return {"length": length, "before": before, "after": after, "last": float(rows[-1][3])}


def race(rows: Rows, chosen: dict[str, str]) -> dict[str, float]:
    found = {}
    for letter in "AB":
        name = chosen[letter.lower()]
        _, _, updates, way, _, *measures = next(row for row in rows if row[0] == name)
        found |= {f"updates{letter}": float(updates.removeprefix("over ")), f"way{letter}": float(way)}
        turns, shrinks, slow = (math.nan if one == "" else float(one) for one in measures)
        weakness = {"SGD": shrinks, "Adagrad": shrinks, "Adadelta": slow, "conjugate gradients": math.nan}
        measure = weakness.get(name, turns)
        if measure >= (2 if measure is shrinks else 0.001):
            found[f"weak{letter}"] = measure
    return found


def wait(rows: Rows, chosen: dict[str, str]) -> dict[str, float]:
    stale = numbers(rows, 5, run="B", what="update")
    return {
        "updatesA": max(numbers(rows, 4, run="A", what="update")),
        "updatesB": max(numbers(rows, 4, run="B", what="update")),
        "waiting": waiting(rows),
        "mean": statistics.mean(stale),
        "most": max(stale),
        "lossA": numbers(rows, 6, run="A", what="update")[-1],
        "lossB": numbers(rows, 6, run="B", what="update")[-1],
    }


def momentum(rows: Rows, chosen: dict[str, str]) -> dict[str, float]:
    fits = [float(row[5]) for row in rows if row[5] != ""]
    workers = float(chosen["workers"].split()[0])
    return {
        "runs": 100 * len(fits),
        "fitted": fitted([float(row[1]) for row in rows]),
        "error": 2 * statistics.stdev(fits) / math.sqrt(len(fits)),
        "expected": 1 - 1 / workers,
        "matched": float(rows[0][6]),
    }


def slow(rows: Rows, chosen: dict[str, str]) -> dict[str, float]:
    made = {letter: numbers(rows, 3, run=letter, what="version") for letter in "AB"}
    found = {letter: float(len(times)) for letter, times in made.items()} | {"waiting": waiting(rows)}
    if chosen["dead"].startswith("Let"):
        found |= {f"after{letter}": sum(time > 12 for time in times) for letter, times in made.items()}
        if found["afterA"]:
            times = [0.0, *made["A"]]
            found["pause"] = max(b - a for a, b in itertools.pairwise(times) if b > 12)
    return found


def survives(rows: Rows, chosen: dict[str, str]) -> dict[str, float]:
    a, b = (numbers(rows, 4, run=letter)[-1] for letter in "AB")
    found = {"updates": numbers(rows, 1, run="A")[-1], "A": a, "B": b}
    return found | ({"ratio": a / b} if a / b >= 2 else {})


def bits(rows: Rows, chosen: dict[str, str]) -> dict[str, float]:
    (a, b, c), (sent, plain) = (
        [numbers(rows, 3, run=letter)[-1] for letter in "ABC"],
        [numbers(rows, 5, run=letter)[-1] for letter in "AC"],
    )
    return {"bytes": sent, "plain": plain, "fewer": plain / sent, "A": a / c, "B": b / c}


def local(rows: Rows, chosen: dict[str, str]) -> dict[str, float]:
    (a, b), (plain, sent) = ([numbers(rows, at, run=letter)[-1] for letter in "AB"] for at in (3, 5))
    return {"bytes": sent, "plain": plain, "fewer": plain / sent, "A": a, "B": b}


def real(rows: Rows, chosen: dict[str, str]) -> dict[str, float]:
    points = [(float(row[1]), float(row[2])) for row in rows if row[0] == "update"]
    kills = {row[0]: float(row[1]) for row in rows if row[0].endswith("killed")}

    def made(since: float, until: float) -> float:
        counts = [max(updates for at, updates in points if at <= second) for second in (since, until)]
        return counts[1] - counts[0]

    told = {"made": points[-1][1]}
    for name, at in kills.items():
        if at + 2 > float(chosen["until"].split()[0]):
            continue
        if name.startswith("worker"):
            told |= {"workerAt": at, "before": made(at - 2, at), "after": made(at, at + 2)}
        else:
            near = [when for when, _ in points if at - 1 < when <= at + 8]
            told |= {"serverAt": at, "gap": max(b - a for a, b in itertools.pairwise(near))}
    if chosen["until"] == "18 s":
        told["pushes"] = numbers(rows, 2, what="pushes acknowledged")[0]
        told["lost"] = numbers(rows, 2, what="of them lost")[0]
    return told


#: What recomputes the numbers of a block's sentence, and three places of its controls.
BLOCKS: dict[str, tuple[Callable[[Rows, dict[str, str]], dict[str, float]], list[tuple[str, Any]]]] = {
    "step": (step, [("lr", 0.1), ("lr", 0.12), ("x", 4)]),
    "race": (race, [("a", "cg"), ("b", "sgd"), ("problem", "beale")]),
    "wait": (wait, [("slow", 1), ("slow", 5), ("slow", 8)]),
    "momentum": (momentum, [("workers", 0), ("workers", 2), ("workers", 6)]),
    "slow": (slow, [("slow", 20), ("dead", True), ("slow", 1)]),
    "survives": (survives, [("workers", 0), ("workers", 2), ("workers", 4)]),
    "bits": (bits, [("codec", "int8"), ("codec", "bfloat16"), ("codec", "onebit")]),
    "local": (local, [("n", 0), ("n", 3), ("n", 4)]),
    "real": (real, [("until", 3), ("until", 9), ("until", 15)]),
}


class Essay(Page):
    """The essay in a tab."""

    def open(self, fragment: str = "") -> None:
        self.tab.goto("about:blank")
        self.tab.goto(f"{self.base}#{fragment}")
        self.tab.wait_for_selector(".block[data-state]", timeout=LATE_PAGE)

    def see(self, block: str) -> None:
        """Scrolls to a block, and waits until it has computed."""
        self.tab.locator(f"#block-{block}").scroll_into_view_if_needed()
        self.tab.wait_for_selector(f"#block-{block}[data-state=done]", timeout=LATE_PAGE)

    def move(self, block: str, control: str, value: Any) -> None:
        """Moves a control as a reader does."""
        self.tab.locator(f"#{block}-{control}").evaluate(
            """(control, value) => {
              if (control.tagName === "BUTTON") return control.click();
              control.value = String(value);
              control.dispatchEvent(new Event(control.tagName === "SELECT" ? "change" : "input"));
            }""",
            value,
        )
        self.see(block)

    def sentence(self, block: str) -> str:
        return self.text(f"#block-{block} .insight")

    def told(self, block: str) -> dict[str, float]:
        """The numbers of the sentence."""
        pairs = self.tab.eval_on_selector_all(
            f"#block-{block} .insight b", "(all) => all.map((b) => [b.dataset.name, b.dataset.value])"
        )
        return {name: float(value) for name, value in pairs}

    def shown(self, block: str) -> Rows:
        """The table of the figure's numbers."""
        self.tab.evaluate(
            "(block) => { document.querySelector(`#block-${block} details`).open = true; }", block
        )
        self.tab.wait_for_selector(f"#block-{block} td", state="attached", timeout=LATE_PAGE)
        rows: Rows = self.tab.eval_on_selector_all(
            f"#block-{block} tbody tr",
            "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.dataset.value))",
        )
        return rows

    def chosen(self, block: str) -> dict[str, str]:
        """What the controls of a block show."""
        return self.tab.eval_on_selector_all(
            f"#block-{block} .words :is(input, select, button)",
            """(all) => Object.fromEntries(all.map((one) => [one.id.split("-")[1],
              one.selectedOptions?.[0].text ?? one.getAttribute("aria-valuetext") ?? one.textContent]))""",
        )


@pytest.fixture
def essay(browser: Any, exported: str) -> Iterator[Essay]:
    context = browser.new_context(offline=True, viewport={"width": 1440, "height": 900})
    context.add_init_script(QUICK)
    page = Essay(context, exported)
    page.open()
    yield page
    context.close()
    assert [url for url in page.requests if not url.startswith((exported, "about:", "data:"))] == []
    assert page.errors == []


#: Those that others stand for in a short run.
LONG = {"bits", "local", "survives"}


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=pytest.mark.nightly) if block in LONG else block for block in BLOCKS]
)
def test_each_sentence_is_true_of_its_figure(essay: Essay, block: str) -> None:
    recompute, places = BLOCKS[block]
    essay.see(block)
    sentences = set()
    for place in [None, *places]:
        if place is not None:
            essay.move(block, *place)
        told = essay.told(block)
        expected = recompute(essay.shown(block), essay.chosen(block))
        assert told == pytest.approx(expected, rel=1e-6, abs=1e-9), place
        sentences.add(essay.sentence(block))
        assert essay.sentence(block) in essay.tab.get_attribute(f"#block-{block} canvas", "aria-label")
    if block == "bits":  # back at the first place
        places = places[:-1]
    assert len(sentences) == 1 + len(places)


def test_waiting_costs_nothing_where_nobody_is_slow(essay: Essay) -> None:
    essay.see("wait")
    essay.move("wait", "slow", 1)
    told = essay.told("wait")
    assert told["waiting"] == 0
    assert told["lossA"] < 1.5 * told["lossB"]
    essay.see("slow")
    essay.move("slow", "dead", True)
    assert "the slow one too" in essay.sentence("slow")
    essay.move("slow", "slow", 1)
    assert "slow" not in essay.sentence("slow")


def test_each_optimizer_shows_its_weakness_at_the_start(essay: Essay) -> None:
    essay.see("race")
    names = ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adadelta", "adam")
    for name in names:
        essay.move("race", "a", name)
        essay.move("race", "b", names[names.index(name) - 1])
        assert {"weakA", "weakB"} <= set(essay.told("race")), name
        assert essay.sentence("race").count("here it") == 2, name


def test_nothing_moves_by_itself_and_the_link_restores_the_state(essay: Essay) -> None:
    essay.see("wait")
    essay.tab.wait_for_selector("[data-state=computes]", state="detached", timeout=LATE_PAGE)
    before = essay.tab.evaluate("frames_asked")
    essay.tab.wait_for_timeout(200)
    assert essay.tab.evaluate("frames_asked") == before
    # By keys alone.
    keys = (("step", "lr", "ArrowRight"), ("wait", "slow", "End"), ("slow", "dead", "Enter"))
    for block, control, key in keys:
        essay.see(block)
        first = essay.sentence(block)
        essay.tab.focus(f"#{block}-{control}")
        essay.tab.keyboard.press(key)
        essay.see(block)
        assert essay.sentence(block) != first
    essay.see("race")
    box = essay.tab.locator("#block-race canvas").bounding_box()
    essay.tab.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5)
    essay.tab.mouse.down()
    essay.tab.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] * 0.5)
    essay.tab.mouse.up()
    essay.see("race")
    assert {part.split("=")[0] for part in essay.fragment.split("&")} == {
        "essay.race", "step.lr", "wait.slow", "slow.dead", "race.x", "race.y",
    }  # fmt: skip
    assert "race.x=1&" in essay.fragment
    seen = {}
    for block in ("step", "wait", "slow", "race"):
        essay.see(block)
        seen[block] = essay.sentence(block)
    essay.open(essay.fragment)
    for block, sentence in seen.items():
        essay.see(block)
        assert essay.sentence(block) == sentence
    for wrong in ("step.lr=x", "step.lr=9&race.a=zip&wait.slow=", "essay.&momentum.workers=7", "step.lr=%ZZ"):
        essay.open(wrong)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_essay_is_for_all(browser: Any, exported: str, scheme: str) -> None:
    for width in (1440, 820, 390) if scheme == "light" else (390,):
        size = {"width": width, "height": 900}
        context = browser.new_context(
            offline=True, color_scheme=scheme, reduced_motion="reduce", viewport=size
        )
        context.add_init_script(QUICK)
        page = Essay(context, exported)
        page.open()
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
        if width == 390:
            for block in ("step", "wait", "slow", "real"):
                page.see(block)
            assert faults(page) == []
            above = page.tab.evaluate(
                """() => [...document.querySelectorAll(".block")].every((block) => {
                  const of = (name) => block.querySelector(name).getBoundingClientRect();
                  return of("canvas").bottom <= of(".words").top;
                })"""
            )
            assert above
        context.close()
        assert page.errors == []


def test_the_commands_of_the_other_systems_exist() -> None:
    page = (PAGE / "index.html").read_text()
    commands = re.findall(r"<code>fastps-lab repro ([\w -]+?)(?: --[\w-]+ DIR)?</code>", page)
    known = {*CLAIMS, *(name.replace("/", " ") for name in FIGURES)}
    assert len(commands) == page.count('src="others/')
    assert set(commands) <= known


def killed(page: Essay, button: str, words: str) -> bool:
    """Clicks, and looks for 5 s: a kill in the middle of a restart is of a process that ends anyway."""
    page.tab.click(button)
    for _ in range(50):
        if words in page.sentence("real"):
            return True
        page.tab.wait_for_timeout(100)
    return False


def test_kills_for_real(browser: Any, served: Served) -> None:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = Essay(context, served.link.partition("#")[0])
    page.open(f"token={served.token}&essay.real")
    page.see("real")
    page.tab.click("#real-start:enabled", timeout=LATE_PAGE)
    until(lambda: page.told("real").get("pushes", 0) > 20)
    for button, words in (("#real-worker", "for nobody waits for it"), ("#real-server", "then all go on")):
        until(lambda button=button, words=words: killed(page, button, words))
    assert "recording" not in page.sentence("real")
    told = page.told("real")
    assert told["lost"] <= told["pushes"]
    context.close()
    assert page.errors == []
