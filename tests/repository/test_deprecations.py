"""Old spellings still work, and warn with the new one."""

import importlib
import io
import json

import numpy as np
import pytest

import fastps
from fastps.commands import cli
from fastps.optimize import LBFGS

#: Each module, its old names and the new ones.
NAMES = {
    "fastps.rl": {"take_turns": "train_round_robin", "work": "run_worker"},
    "fastps.simulate": {"Happened": "EventRecord", "StandstillError": "DeadlockError"},
}


@pytest.mark.parametrize("module", NAMES)
def test_old_names_are_the_new_ones(module):
    part = pytest.importorskip(module)
    for old, new in NAMES[module].items():
        with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is deprecated; use {module}\.{new}$"):
            assert getattr(part, old) is getattr(part, new)
        assert old not in part.__all__
    with pytest.raises(AttributeError, match="has no attribute 'none'"):
        importlib.import_module(module).none  # noqa: B018


def test_worker_add(store):
    w = np.zeros(2, np.float32)
    store.register("w", w, optimizer=fastps.SGD(lr=0.5))
    store.register("late", w, optimizer=fastps.SGD(lr=0.5))
    with fastps.Worker(store, {"w": w}, fastps.Async()) as worker:
        with pytest.warns(DeprecationWarning, match=r"Worker\.add is deprecated; use Worker\.add_params$"):
            worker.add({"late": w})
        assert list(worker.params) == ["w", "late"]


def test_history_of_lbfgs():
    with pytest.warns(DeprecationWarning, match="history= is deprecated; use history_size=$") as seen:
        method = LBFGS(history=3)
    assert seen[0].filename == __file__
    assert method == LBFGS(history_size=3)
    with pytest.warns(DeprecationWarning, match=r"LBFGS\.history is deprecated; use LBFGS\.history_size$"):
        assert method.history == 3
    with pytest.raises(TypeError, match="both 'history' and 'history_size'"):
        LBFGS(history=3, history_size=3)


def test_cut_of_evaluators(store):
    store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=0.5))
    with pytest.warns(DeprecationWarning, match="cut= is deprecated; use consistent=$"):
        evaluator = fastps.evaluator(store, lambda params: {"norm": 0.0}, cut=True)
    assert evaluator.now().metrics == {"norm": 0.0}


def test_records_are_loggers(tmp_path):
    path = tmp_path / "steps.jsonl"
    step = fastps.Step(2, 0.5, 0, 8, 1.0, 3, None)
    with pytest.warns(DeprecationWarning, match=r"record\.to is deprecated; use fastps\.loggers\.JSONL"):
        record = fastps.record.to(f"jsonl:{path}", every=2)
    with record:
        record(step)
    assert json.loads(path.read_text())["loss"] == 0.5
    for wrong in ("csv:x", "jsonl:", "jsonl", 3):
        with (
            pytest.warns(DeprecationWarning, match="record"),
            pytest.raises(fastps.ConfigError, match="target"),
        ):
            fastps.record.to(f"jsonl:{tmp_path}/new.jsonl", wrong)
    assert not (tmp_path / "new.jsonl").exists()
    output = io.StringIO()
    with pytest.warns(DeprecationWarning, match=r"record\.live is deprecated; use fastps\.loggers\.Console$"):
        fastps.record.live(output)(step)
    assert output.getvalue().startswith("step 2")
    with pytest.warns(DeprecationWarning, match=r"record\.Live is deprecated; use fastps\.loggers\.Console$"):
        assert fastps.record.Live is fastps.loggers.Console


def test_data_dir_of_commands(capfd):
    for command in (["demo", "--data", "mnist"], ["sandblaster", "--data", "mnist"], ["repro", "onebit"]):
        assert cli.main([*command, "--data-dir", "nowhere"]) == 1
        text = capfd.readouterr().err
        assert "fastps: --data-dir is deprecated; use --dataset-dir\n" in text
        assert "nowhere" in text
    (demo,) = (command for command in cli.all_commands() if command.name == "fastps demo")
    assert "--data-dir" not in [name for option in demo.options for name in option.names]


def test_cut_of_checkpoints(capfd, tmp_path):
    for old in ("--cut", "--cut=default"):
        command = ["checkpoint", "save", "127.0.0.1:1", "--timeout", "0.1", old]
        assert cli.main(command) == 1
        assert capfd.readouterr().err.startswith("fastps: --cut is deprecated; use --consistent\n")
    assert cli.main(["checkpoint", "export", str(tmp_path), str(tmp_path / "x"), "--cut"]) == 1
    assert capfd.readouterr().err.startswith("fastps: --cut is deprecated; use --consistent\n")
