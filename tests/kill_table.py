"""The table of docs/how-to/engines.md that says what happens at kill -9.

A cell has phrases, with a semicolon between them. Tests of engines compare each with what they see, and
tests/engines/test_kill_table.py checks that each phrase has its test.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

PAGE = Path(__file__).resolve().parents[1] / "docs/how-to/engines.md"
COLUMNS = ("worker", "servers")


def phrases() -> dict[tuple[str, str], list[str]]:
    """The phrases of each cell, by engine and column."""
    _, section = PAGE.read_text().split("## What happens at kill -9")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", section.partition("\n## ")[0], re.MULTILINE)
    return {
        (engine.strip("`"), column): cell.split("; ")
        for engine, *cells in rows[1:]
        for column, cell in zip(COLUMNS, cells, strict=True)
    }


def check(engine: str, column: Literal["worker", "servers"], phrase: str, saw: bool) -> None:
    """The test saw what the page says."""
    assert phrase in phrases()[engine, column]
    assert saw, f"{engine}: not seen: {phrase}"
