"""What the log says of changes: who made them, and how they compare with those before."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fastps._shared.text import counted
from fastps.history import History

__all__ = ["culprits"]

#: Pushes of a worker, or steps of several, that the norm of a suspected one is compared with.
_BEFORE = 100

#: The pushes whose gradients are in one step: the name of each worker, and the number of its push.
_Pushes = tuple[tuple[str, int], ...]


def culprits(past: History, made: NDArray[np.bool_]) -> list[str]:
    """A line for each push, each step with several workers' gradients, each assignment, and each program.

    Args:
        past: The history, with norms.
        made: The rows of its changes to describe: shape ``(changes,)``.
    """
    together = past.changes["workers"] > 1
    kinds = (
        (past.is_gradient & ~together, _pushes),
        (past.is_gradient & together, _sums),
        (~past.is_gradient & ~past.is_program, _assignments),
        (past.is_program, _programs),
    )
    return [line for kind, describe in kinds if (made & kind).any() for line in describe(past, made & kind)]


def _pushes(past: History, made: NDArray[np.bool_]) -> list[str]:
    # A worker is another client of each shard, under one name.
    return [_push(past, *by) for by in dict.fromkeys(_makers(past, made))]


def _push(past: History, worker: str, push: int) -> str:
    """One push beside those of its worker before it."""
    changes = past.changes
    clients = [client for client in np.unique(changes["client"]).tolist() if past.name(client) == worker]
    own = np.isin(changes["client"], clients) & past.is_gradient & (changes["workers"] == 1)
    rows = own & (changes["push"] == push)
    norms = {
        int(one): float(np.sqrt(np.square(changes["norm"][own & (changes["push"] == one)]).sum()))
        for one in np.unique(changes["push"][own & (changes["push"] <= push)])[-_BEFORE - 1 :]
    }
    norm = norms.pop(push)
    stale = int(changes["staleness"][rows].max())
    staleness = f", staleness {stale}" if stale >= 0 else ""
    note = past.note(changes[rows][0])
    said = f" ({note})" if note else ""
    return (
        f"push {push:,} of worker {worker!r}{said} to {_tensors(past, rows)}: lr {changes['lr'][rows][0]:g}, "
        f"|g| {norm:.3g}{_beside(norm, norms.values())}{_finite(past, rows)}{staleness}"
    )


def _sums(past: History, made: NDArray[np.bool_]) -> list[str]:
    """Steps of which the log has the sum only: it names all whose gradients are in it, and accuses none."""
    steps: dict[_Pushes, list[int]] = {}
    of_made: dict[_Pushes, None] = {}
    together = past.is_gradient & (past.changes["workers"] > 1)
    starts = np.flatnonzero(past.is_first & together).tolist()
    for start, count in zip(starts, past.changes["workers"][starts].tolist(), strict=True):
        rows = slice(start, start + count)
        step = tuple(sorted(_makers(past, rows)))
        steps.setdefault(step, []).append(start)
        if made[rows].any():
            of_made[step] = None
    return [_sum(past, step, steps) for step in of_made]


def _sum(past: History, step: _Pushes, steps: dict[_Pushes, list[int]]) -> str:
    changes, rows = past.changes, steps[step]
    version = int(changes["version"][rows].max())
    norms = {
        int(changes["version"][one].max()): float(np.sqrt(np.square(changes["norm"][one]).sum()))
        for one in steps.values()
    }
    before = [norms[one] for one in sorted(norms) if one < version][-_BEFORE:]
    by = [f"{worker!r} (its push {push:,})" for worker, push in step]
    stands = f"{', '.join(by[:-1])} and {by[-1]}"
    return (
        f"one step with the gradients of {counted(len(step), 'worker')} to {_tensors(past, rows)}: {stands}; "
        f"lr {changes['lr'][rows][0]:g}, |sum| {norms[version]:.3g}{_beside(norms[version], before)}"
        f"{_finite(past, rows)}; the log has only their sum, so it cannot tell which of them it was"
    )


def _assignments(past: History, made: NDArray[np.bool_]) -> list[str]:
    lines = []
    for state, what in ((False, "values"), (True, "optimizer state")):
        kind = made & (past.is_state == state)
        for worker, push in dict.fromkeys(_makers(past, kind)):
            of = kind & np.array([by == (worker, push) for by in _makers(past, slice(None))])
            norm = float(np.sqrt(np.square(past.changes["norm"][of]).sum()))
            lines.append(
                f"an assignment by {worker!r} (its push {push:,}) of {what} to {_tensors(past, of)}: "
                f"|x| {norm:.3g}{_finite(past, of)}"
            )
    return lines


def _programs(past: History, made: NDArray[np.bool_]) -> list[str]:
    programs: dict[tuple[str, int, int], list[int]] = {}
    for row in np.flatnonzero(made).tolist():
        change = past.changes[row]
        key = past.note(change), int(change["client"]), int(change["push"])
        programs.setdefault(key, []).append(row)
    return [
        f"a program on the vectors of {space!r}, command {number:,} of {_coordinator(past, client)}, to "
        f"{_tensors(past, rows)}"
        for (space, client, number), rows in programs.items()
    ]


def _coordinator(past: History, client: int) -> str:
    return f"its coordinator {past.name(client)!r}" if client else "a coordinator that the log does not name"


def _makers(past: History, rows: NDArray[np.bool_] | slice) -> Iterable[tuple[str, int]]:
    clients, pushes = past.changes["client"][rows].tolist(), past.changes["push"][rows].tolist()
    return zip(map(past.name, clients), pushes, strict=True)


def _tensors(past: History, rows: NDArray[np.bool_] | list[int]) -> str:
    names = [past.tensors[k] for k in dict.fromkeys(past.changes["tensor"][rows].tolist())]
    return names[0] if len(names) == 1 else f"{names[0]!r} and {counted(len(names) - 1, 'more tensor')}"


def _beside(norm: float, before: Iterable[float]) -> str:
    norms = [*before]
    usual = float(np.median(norms)) if norms else math.nan
    return f", {norm / usual:,.3g} x the median of the {len(norms)} before it" if usual > 0 else ""


def _finite(past: History, rows: NDArray[np.bool_] | list[int]) -> str:
    return "" if past.is_finite[rows].all() else ", with elements that are not finite"
