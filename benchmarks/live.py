"""How soon the live page draws its first figure, and its script work per frame, in Debian's Chromium.

    python benchmarks/live.py [--output benchmarks/README.md]

The page runs from its one file, with 16 workers at 256 times the speed of its clock: about 64 pushes a frame
at 60 frames a second. The work is that of the page's own callbacks: events of the core, reading them, and
drawing. The first figure is that of the essay's first section: its time is from the start of the navigation
to the end of the frame that draws its path, in a window that has loaded nothing before.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import machine, table, write_between_markers
from playwright.sync_api import sync_playwright

from fastps_lab.live.export import one_file

VIEWS = ("race", "lanes", "loss", "staleness", "bytes")
FRAMES = 300
STATE = "workers=16&lr=0.0001&speed=256"
#: Times all callbacks of a frame.
NOTE = """
globalThis.frames_ = [];
const ask = globalThis.requestAnimationFrame.bind(globalThis);
globalThis.requestAnimationFrame = (callback) => ask((now) => {
  const began = performance.now();
  callback(now);
  frames_.push(performance.now() - began);
});
"""
#: Notes when the first line has been drawn and its frame is over.
FIRST = """
const stroke = CanvasRenderingContext2D.prototype.stroke;
CanvasRenderingContext2D.prototype.stroke = function (...path) {
  CanvasRenderingContext2D.prototype.stroke = stroke;
  requestAnimationFrame(() => { globalThis.first_ = performance.now(); });
  return stroke.apply(this, path);
};
"""
OPENINGS = 7


def first_figure(browser: Any, address: str) -> list[float]:
    """Milliseconds to the first figure, for each opening."""
    found = []
    for _ in range(OPENINGS):
        context = browser.new_context(viewport={"width": 1440, "height": 900}, bypass_csp=True)
        page = context.new_page()
        page.add_init_script(FIRST)
        page.goto(address)
        page.wait_for_function("globalThis.first_ !== undefined")
        found.append(page.evaluate("first_"))
        context.close()
    return sorted(found)


def measure(browser: Any, address: str, view: str) -> list[str]:
    """A row: the view, pushes and milliseconds of script in a frame, and frames in a second."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, bypass_csp=True)
    page.add_init_script(NOTE)
    page.goto(f"{address}#{STATE}&view={view}")
    page.wait_for_function("frames_.length > 60")
    updates = "Number(document.querySelector('#strip dd').innerText.replaceAll(',', ''))"
    began = page.evaluate(f"() => {{ frames_.length = 0; return [performance.now(), {updates}]; }}")
    page.wait_for_function(f"frames_.length >= {FRAMES}")
    ended = page.evaluate(f"() => [performance.now(), {updates}, frames_.slice()]")
    page.close()
    frames = ended[2]
    return [
        view.capitalize(),
        f"{(ended[1] - began[1]) / len(frames):.0f}",
        f"{statistics.median(frames):.1f}",
        f"{statistics.mean(frames):.2f}",
        f"{sorted(frames)[int(0.99 * len(frames))]:.1f}",
        f"{1000 * len(frames) / (ended[0] - began[0]):.0f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="the file whose table is written again")
    args = parser.parse_args()
    program = shutil.which("chromium")
    if program is None:
        sys.exit("fastps: chromium is not installed; .ci/install installs it")
    command = " ".join(["python", "benchmarks/live.py", *sys.argv[1:]])
    lines = [f"`{command}`", "", *machine()]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file = Path(folder) / "live.html"
        file.write_text(one_file())
        browser = driver.chromium.launch(executable_path=program)
        first = first_figure(browser, file.as_uri())
        rows = [measure(browser, file.as_uri(), view) for view in VIEWS]
        version = browser.version
    columns = ["view", "pushes a frame", "script, median ms", "mean ms", "99 %, ms", "frames/s"]
    lines += [
        f"- Chromium {version}, headless, without a GPU",
        f"- First figure after {statistics.median(first):.0f} ms "
        f"({first[0]:.0f} to {first[-1]:.0f}; {OPENINGS} openings)",
        "",
        *table(columns, rows),
    ]
    print("\n".join(lines))
    if args.output is not None:
        write_between_markers(args.output, "live", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
