"""The picture of a history shows what the history says."""

from __future__ import annotations

import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main
from fastps.commands.history import compose, pushes
from fastps.history import History

pytest.importorskip("matplotlib")

SPOILED = 44


def run(folder: Path, workers: int, based: bool, shards: int = 2) -> None:
    """Workers in turn push two tensors; one push is a thousand times larger."""
    rng = np.random.default_rng(1)
    with fastps.serve(shards, data_dir=folder, keep_history=1 << 30) as server:
        clients = [
            fastps.connect(server.address_list, name=f"gpu-{k}", ack="logged", timeout=60.0)
            for k in range(workers)
        ]
        for name in ("a", "b"):
            clients[0].register(name, np.zeros(5, np.float32), fastps.SGD(lr=0.01))
        at: Any = None
        for step in range(60):
            ps = clients[step % workers]
            if based:
                _, at = ps.pull(["a", "b"], versions=True)
            factor = 1000 if step == SPOILED else 1
            gradient = {name: factor * rng.normal(size=5).astype(np.float32) for name in ("a", "b")}
            ps.push(gradient, based_on=at, note=f"batch {step}")
            if step == 29:
                ps.mark("half of the run, which has a long name")
        for ps in clients:
            ps.close()


def drawn(past: History) -> tuple[Any, Any]:
    """The panels of norms and of staleness."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    canvas = FigureCanvasAgg(figure)
    compose(figure, past, *pushes(past))
    canvas.draw()
    norms, staleness = figure.axes
    return norms, staleness


def points(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """What a panel shows of each worker."""
    shown = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    return {
        label: sorted(zip(line.get_xdata().tolist(), line.get_ydata().tolist(), strict=True))
        for label, line in shown.items()
    }


def expected(past: History) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same from the changes, one after the other."""
    squares: dict[tuple[str, int], float] = defaultdict(float)
    version: dict[tuple[str, int], int] = defaultdict(int)
    stale: dict[tuple[str, int], int] = defaultdict(lambda: -1)
    for change in past.changes[past.is_gradient]:
        key = past.name(int(change["client"])), int(change["push"])
        squares[key] += float(change["norm"]) ** 2
        version[key] = max(version[key], int(change["version"]))
        stale[key] = max(stale[key], int(change["staleness"]))
    norms, staleness = defaultdict(list), defaultdict(list)
    for key, sum_of_squares in squares.items():
        norms[key[0]].append((version[key], sum_of_squares**0.5))
        if stale[key] >= 0:
            staleness[key[0]].append((version[key], stale[key]))
    return norms, staleness


def test_the_points_are_those_of_the_history(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "data", 3, based=True)
    picture = tmp_path / "history.png"
    assert main(["history", str(tmp_path / "data"), "--plot", str(picture)]) == 0
    assert "worker" in capfd.readouterr().out
    png = picture.read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert 900 <= width <= 1600
    assert 500 <= height <= 1000
    assert 10_000 < len(png) < 1_000_000
    assert {path.name for path in tmp_path.iterdir()} == {"data", "history.png"}

    past = fastps.history(tmp_path / "data", norms=True)
    norms, staleness = drawn(past)
    for axes, wanted in zip((norms, staleness), expected(past), strict=True):
        found = points(axes)
        assert sorted(found) == [f"gpu-{k}: 20" for k in range(3)]
        for label, shown in found.items():
            np.testing.assert_allclose(shown, sorted(wanted[label.partition(":")[0]]), rtol=1e-12)
        (mark,) = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert set(mark.get_xdata()) == {past.marks[0].version}
    assert norms.get_yscale() == "log"
    assert staleness.get_yscale() == "linear"
    title = norms.get_title(loc="left")
    assert title.startswith("60 pushes by 3 workers, ")
    assert title.endswith(" UTC")
    texts = [text.get_text() for text in norms.texts]
    assert "half of the run…" in texts
    (suspect,) = [text for text in texts if "median" in text]
    assert suspect.startswith(f"push {SPOILED // 3 + 1} of gpu-{SPOILED % 3} (batch {SPOILED}):"), suspect
    assert [text.get_text() for text in norms.get_legend().get_texts()] == sorted(points(norms))


def test_many_workers_and_no_staleness(tmp_path: Path) -> None:
    run(tmp_path / "data", 12, based=False)
    norms, staleness = drawn(fastps.history(tmp_path / "data", norms=True))
    labels = [*points(norms)]
    assert len(labels) == 9
    assert labels[-1] == "4 others: 20"
    assert sum(len(shown) for shown in points(norms).values()) == 60
    assert not any(points(staleness).values())
    assert "based_on=" in staleness.texts[0].get_text()


def test_a_history_without_pushes_is_not_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        fastps.serve(data_dir=tmp_path / "data", keep_history=1 << 30) as server,
        fastps.connect(server.address_list, ack="logged") as ps,
    ):
        ps.register("a", np.zeros(5, np.float32), fastps.SGD(lr=0.01))
    assert main(["history", str(tmp_path / "data"), "--plot", str(tmp_path / "none.png")]) != 0
    assert "no pushes to draw" in capfd.readouterr().err
    assert not (tmp_path / "none.png").exists()
