"""`fastps-lab rl`: what it writes, Ctrl-C, how it plays and resumes, and wrong options."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.rl import A3C, ActorCritic, Gorila, Naive, fetch, load, run_worker
from fastps.rl.playing.actions import actions_of
from fastps_lab import cli
from fastps_lab.rl.options import algorithm_of, parser
from fastps_lab.rl.settings import ALGORITHMS, rows
from rl.environments import cart_pole

GUIDE = Path(__file__).resolve().parents[3] / "docs/how-to/rl.md"
FILES = {"model.safetensors", "best.safetensors", "training.safetensors", "curve.png", "run.jsonl"}


def fastps_rl(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fastps_lab", "rl", *arguments],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.timeout(240)
def test_the_command_writes_its_files_and_one_json_object(tmp_path: Path) -> None:
    from PIL import Image
    from safetensors.torch import load_file

    command = fastps_rl("a3c", "--workers", "1", "--frames", "3000", "--json", cwd=tmp_path)
    out, err = command.communicate(timeout=200)
    assert command.returncode == 0, err
    result = json.loads(out)
    assert result["frames"] == 3000
    assert result["best_return"] > 0
    assert {"solved_at", "solved_greedily_at"} <= result.keys()
    assert "frames/s" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fastps-rl"]
    files = {path.name for path in (tmp_path / "fastps-rl").iterdir()}
    assert files == FILES
    env = cart_pole()
    model = ActorCritic(env.observation_space, actions_of(env.action_space))
    model.load_state_dict(load_file(tmp_path / "fastps-rl/model.safetensors"))
    events = [json.loads(line) for line in (tmp_path / "fastps-rl/run.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "end"
    assert {event["event"] for event in events} >= {"point", "end"}
    with Image.open(tmp_path / "fastps-rl/curve.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20


@pytest.mark.timeout(240)
def test_ctrl_c_ends_everything_and_keeps_the_model(tmp_path: Path) -> None:
    command = fastps_rl("naive", "--workers", "2", "--frames", "100000000", cwd=tmp_path)
    lines = iter(command.stdout.readline, "")
    assert any(" 0 updates" not in line and "updates" in line for line in lines)
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    began = time.monotonic()
    os.killpg(command.pid, signal.SIGINT)
    _, err = command.communicate(timeout=60)
    assert time.monotonic() - began < 20  # 5 s on a machine that is not busy
    assert command.returncode == 130
    assert err.strip().endswith("fastps: stopped by Ctrl-C")
    assert (tmp_path / "fastps-rl/model.safetensors").exists()
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() - began < 30
        time.sleep(0.05)


BROKEN = """
import gymnasium
class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space, episodes = gymnasium.spaces.Discrete(2), 0
    def reset(self, *, seed=None, options=None):
        Broken.episodes += 1
        return self.observation_space.low, {}
    def step(self, action):
        if Broken.episodes > 40:
            raise OSError("the joint is broken")
        return self.observation_space.low, 1.0, True, False, {}
gymnasium.register("Broken-v0", Broken)
"""


@pytest.mark.timeout(240)
def test_the_command_fails_if_all_workers_fail_and_keeps_their_model(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    command = fastps_rl("a3c", "--env", "broken:Broken-v0", "--workers", "1", cwd=tmp_path)
    out, err = command.communicate(timeout=200)
    assert command.returncode == 1, out
    assert err.splitlines()[-1].startswith("fastps: the environment raised OSError: the joint is broken")
    assert (tmp_path / "fastps-rl/model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["a3c", "--env", "NoSuchEnv-v0"], "there is no such environment"),
        (["a3c", "--env", "no_such_module:Env-v0"], "there is no such environment"),
        (["a3c", "--pairs", "3"], "--pairs is not an option of fastps-lab rl a3c"),
        (["a3c", "--pairs", "0"], "--pairs is not an option of fastps-lab rl a3c"),
        (["a3c", "--steps", "0"], "invalid steps: expected an integer >= 1, got 0"),
        (["es", "--normalize"], "--normalize is not an option of fastps-lab rl es"),
        (["gorila", "--set", "epslon=1"], "has only capacity, batch, .*timeout; did you mean epsilon\\?"),
        (["es", "--set", "gamma=1"], "--set gamma=1: es has only pairs, sigma, lr"),
        (["a3c", "--set", "gamma"], "--set gamma: give a value, such as gamma=0.99"),
        (["a3c", "--set", "gamma=x"], "--set gamma=x: expected a number"),
        (["gorila", "--set", "refresh=1.5"], "--set refresh=1.5: expected an integer"),
        (["gorila", "--set", "outlier=few"], "--set outlier=few: expected a number, or none"),
        (["gorila", "--set", "rule=sgd"], "invalid rule: expected 'adam' or 'adagrad', got 'sgd'"),
        (["gorila", "--set", "epsilon=2"], "invalid epsilon: expected a number >= 0 and <= 1, got 2"),
        (["naive", "--set", "deterministic=1"], "--set deterministic=1: expected true or false"),
        (["naive", "--set", "workers=3"], "--set workers=3: use --workers instead"),
        (["a3c", "--set", "gamma=.9", "--set", "gamma=.8"], "--set gamma is given twice"),
        (["a3c", "--set", "lr=1", "--lr", "1"], "lr is given twice, by --lr and by --set"),
        (["naive", "--set", "sync=true", "--async"], "sync is given twice, by --async and by --set"),
        (["es", "--sigma", "0"], "invalid sigma: expected a number > 0, got 0"),
        (["es", "--frames", "0"], "invalid frames"),
    ],
)
def test_the_command_explains_what_is_wrong(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["rl", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("fastps: ")
    assert re.search(text, line)
    assert list(tmp_path.iterdir()) == []


def test_every_setting_can_be_set_and_is_listed_with_its_default_and_meaning(capsys) -> None:
    """By the one table, which the help and the guide show, too."""
    for name, algorithm in ALGORITHMS.items():
        assert cli.main(["rl", name, "--set", "help"]) == 0
        listed = capsys.readouterr().out.splitlines()
        given = [line.split("  ")[0] for line in listed]
        assert all(len(line.split(maxsplit=1)[1]) > 10 for line in listed), name
        assert algorithm_of(parser().parse_args([name])) == algorithm
        again = parser().parse_args([name, *(word for one in given for word in ("--set", one))])
        assert algorithm_of(again) == algorithm
        fields = {field.name for field in dataclasses.fields(algorithm)}
        assert {one.partition("=")[0] for one in given} == fields - {"workers", "replay", "role", "actors"}
        assert ", ".join(given) in " ".join(parser().format_help().split())
    arguments = [
        "gorila",
        "--set",
        "rule=adagrad",
        "--set",
        "outlier=none",
        "--set",
        "capacity=2_000",
        "--lr",
        "1e-2",
    ]
    found = algorithm_of(parser().parse_args(arguments))
    assert found == Gorila(rule="adagrad", outlier=None, capacity=2000, lr=1e-2)
    assert algorithm_of(parser().parse_args(["a3c", "--set", "entropy=0"])) == A3C(steps=20, entropy=0)
    assert algorithm_of(parser().parse_args(["naive", "--set", "sync=false"])) == Naive(sync=False)


def test_the_guide_shows_the_settings() -> None:
    """FASTPS_REGENERATE=1 writes them."""
    begin, end = "<!-- settings: begin -->\n", "<!-- settings: end -->"
    before, _, rest = GUIDE.read_text().partition(begin)
    lines = [["algorithm", "setting", "default", "meaning"], ["---"] * 4, *rows()]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    page = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    if os.environ.get("FASTPS_REGENERATE"):
        GUIDE.write_text(page)
    assert GUIDE.read_text() == page


def command(*arguments: str, cwd: Path) -> dict:
    process = fastps_rl(*arguments, "--json", cwd=cwd)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.timeout(480)
def test_the_command_trains_plays_and_resumes(tmp_path: Path) -> None:
    train_it = ("a3c", "--normalize", "--workers", "1", "--seed", "3")
    first = command(*train_it, "--frames", "2000", cwd=tmp_path)
    assert first["frames"] == 2000
    folder = tmp_path / "fastps-rl"
    assert {path.name for path in folder.iterdir()} == FILES
    best = folder / "best.safetensors"
    played = command("play", str(best), "--episodes", "3", "--seed", "5", cwd=tmp_path)
    assert played["returns"] == load(best).play(3, seed=5)
    assert played["mean_return"] == pytest.approx(np.mean(played["returns"]))
    assert played["environment"] == "CartPole-v1"
    events = (folder / "run.jsonl").read_text()
    second = command(*train_it, "--frames", "3000", "--resume", cwd=tmp_path)
    assert second["frames"] == 3000
    assert sum(worker["frames"] for worker in second["workers"]) == 1000
    assert (folder / "run.jsonl").read_text().startswith(events)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no.safetensors"], "no.safetensors: No such file or directory"),
        (["x.safetensors"], "x.safetensors is damaged: expected a safetensors file"),
        (["x.safetensors", "--episodes", "0"], "invalid episodes: expected an integer >= 1, got 0"),
        (["."], "Is a directory"),
        (["good.safetensors", "--env", "Acrobot-v1"], "has another network"),
        (["good.safetensors", "--env", "NoSuchEnv-v0"], "there is no such environment"),
    ],
)
def test_the_command_says_why_it_plays_nothing(
    arguments: list[str], text: str, store: fastps.Store, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    run_worker(store, A3C(), cart_pole, seed=0, frames=20)
    fetch(store, A3C(), cart_pole).save("good.safetensors")
    assert cli.main(["rl", "play", *arguments]) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("fastps: ")
    assert text in line
