"""The language model of the examples learns, though a worker is killed and everything stops half-way."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/language_model.py"
WITHOUT_DATA = {name: value for name, value in os.environ.items() if name != "FASTPS_DATA_DIR"}


def example():
    spec = importlib.util.spec_from_file_location("language_model", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_killed_stopped_and_resumed_model_learns_and_is_served(tmp_path):
    command = [sys.executable, str(EXAMPLE), "--quick", "--average=0.9", "--dtype=bfloat16"]
    command += ["--output", str(tmp_path / "lm")]
    done = subprocess.run(command, env=WITHOUT_DATA, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "lm/result.json").read_text())
    assert 120 <= found["stopped"] < found["steps"]
    assert 240 <= found["steps"] <= 243, "each worker may push once more"
    assert found["perplexity"]["test"] < 6, "60 words, of which 3 may follow"
    assert len(found["sentence"].split()) == 20
    # What was served is the average that the stopped servers have kept.
    served, kept = (tmp_path / name for name in ("lm/model.safetensors", "kept.safetensors"))
    export = ["checkpoint", "export", str(tmp_path / "lm/state"), str(kept), "--view", "average"]
    subprocess.run([sys.executable, "-m", "fastps", *export], check=True, timeout=120)
    weights, averages = load_file(served), load_file(kept)
    assert weights.keys() == averages.keys()
    for name, average in averages.items():
        np.testing.assert_array_equal(weights[name], average)
    starts, again = (
        [json.loads(line) for line in (tmp_path / f"lm/run{k}.jsonl").read_text().splitlines()]
        for k in (0, 1)
    )
    assert any(event["event"] == "exit" and event["code"] == 137 for event in starts), "a worker was killed"
    assert sum(event["event"] == "server_start" for event in again) == 2
    begun = [line for line in done.stdout.splitlines() if "begins at step" in line]
    assert int(begun[-1].rpartition(" ")[2]) >= found["stopped"], "the servers have kept the steps"


def test_both_models_predict_without_looking_ahead():
    import torch

    module = example()
    for kind in ("lstm", "transformer"):
        torch.manual_seed(0)
        model = module.LanguageModel(kind, 20, 16, 1).eval()
        words = torch.randint(20, (1, module.LENGTH))
        changed = words.clone()
        changed[0, 9:] = (changed[0, 9:] + 1) % 20
        with torch.no_grad():
            same, other = model(words), model(changed)
        torch.testing.assert_close(same[:, :9], other[:, :9])
        assert not torch.allclose(same[:, 9:], other[:, 9:])


def test_the_perplexity_of_a_model_that_knows_nothing_is_the_number_of_words():
    import torch

    module = example()
    model = module.LanguageModel("lstm", 20, 16, 1)
    torch.nn.init.zeros_(model.embedding.weight)
    words = torch.randint(20, (1000,))
    assert math.isclose(module.perplexity(model, words, "cpu"), 20, rel_tol=1e-5)


def test_missing_data_names_the_variable_and_the_files(tmp_path):
    cases = [
        ({}, "set FASTPS_DATA_DIR, or use --quick"),
        ({"FASTPS_DATA_DIR": str(tmp_path)}, "valid.txt.gz is missing"),
    ]
    for variables, text in cases:
        command = [sys.executable, str(EXAMPLE), "plain", "--steps", "1"]
        done = subprocess.run(command, env={**WITHOUT_DATA, **variables}, capture_output=True, text=True)
        assert done.returncode == 1
        assert text in done.stderr
