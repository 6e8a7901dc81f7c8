"""Phrases of the table "What happens at kill -9" have tests that see them."""

from __future__ import annotations

import re

import kill_table

#: Cells that another row fills.
SAME = ["as with `fastps run`"]
#: Engines whose tests do not compare with the table.
APART = ("torchrun", "Slurm", "Dask", "Hierarchical")


def test_each_phrase_has_its_test() -> None:
    sources = [path.read_text() for path in kill_table.PAGE.parents[2].glob("tests/*/*.py")]
    cells = {place: cell for place, cell in kill_table.phrases().items() if place[0] not in APART}
    assert len(cells) >= 4
    for (engine, column), phrases in cells.items():
        place = re.escape(f'kill_table.check("{engine}", "{column}", ')
        tests = [source for source in sources if re.search(place, source)]
        for phrase in phrases if phrases != SAME else []:
            assert any(f'"{phrase}"' in source for source in tests), (engine, column, phrase)
