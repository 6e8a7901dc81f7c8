"""Finished runs are not repeated, whatever ended the script that made them."""

from __future__ import annotations

import math
from pathlib import Path

from fastps_lab.repro.finished import Finished


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    path, pair = tmp_path / "folder" / "runs.jsonl", '["digits/1", Infinity]\n'
    first = Finished(path)
    assert first.get({"seed": 1, "net": [2]}, lambda: {"error": 0.5})["error"] == 0.5
    path.write_text(pair + path.read_text() + '{"seed": 2, "err')
    again = Finished(path)
    assert again.get({"seed": 1, "net": [2]}, lambda: 1 / 0)["error"] == 0.5
    assert again.get({"key": "digits/1"}, lambda: 1 / 0)["seconds"] == math.inf
    assert again.get({"seed": 2}, lambda: {"error": 0.25}) == {"seed": 2, "error": 0.25}
    again.add({"seed": 1, "error": 0.75})
    assert [Finished(path).find({"seed": seed}) for seed in (1, 2, 3)] == [*again.all[:1:-1], None]
    assert Finished(None).get({"seed": 1}, lambda: {"error": 0.0}) == {"seed": 1, "error": 0.0}
