"""Phrases of the table "What happens at kill -9" have tests that see them."""

from __future__ import annotations

import re

import kill_table


def test_each_phrase_has_its_test() -> None:
    sources = [path.read_text() for path in kill_table.PAGE.parents[2].glob("tests/*/*.py")]
    cells = kill_table.phrases()
    assert len(cells) == 16
    for (engine, column), phrases in cells.items():
        place = re.escape(f'kill_table.check("{engine}", "{column}", ')
        tests = [source for source in sources if re.search(place, source)]
        for phrase in phrases:
            assert any(f'"{phrase}"' in source for source in tests), (engine, column, phrase)
