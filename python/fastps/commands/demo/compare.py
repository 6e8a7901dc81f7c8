"""``fastps demo --compare``: modes in turn, with the same model, data and time, and a slow worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fastps.commands.demo.config import Config
from fastps.commands.demo.output.view import View
from fastps.commands.demo.run import Training, serial_run
from fastps.commands.demo.state import Comparison, Run
from fastps.commands.kit.datasets import load


def compare(config: Config, modes: Sequence[str], view: View, out: Path) -> Comparison:
    """Trains with each mode in turn, then serially; every mode has separate servers and workers."""
    dataset = load(config.data, config.dataset_dir)
    runs: dict[str, Run] = {}
    with view:
        for mode in modes:
            view.say(f"{mode}: {config.seconds:g} s, worker 0 is {config.slow:g} x slower")
            training = Training(dataclasses.replace(config, mode=mode), dataset, view, out)
            runs[mode] = training.execute()
            view.update(runs[mode])
        updates = max([run.updates for run in runs.values()] + [int(config.seconds / config.pace)])
        view.say(f"serial: {updates:,} updates in plain NumPy")
        serial = serial_run(dataclasses.replace(config, push_every=1), updates, config.pace, out)
    return Comparison(runs, serial)
