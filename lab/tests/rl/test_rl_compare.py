"""``fastps-lab rl gorila`` and ``fastps-lab rl compare``: workers by options, the picture, wrong options."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastps.rl import Gorila, Point
from fastps_lab import cli
from fastps_lab.rl.options import algorithm_of, parser
from fastps_lab.rl.plot import draw_together


@pytest.mark.parametrize(
    ("options", "algorithm", "workers"),
    [
        ([], Gorila(), 2),
        (["--workers", "3", "--replay", "local", "--steps", "4"], Gorila(steps=4), 3),
        (["--replay", "global"], Gorila("global"), 2),
        (["--actors", "4", "--learners", "2"], Gorila("global", actors=4), 6),
        (["--actors", "4", "--role", "actor", "--workers", "3"], Gorila("global", "actor", actors=4), 3),
        (["--role", "learner", "--lr", "0.01"], Gorila("global", "learner", lr=0.01), 2),
    ],
)
def test_options_choose_roles_and_workers(options: list[str], algorithm: Gorila, workers: int) -> None:
    args = parser().parse_args(["gorila", *options])
    assert algorithm_of(args) == algorithm
    assert args.workers == workers


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["a3c", "--actors", "3"], "--actors is not an option of fastps-lab rl a3c"),
        (["gorila", "--pairs", "3"], "--pairs is not an option of fastps-lab rl gorila"),
        (["gorila", "--replay", "local", "--learners", "1"], "need --replay global"),
        (["gorila", "--actors", "0"], "invalid actors: expected an integer >= 1, got 0"),
        (["gorila", "--actors", "2", "--workers", "3"], "--actors and --learners instead of --workers"),
        (["gorila", "--role", "actor", "--learners", "2"], "--learners is for all roles"),
        (["gorila", "--env", "Pendulum-v1"], "Gorila does not support the action space: expected Discrete"),
        (["gorila", "--shards", "0"], "Gorila cannot train in a shared store"),
        (["compare", "--env", "NoSuchEnv-v0"], "there is no such environment"),
        (["compare", "--out", "/proc/none"], "choose a folder that can be written"),
    ],
)
def test_wrong_options_are_explained(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["rl", *arguments]) == 1
    printed = capsys.readouterr()
    assert text in printed.err.splitlines()[-1], printed.out


def test_several_algorithms_are_drawn_in_one_picture(tmp_path: Path) -> None:
    from PIL import Image

    pictures = []
    for shown in (["a3c"], ["a3c", "es", "gorila"]):
        curves = {
            name: [Point(100 * k, 10 * k, k / 2, 5.0 * k * (1 + j), 20) for k in range(8)]
            for j, name in enumerate(shown)
        }
        draw_together(curves, 30.0, "CartPole-v1", tmp_path / "compare.png")
        with Image.open(tmp_path / "compare.png") as picture:
            pictures.append(np.asarray(picture.convert("RGB")).reshape(-1, 3))
    colors = [{tuple(color) for color in np.unique(picture, axis=0)} for picture in pictures]
    for color in ((0x21, 0x66, 0xAC), (0x4D, 0x92, 0x21)):
        assert color in colors[1]
    assert (0x4D, 0x92, 0x21) not in colors[0]


@pytest.mark.timeout(240)
def test_the_command_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--algorithms", "gorila", "--workers", "1", "--frames", "1500", "--json"]
    assert cli.main(["rl", "compare", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "fastps-rl-compare/compare.json").read_text())
    run = found["runs"]["gorila"]
    assert run["frames"] == 1500
    assert 200 <= run["updates"] <= 251
    assert run["curve"][-1]["mean_return"] > 0
    assert (tmp_path / "fastps-rl-compare/compare.png").stat().st_size > 10_000
