"""``fastps history --plot``: the norm and the staleness of each push over the span, by worker."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastps
from fastps import _fastps
from fastps._shared.process import EXIT_OK, CommandError
from fastps.commands.kit.plot import figure, has_matplotlib
from fastps.history import History

__all__ = ["draw", "execute", "is_wanted", "pushes"]

_PLOT = "--plot"
#: Workers with a colour of their own; the others share one.
_COLORS = ("#2166ac", "#b2182b", "#1b7837", "#e08214", "#762a83", "#35978f", "#8c510a", "#de77ae")
_OTHERS = "#bbbbbb"
_MARK = "#777777"
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

    The rows have ``worker`` (an index into the names), ``push`` (its number), ``version`` (the newest that it
    made), ``norm`` (of all slices) and ``staleness`` (the largest; -1: unknown).
    """
    changes = past.changes[past.is_gradient]
    clients, client = np.unique(changes["client"], return_inverse=True)
    # A worker is another client of each shard, under one name.
    names, worker = np.unique([past.name(one) for one in clients.tolist()], return_inverse=True)
    by = np.stack([worker.astype(np.uint64)[client], changes["push"]], axis=1)
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
    with figure(path, (11, 7), 90) as drawn:
        norms, staleness = drawn.subplots(2, 1, sharex=True)
        _points(norms, names, rows, "norm")
        if (rows["norm"] > 0).any():
            norms.set_yscale("log")
        norms.set_ylabel("norm of the gradient")
        norms.set_title(
            f"{len(rows):,} pushes by {len(names)} workers", loc="left", fontsize=11, fontweight="bold"
        )
        norms.legend(loc="upper right", fontsize=8, markerscale=3)
        _points(staleness, names, rows[rows["staleness"] >= 0], "staleness")
        staleness.set_ylabel("staleness")
        staleness.set_xlabel("version")
        staleness.xaxis.set_major_formatter(lambda at, _: f"{at:,.0f}")
        for mark in past.marks:
            for axes in (norms, staleness):
                axes.axvline(mark.version, color=_MARK, ls=":", lw=1.0)
            norms.annotate(
                f" {mark.name}",
                (mark.version, 0.02),
                xycoords=("data", "axes fraction"),
                fontsize=8,
                color=_MARK,
            )


def _points(axes: Any, names: list[str], rows: NDArray[np.void], value: str) -> None:
    """A point for each push, in the colour of its worker: those that push most have their own."""
    by_count = np.argsort(-np.bincount(rows["worker"], minlength=len(names)), kind="stable").tolist()
    colored = {worker: _COLORS[k] for k, worker in enumerate(by_count[: len(_COLORS)])}
    for worker in sorted(colored):
        own = rows[rows["worker"] == worker]
        axes.plot(own["version"], own[value], ".", ms=3, color=colored[worker], label=names[worker])
    others = rows[~np.isin(rows["worker"], [*colored])]
    if len(others):
        axes.plot(others["version"], others[value], ".", ms=3, color=_OTHERS, label="others", zorder=0)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
