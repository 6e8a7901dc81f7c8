"""Bisection alone finds what spoiled real runs: a gradient times 1,000, wrong labels, a wrong rate."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main
from fastps.commands.kit.datasets import load
from fastps.commands.kit.net import NAMES, init_params, loss_and_grads

UPDATES, PLANTED, GOOD, BATCH, WORKERS, RATE = 206, 200, 180, 128, 3, 0.5
#: The loss on the test images falls from 0.144 to 0.134 in the searched range; each planted push raises it
#: above 0.15, where it stays for longer than the run.
THRESHOLD = 0.1485
JUDGE = """
import sys
import fastps
from fastps.commands.kit.datasets import load
from fastps.commands.kit.net import NAMES, evaluate

digits = load("digits")
with fastps.connect(sys.argv[1]) as ps:
    print(evaluate(ps.pull(NAMES), digits.test_x, digits.test_y)[0])
"""


def train(folder: Path, kind: str) -> list[int]:
    """Workers in turn on the digits; the version of each update."""
    digits, made = load("digits"), []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(fastps.serve(2, data_dir=folder, keep_history=1 << 30))
        workers = [
            stack.enter_context(fastps.connect(server.address_list, name=f"worker-{k}", ack="logged"))
            for k in range(WORKERS)
        ]
        initial = init_params(digits.train_x.shape[1], 32, 10, np.random.default_rng([0, 0]))
        for name, value in initial.items():
            workers[0].register(name, value, optimizer=fastps.SGD(lr=RATE))
        for step in range(UPDATES):
            ps, planted = workers[step % WORKERS], step == PLANTED
            rows = np.random.default_rng([0, 4, step]).integers(0, len(digits.train_y), BATCH)
            y = digits.train_y[rows]
            params, based_on = ps.pull(NAMES, versions=True)
            flipped = 9 - y if planted and kind == "labels" else y
            _, gradient = loss_and_grads(params, digits.train_x[rows], flipped)
            factor = np.float32(1000 if planted and kind == "factor" else 1)
            lr = 30 * RATE if planted and kind == "rate" else None
            push = {name: factor * gradient[name] for name in NAMES}
            receipts = ps.push(push, lr=lr, based_on=based_on, note=f"batch {step}")
            made.append(receipts[NAMES[0]].version)
    return made


@pytest.mark.timeout(500)
def test_planted_pushes_are_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "judge.py"
    script.write_text(JUDGE)
    for kind in ("factor", "labels", "rate"):
        folder = tmp_path / kind
        made = train(folder, kind)
        search = ["bisect", str(folder), "--good", str(made[GOOD]), "--threshold", str(THRESHOLD)]
        assert main([*search, "--run", f"{sys.executable} {script} {{addresses}}"]) == 0, kind
        out = capfd.readouterr().out
        assert f"first bad version: {made[PLANTED]}\n" in out, (kind, out)
        found = re.search(r"push [\d,]+ of worker '(.+)' \((.+)\) to .*: lr (\S+), \|g\| [^\s,]+(.*)", out)
        assert found is not None, out
        worker, note, lr, rest = found.groups()
        assert (worker, note) == (f"worker-{PLANTED % WORKERS}", f"batch {PLANTED}")
        assert float(lr) == (30 * RATE if kind == "rate" else RATE)
        ratio = re.search(r", ([\d.e+,]+) x the median", rest)
        assert ratio is not None, out
        assert "staleness 0" in rest, out
        times = float(ratio[1].replace(",", ""))
        assert times > 300 if kind == "factor" else times > 3 if kind == "labels" else times < 3, (kind, out)
