"""Report of a run: the JSON object, the closing tables, and the verdict on the time around the kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastps._shared.stats import percentile
from fastps.commands.demo.cluster import codec, initial_params
from fastps.commands.demo.config import CODECS
from fastps.commands.demo.output.view import COLUMNS, human_bytes, worker_cells
from fastps.commands.demo.state import Run


def result(run: Run) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    assert run.balance is not None
    stale = run.staleness()
    return {
        "test_accuracy": run.points[-1].accuracy,
        "updates": run.updates,
        "seconds": round(run.seconds, 3),
        "staleness_p50": percentile(stale, 0.50),
        "staleness_p99": percentile(stale, 0.99),
        "bytes_pushed": run.bytes_pushed,
        "bytes_saved": run.bytes_saved,
        "serial_test_accuracy": run.serial_accuracy,
        "acknowledged": run.balance.acknowledged,
        "versions": run.balance.applied,
        "in_flight": run.balance.in_flight,
        "minibatches": run.balance.minibatches,
        "training_loss": run.points[-1].loss,
        "data": run.config.data,
        "codec": run.config.codec,
        "optimizer": run.config.optimizer,
        "shards": run.config.shards,
        "workers": run.config.workers,
        "seed": run.config.seed,
        "out": str(Path(run.config.out).resolve()),
    }


def write(run: Run, path: Path) -> None:
    """The result with the curves, the events and the histogram, as a JSON file."""
    everything = {
        **result(run),
        "curve": [vars(point) for point in run.points],
        "events": [vars(moment) for moment in run.moments],
        "staleness": {str(value): count for value, count in sorted(run.staleness().items())},
    }
    path.write_text(json.dumps(everything, indent=1) + "\n")


def closing(run: Run) -> str:
    """The tables at the end, as plain text of 80 columns."""
    stale = run.staleness()
    point = run.points[-1]
    facts = [
        ("test accuracy", f"{100 * point.accuracy:.2f} %"),
        ("  serial", f"{100 * run.serial_accuracy:.2f} % (plain NumPy Adagrad, same number of updates)"),
        ("updates", f"{run.updates:,} in {run.seconds:.1f} s ({run.updates / run.seconds:,.0f} per second)"),
        (
            "staleness",
            f"p50 {percentile(stale, 0.5)}, p99 {percentile(stale, 0.99)}, max {max(stale, default=None)}",
        ),
        ("gradients", f"{human_bytes(run.bytes_pushed)} sent, {human_bytes(run.bytes_saved)} saved"),
        *(("ledger", text) for text in _ledger(run)),
        *(("kill", text) for text in _around_the_kill(run)),
    ]
    wide = max(len(name) for name, _ in facts)
    shown = [
        f"{'' if k and facts[k - 1][0] == name else name:<{wide}}  {text}"
        for k, (name, text) in enumerate(facts)
    ]
    return "\n".join(["", *shown, "", *_workers(run), "", *_codecs(run)])


def _ledger(run: Run) -> list[str]:
    assert run.balance is not None
    balance = run.balance
    lines = [f"reconciled: {balance.acknowledged:,} pushes acknowledged, {run.updates:,} versions made"]
    if balance.in_flight:
        lines.append(f"(when the worker was killed, up to {balance.in_flight} in flight)")
    return lines


def _around_the_kill(run: Run) -> list[str]:
    """What shows that training went on."""
    kill = next((moment for moment in run.moments if "killed" in moment.text), None)
    if kill is None:
        return []
    before = next((p for p in reversed(run.points) if p.seconds <= kill.seconds), run.points[0])
    last = run.points[-1]
    return [
        f"at {kill.seconds:.1f} s {kill.text}; after it,",
        f"{last.updates - kill.updates:,} more updates, loss {before.loss:.4f} -> {last.loss:.4f}",
        *(f"at {m.seconds:.1f} s {m.text}" for m in run.moments if "late" in m.text),
    ]


def _workers(run: Run) -> list[str]:
    """One line per worker, without steps/s, since all have finished."""
    rows = [COLUMNS, *(worker_cells(worker) for worker in run.workers)]
    keep = [index for index, name in enumerate(COLUMNS) if name != "steps/s"]
    widths = [max(len(row[index]) for row in rows) for index in keep]
    return [
        "  ".join(
            row[index].ljust(width) if COLUMNS[index] == "state" else row[index].rjust(width)
            for index, width in zip(keep, widths, strict=True)
        )
        for row in rows
    ]


def bytes_per_push(run: Run) -> dict[str, int]:
    """Bytes of one push in each codec, by the byte contract."""
    sizes = [value.size for value in initial_params(run.config, run.inputs).values()]
    return {name: sum(codec(name).body_len(size) for size in sizes) for name in CODECS}


def _codecs(run: Run) -> list[str]:
    """Bytes of one push in each codec, against float32."""
    each = bytes_per_push(run)
    lines = [f"{'codec':<10}{'bytes per push':>14}{'of float32':>12}{'this run':>12}"]
    for name, size in each.items():
        sent = human_bytes(run.bytes_pushed) if name == run.config.codec else ""
        lines.append(f"{name:<10}{size:>14,}{100 * size / each['float32']:>10.1f} %{sent:>12}".rstrip())
    return lines
