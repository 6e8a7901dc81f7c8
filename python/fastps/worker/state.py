"""Checks that a saved state fits a worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fastps._fastps import Sparse
from fastps._shared.checks import integer
from fastps._shared.text import quoted
from fastps._shared.types import Array
from fastps.errors import ConfigError, ShapeError
from fastps.modes import Mode
from fastps.worker.gradients import check
from fastps.worker.halves import computes

__all__ = ["check_state"]

_NUMBERS = {"step", "summed"}
_PARTS, _OPTIONAL = _NUMBERS | {"sum", "params", "residuals"}, {"rows", "begun"}


def check_state(
    state: Mapping[str, Any], params: Mapping[str, Array], mode: Mode, *, residuals: bool
) -> None:
    """Raises `ConfigError` or `ShapeError` unless a worker can take all of a saved state.

    Args:
        state: As from `Worker.state_dict`.
        params: The worker's parameters.
        mode: Its mode. One of local steps saves parameters, and no rows; `fastps.DiLoCo` also saves the
            values that its round began from.
        residuals: Its codec keeps residuals.
    """
    local, rounds = computes(mode), mode.takes_values
    _check_parts(state)
    rows = state.get("rows", {})
    _check_names("params", state["params"], params if local else (), complete=True)
    _check_names("begun", state.get("begun", {}), params if rounds else (), complete=True)
    _check_names("sum", state["sum"], params)
    _check_names("rows", rows, () if local else params)
    _check_names("residuals", state["residuals"], params if residuals else ())
    for name, array in (*state["params"].items(), *state.get("begun", {}).items(), *state["sum"].items()):
        _check_shape(name, params[name].shape, np.shape(array))
    for name, array in state["residuals"].items():
        _check_shape(name, (params[name].size,), np.shape(array))
    for name, (indices, values) in rows.items():
        check(name, Sparse(indices, values), params[name], True)


def _check_parts(state: object) -> None:
    """Raises unless it has the parts of a worker's state, each of its kind."""
    if not isinstance(state, Mapping) or not state.keys() >= _PARTS:
        got = quoted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        expected = f"a mapping with {quoted(sorted(_PARTS))}"
        raise ConfigError("the state is not of Worker.state_dict", expected=expected, got=got)
    for name in _NUMBERS:
        integer(name, state[name])
    for name in (_PARTS | _OPTIONAL) - _NUMBERS:
        if not isinstance(part := state.get(name, {}), Mapping):
            raise ConfigError(f'invalid "{name}" of the state', expected="a mapping", got=type(part).__name__)


def _check_names(what: str, arrays: Iterable[str], names: Iterable[str], complete: bool = False) -> None:
    saved, known = list(arrays), list(names)
    if set(saved) - set(known) or (complete and set(saved) != set(known)):
        raise ConfigError(
            f"the saved {what} are of other parameters, or of another mode or codec",
            expected=quoted(known),
            got=quoted(saved),
        )


def _check_shape(name: str, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
    if expected != got:
        raise ShapeError("wrong shape of the saved values", tensor=name, expected=str(expected), got=str(got))
