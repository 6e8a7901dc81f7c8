"""One HTML page with all figures: pictures inside, captions, settings, and links to the numbers."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable
from pathlib import Path

from fastps import __version__
from fastps_lab.repro.figures.figure import Figure
from fastps_lab.repro.figures.results import Result

__all__ = ["command_of", "write_page"]

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
img { width: 100%; height: auto; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 0; }
code { background: #f2f2f2; padding: .1em .3em; }
.fails { color: #b2182b; }
"""


def command_of(figure: Figure, form: str) -> str:
    """The command that draws one figure."""
    return f"fastps-lab repro figures {figure.name}{' --quick' if form == 'quick' else ''}"


def write_page(figures: Iterable[tuple[Figure, Result]], out: Path) -> None:
    """Writes ``index.html``."""
    shown = list(figures)
    links = "".join(f'<li><a href="#{figure.name}">{_text(figure.title)}</a></li>' for figure, _ in shown)
    sections = "\n".join(_section(figure, result, out) for figure, result in shown)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>The figures</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>The papers' figures, by fastps {__version__}</h1>\n"
        f"<ul>{links}</ul>\n{sections}\n</body></html>\n"
    )
    (out / "index.html").write_text(page)


def _section(figure: Figure, result: Result, out: Path) -> str:
    image = base64.b64encode((out / f"{figure.name}.png").read_bytes()).decode()
    numbers = result["numbers"]
    facts = {
        "Source": figure.source,
        "Settings": numbers["settings"],
        "Seeds": ", ".join(map(str, numbers["seeds"])) or "no run draws random numbers",
        "Differs from the paper": figure.differs,
        "Judged": f"{figure.threshold}: {result['measured']}",
        "Costs": result["machine"],
    }
    listed = "".join(f"<dt>{name}</dt><dd>{_text(fact)}</dd>" for name, fact in facts.items())
    verdict = "" if result["holds"] else '<p class="fails">The judge refuses these numbers.</p>'
    return (
        f'<h2 id="{figure.name}">{_text(figure.title)}</h2>\n'
        f'<img alt="{_text(figure.title)}" src="data:image/png;base64,{image}">\n'
        f"{verdict}<p>{_text(result['caption'])}</p><dl>{listed}</dl>"
        f'<p><a href="{figure.name}.csv">Numbers</a>, by '
        f"<code>{command_of(figure, result['form'])}</code></p>"
    )


def _text(text: str) -> str:
    return html.escape(text, quote=True)
