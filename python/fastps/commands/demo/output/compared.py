"""Report of a comparison: the JSON object and the table at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastps.commands.demo.state import Comparison, waiting


def result(comparison: Comparison) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    config = comparison.config
    modes = {
        mode: {
            "test_accuracy": run.points[-1].accuracy,
            "training_loss": run.points[-1].loss,
            "updates": run.updates,
            "seconds": round(run.seconds, 3),
            "waiting": round(waiting(run), 3),
            "steps": [worker.steps for worker in run.workers],
            "bytes_pushed": run.bytes_pushed,
            "bytes_saved": run.bytes_saved,
        }
        for mode, run in comparison.runs.items()
    }
    serial = comparison.serial_in_time()[-1]
    return {
        "modes": modes,
        "serial": {"test_accuracy": serial.accuracy, "training_loss": serial.loss, "updates": serial.updates},
        "data": config.data,
        "codec": config.codec,
        "optimizer": config.optimizer,
        "shards": config.shards,
        "workers": config.workers,
        "slow_worker": config.slow,
        "seed": config.seed,
        "out": str(Path(config.out).resolve()),
    }


def write(comparison: Comparison, path: Path) -> None:
    """The result with all curves and events, as a JSON file."""
    curves = {mode: [vars(point) for point in run.points] for mode, run in comparison.runs.items()}
    events = {mode: [vars(moment) for moment in run.moments] for mode, run in comparison.runs.items()}
    curves["serial"] = [vars(point) for point in comparison.serial]
    everything = {**result(comparison), "curves": curves, "events": events}
    path.write_text(json.dumps(everything, indent=1) + "\n")


def closing(comparison: Comparison) -> str:
    """The table at the end, as plain text."""
    lines = [f"{'mode':<9}{'updates':>8}{'accuracy':>10}{'loss':>8}   normal workers wait"]
    for mode, run in comparison.runs.items():
        last = run.points[-1]
        lines.append(
            f"{mode:<9}{run.updates:>8,}{100 * last.accuracy:>8.1f} %{last.loss:>8.3f}"
            f"{100 * waiting(run):>8.0f} % of their time"
        )
    last = comparison.serial_in_time()[-1]
    lines.append(
        f"{'serial':<9}{last.updates:>8,}{100 * last.accuracy:>8.1f} %{last.loss:>8.3f}"
        "   (one normal worker, no server)"
    )
    return "\n".join(["", *lines])
