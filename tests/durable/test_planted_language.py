"""Bisection alone finds what spoiled a real run of a language model: a flipped batch, a wrong rate."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import fastps
from fastps.commands.cli import main

torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples/language_model.py"
WIDTH, WORKERS, RATE = 16, 3, 1.0
#: Updates of the run, of each run that goes on from its end, and the planted one of those. The worker's next
#: batches repair what a flipped batch did within some updates.
UPDATES, MORE, PLANTED = 120, 14, 12
#: Words of the validation text that judge, and how much worse than an undisturbed run a bad model is.
JUDGED, MARGIN = 4097, 0.02
JUDGE = f"""
import sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
sys.path.insert(0, {str(Path(__file__).parent)!r})
import fastps
from test_planted_language import loss, made
with fastps.connect(sys.argv[1]) as ps:
    print(loss(*made(), ps))
"""

pytestmark = pytest.mark.nightly


def made() -> tuple[Any, Any]:
    """The example's text and its model."""
    spec = importlib.util.spec_from_file_location("language_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules["language_model"] = example
    spec.loader.exec_module(example)
    torch.set_num_threads(1)
    text = example.Text(quick=False)
    torch.manual_seed(0)
    return text, example.LanguageModel("lstm", len(text.words), WIDTH, 1)


def load(model: Any, ps: fastps.ParameterServer) -> Any:
    names = [name for name, _ in model.named_parameters()]
    values, at = ps.pull(names, versions=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(values[name]))
    return at


def loss(text: Any, model: Any, ps: fastps.ParameterServer) -> float:
    """The mean loss of a word of the validation text."""
    load(model, ps)
    return math.log(sys.modules["language_model"].perplexity(model, text.valid[:JUDGED], "cpu"))


def train(folder: Path, text: Any, model: Any, steps: range, planted: str = "") -> list[int]:
    """Workers in turn; the version of each update."""
    example, versions = sys.modules["language_model"], []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(fastps.serve(2, data_dir=folder, keep_history=4 << 30))
        workers = [
            stack.enter_context(
                fastps.connect(server.address_list, name=f"gpu-{k}", ack="logged", timeout=120.0)
            )
            for k in range(WORKERS)
        ]
        if not workers[0].names():
            values = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
            workers[0].register(values, optimizer=fastps.SGD(lr=RATE))
        for step in steps:
            ps = workers[step % WORKERS]
            at = load(model, ps)
            x, y = example.batch_of(text.train, torch.Generator().manual_seed(step))
            is_planted = step == UPDATES + PLANTED
            if is_planted and planted == "labels":
                y = len(text.words) - 1 - y
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            gradient = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
            lr = 30 * RATE if is_planted and planted == "rate" else None
            receipts = ps.push(gradient, lr=lr, based_on=at, note=f"batch {step}")
            versions.append(receipts["bias"].version)
    return versions


@pytest.mark.timeout(3600)
def test_what_spoiled_a_language_model_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if not (Path(os.environ.get("FASTPS_DATA_DIR", "")) / "wikitext-2").is_dir():
        pytest.skip("FASTPS_DATA_DIR has no wikitext-2")
    text, model = made()
    script = tmp_path / "judge.py"
    script.write_text(JUDGE)
    end = train(tmp_path / "run", text, model, range(UPDATES))[-1]
    more = range(UPDATES, UPDATES + MORE)
    threshold = 0.0
    for kind in ("", "labels", "rate"):
        folder = tmp_path / f"with {kind or 'nothing'}"
        fastps.rewind(tmp_path / "run", folder, to=end)
        versions = train(folder, text, model, more, kind)
        losses = []
        for version in versions:
            with fastps.rewind(folder, to=version) as moment:
                losses.append(loss(text, model, moment))
        if not kind:
            threshold = max(losses) + MARGIN
            continue
        assert max(losses[:PLANTED]) < threshold < min(losses[PLANTED:]), (kind, threshold, losses)
        search = ["bisect", str(folder), "--good", str(versions[0]), "--threshold", str(threshold)]
        assert main([*search, "--run", f"{sys.executable} {script} {{addresses}}"]) == 0, kind
        out = capfd.readouterr().out
        assert f"first bad version: {versions[PLANTED]}\n" in out, (kind, out)
        form = (
            r"push [\d,]+ of worker '(.+)' \((.+)\) to .*: lr (\S+), \|g\| [^\s,]+, ([\d.e+,]+) x the median"
        )
        found = re.search(form, out)
        assert found is not None, out
        worker, note, lr, times = found.groups()
        planted = UPDATES + PLANTED
        assert (worker, note) == (f"gpu-{planted % WORKERS}", f"batch {planted}")
        assert float(lr) == (30 * RATE if kind == "rate" else RATE)
        assert (float(times) > 2) == (kind == "labels"), (kind, out)
