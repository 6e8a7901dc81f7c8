"""``fastps history --plot``: the norm and the staleness of each push over the span, by worker."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastps
from fastps import _fastps
from fastps._shared.process import EXIT_OK, CommandError
from fastps._shared.text import counted
from fastps.commands.kit.plot import figure, has_matplotlib
from fastps.history import History

__all__ = ["compose", "draw", "execute", "is_wanted", "pushes"]

_PLOT = "--plot"
#: Workers with a colour of their own; the others share one.
_COLORS = ("#2166ac", "#b2182b", "#1b7837", "#e08214", "#762a83", "#35978f", "#8c510a", "#de77ae")
_OTHERS = "#bbbbbb"
_MARK = "#777777"
#: The name under which steps with several workers' gradients are drawn: the log has only their sum.
_TOGETHER = "several together"
#: Values that differ by more than this factor need a logarithmic axis.
_FAR = 10.0
#: A push with this many times the norm of its worker's median is named.
_SUSPECT = 20.0
#: Most marks with a name in the picture, and most characters of it.
_NAMED_MARKS, _NAME = 12, 16
_PUSH = np.dtype(
    [("worker", "<u4"), ("push", "<u8"), ("version", "<u8"), ("norm", "<f8"), ("staleness", "<i8")]
)


def is_wanted(arguments: Iterable[str]) -> bool:
    """Returns whether the arguments of ``fastps history`` ask for a picture."""
    return any(one == _PLOT or one.startswith(_PLOT + "=") for one in arguments)


def execute(arguments: list[str]) -> int:
    """Prints what ``fastps history`` prints without ``--plot``, and draws the picture."""
    rest, path = _without_plot(arguments)
    if not has_matplotlib():
        raise CommandError(f"{_PLOT} needs matplotlib: pip install matplotlib")
    status = int(_fastps.command_cli("history", rest))
    if status == EXIT_OK:
        folder = next(one for one in rest if not one.startswith("-"))
        draw(fastps.history(folder, norms=True), path)
    return status


def _without_plot(arguments: list[str]) -> tuple[list[str], Path]:
    rest, path = [], None
    given = iter(arguments)
    for one in given:
        if one == _PLOT:
            path = next(given, None)
        elif one.startswith(_PLOT + "="):
            path = one.partition("=")[2]
        else:
            rest.append(one)
    if not path:
        raise CommandError(f"{_PLOT} needs a file, such as {_PLOT} history.png")
    return rest, Path(path)


def pushes(past: History) -> tuple[list[str], NDArray[np.void]]:
    """The names of the workers, and a row for each gradient push, whose slices are together.

    A step with several workers' gradients is one row, under a name of its own and with its version as number:
    the log has only their sum.

    The rows have ``worker`` (an index into the names), ``push`` (its number), ``version`` (the newest that it
    made), ``norm`` (of all slices) and ``staleness`` (the largest; -1: unknown).
    """
    changes = past.changes[past.is_gradient & past.is_first]
    together = changes["workers"] > 1
    clients, client = np.unique(np.where(together, 0, changes["client"]), return_inverse=True)
    # A worker is another client of each shard, under one name.
    called = [past.name(one) if one else _TOGETHER for one in clients.tolist()]
    names, worker = np.unique(called, return_inverse=True)
    number = np.where(together, changes["version"], changes["push"])
    by = np.stack([worker.astype(np.uint64)[client], number], axis=1)
    each, row = np.unique(by, axis=0, return_inverse=True)
    row = row.reshape(-1)
    rows = np.zeros(len(each), _PUSH)
    rows["worker"], rows["push"] = each[:, 0], each[:, 1]
    rows["norm"] = np.sqrt(np.bincount(row, np.square(changes["norm"]), minlength=len(each)))
    rows["staleness"] = -1
    np.maximum.at(rows["version"], row, changes["version"])
    np.maximum.at(rows["staleness"], row, changes["staleness"])
    return names.tolist(), rows[np.argsort(rows["version"], kind="stable")]


def draw(past: History, path: Path) -> None:
    """Writes the PNG."""
    names, rows = pushes(past)
    if not len(rows):
        raise CommandError("the history has no pushes to draw")
    with figure(path, (12, 7.5), 90) as drawn:
        compose(drawn, past, names, rows)


def compose(drawn: Any, past: History, names: list[str], rows: NDArray[np.void]) -> None:
    """Draws two panels over the versions, with a point for each push: its norm and its staleness."""
    norms, staleness = drawn.subplots(2, 1, sharex=True)
    norms.set_title(
        _title(past, names, rows), loc="left", fontsize=11, fontweight="bold", pad=22 if past.marks else 8
    )
    is_log = _spreads(rows["norm"])
    _points(norms, names, rows[rows["norm"] > 0] if is_log else rows, "norm")
    norms.set_yscale("log" if is_log else "linear")
    without = int((rows["norm"] == 0).sum()) if is_log else 0
    left_out = f"\nwithout {_pushes(without)} of norm 0" if without else ""
    norms.set_ylabel(f"norm of the gradient\n(Euclidean, of all its tensors){left_out}")
    norms.legend(
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize=9,
        markerscale=3,
        title="worker: pushes",
        frameon=False,
    )
    _suspect(norms, past, names, rows)
    known = rows[rows["staleness"] >= 0]
    _points(staleness, names, known, "staleness")
    if len(known) and known["staleness"].max() > _FAR * max(1.0, np.percentile(known["staleness"], 95)):
        staleness.set_yscale("symlog", linthresh=1)
    staleness.set_ylabel("staleness\n(changes by others since its pull)")
    if not len(known):
        words = "no push says which values it was computed from (based_on=)"
        staleness.text(0.5, 0.5, words, transform=staleness.transAxes, ha="center", color=_MARK)
    staleness.set_xlabel("version that the push made")
    staleness.xaxis.set_major_formatter(lambda at, _: f"{at:,.0f}")
    _marks(past, norms, staleness)


def _title(past: History, names: list[str], rows: NDArray[np.void]) -> str:
    """What is drawn, and its time."""
    title = f"{_pushes(len(rows))} by {counted(len(names), 'worker')}"
    times = [time for span in past.spans for time in (span.first_time, span.last_time) if time is not None]
    if not times:
        return title
    first, last = (datetime.fromtimestamp(one, UTC) for one in (min(times), max(times)))
    end = f"{last:%H:%M:%S}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M:%S}"
    return f"{title}, {first:%Y-%m-%d %H:%M:%S} to {end} UTC"


def _pushes(count: int) -> str:
    return f"{count:,} push{'es' * (count != 1)}"


def _spreads(norms: NDArray[np.float64]) -> bool:
    """Returns whether the norms are of different magnitudes."""
    positive = norms[norms > 0]
    return bool(len(positive)) and bool(positive.max() > _FAR * positive.min())


def _suspect(axes: Any, past: History, names: list[str], rows: NDArray[np.void]) -> None:
    """Names the push that is farthest above the median of its worker, if it is far."""
    medians = [np.median(rows["norm"][rows["worker"] == worker]) for worker in range(len(names))]
    usual = np.array(medians)[rows["worker"]]
    times = np.divide(rows["norm"], usual, out=np.zeros(len(rows)), where=usual > 0)
    worst = int(np.argmax(times))
    if not times[worst] > _SUSPECT:
        return
    push = rows[worst]
    axes.plot([push["version"]], [push["norm"]], "o", ms=9, mfc="none", color=_MARK)
    early = push["version"] < (rows["version"].min() + rows["version"].max()) / 2
    axes.annotate(
        f"{_said(past, names[push['worker']], push['push'])}:\n{times[worst]:,.3g} x the median",
        (push["version"], push["norm"]),
        xytext=(12 if early else -12, 4),
        textcoords="offset points",
        ha="left" if early else "right",
        va="top",
        fontsize=9,
    )


def _said(past: History, worker: str, number: int) -> str:
    """A push and its note, or a step of several workers."""
    if worker == _TOGETHER:
        return f"the step of several workers to version {number:,}"
    changes = past.changes[past.is_gradient & (past.changes["push"] == number)]
    note = next((past.note(one) for one in changes if past.name(int(one["client"])) == worker), "")
    return f"push {number:,} of {worker}" + (f" ({note})" if note else "")


def _marks(past: History, top: Any, *others: Any) -> None:
    """Vertical lines, with names where there is room."""
    every = -(-len(past.marks) // _NAMED_MARKS)
    for k, mark in enumerate(past.marks):
        for axes in (top, *others):
            axes.axvline(mark.version, color=_MARK, ls=":", lw=1.0)
        if k % max(1, every) == 0:
            name = mark.name if len(mark.name) <= _NAME else mark.name[: _NAME - 1] + "…"
            top.annotate(
                name,
                (mark.version, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=_MARK,
            )


def _points(axes: Any, names: list[str], rows: NDArray[np.void], value: str) -> None:
    """A point for each push, in the colour of its worker: those that push most have their own."""
    counts = np.bincount(rows["worker"], minlength=len(names))
    by_count = np.argsort(-counts, kind="stable").tolist()
    colored = {worker: _COLORS[k] for k, worker in enumerate(by_count[: len(_COLORS)])}
    for worker in sorted(colored):
        own = rows[rows["worker"] == worker]
        label = f"{names[worker]}: {len(own):,}"
        axes.plot(own["version"], own[value], ".", ms=3, color=colored[worker], label=label)
    others = rows[~np.isin(rows["worker"], [*colored])]
    if len(others):
        label = f"{counted(len(names) - len(colored), 'other')}: {len(others):,}"
        axes.plot(others["version"], others[value], ".", ms=3, color=_OTHERS, label=label, zorder=0)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
