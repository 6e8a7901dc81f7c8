"""The state of a `ParameterServerOptimizer`: in state dicts, on the servers, and its worker's own."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from fastps import optim
from fastps._shared.checks import plain
from fastps._shared.text import quoted
from fastps._shared.types import Array
from fastps.checkpoint import new_state
from fastps.errors import ConfigError
from fastps.parameter_server import ParameterServer
from fastps.torch._params import Entry, check_unchanged, rounds_to, settings_of
from fastps.torch.state import State, Theirs, as_stored, fetch, fits, lookalike
from fastps.worker import Worker
from fastps.worker.halves import Halves

__all__ = ["OptimizerState", "arrays_of", "is_of_one_worker", "plain_groups"]

_log = logging.getLogger("fastps")


class OptimizerState:
    """Saves and loads the state of an optimizer's parameters.

    Args:
        ps: The store or servers.
        prefix: Of all names.
        rank: The worker's, or None.
        rules: The optimizer's own list, one rule for each group; more may come.
        groups: Likewise, of each group's parameters.

    Attributes:
        id: Marks the state dicts that the optimizer makes.
    """

    def __init__(
        self,
        ps: ParameterServer,
        prefix: str,
        rank: int | None,
        rules: list[optim.Optimizer],
        groups: list[list[Entry]],
    ) -> None:
        self.ps, self.prefix, self.rank = ps, prefix, rank
        self.id = secrets.token_hex(8)
        self._rules = rules
        self._groups = groups

    @property
    def entries(self) -> list[Entry]:
        """All parameters."""
        return [entry for group in self._groups for entry in group]

    def those(self) -> list[Theirs]:
        """All parameters, with their names and rules."""
        each = zip(self._rules, self._groups, strict=True)
        return [Theirs(entry.name, entry.param, rule) for rule, group in each for entry in group]

    def note_of(self, kind: str) -> str:
        """The name of a note about these parameters: other optimizers of a model have their own."""
        return f"{self.entries[0].name}.{kind}"

    # -- saving ----------------------------------------------------------------------------------------------

    def complete(self, state: dict[str, Any], worker: Worker) -> None:
        """Gives a state dict of torch what the servers and the worker have."""
        own = worker.state_dict()
        states, those = fetch(self.ps, self.those()), enumerate(self.entries)
        state["state"] = {k: states[entry.name] for k, entry in those if entry.name in states}
        state["param_groups"] = plain_groups(state["param_groups"])
        rounded = [entry for entry in self.entries if entry.is_rounded]
        own["values"] = {e.name: e.array.copy() for e in rounded if not isinstance(e.array, Halves)}
        own["values"] |= self.wider(worker)
        saver = {"rank": self.rank, "saver": self.id}
        state["fastps"] = {**{key: _tensors(value) for key, value in own.items()}, **saver}

    def wider(self, worker: Worker) -> dict[str, Array]:
        """The float32 values of float32 tensors that bfloat16 parameters show, and what was written there.

        Tensors are left out that others have changed since their values came.
        """
        halves = {entry.name: entry for entry in self.entries if isinstance(entry.array, Halves)}
        halves = {name: one for name, one in halves.items() if self.ps.spec(name).dtype == "float32"}
        if not halves:
            return {}
        there = worker.unchanged()
        return {name: one.unrounded(there[name]) for name, one in halves.items() if name in there}

    # -- loading ---------------------------------------------------------------------------------------------

    def saved(self, state_dict: Mapping[str, Any]) -> dict[str, State]:
        """The optimizer state in a state dict, this class's or torch's, by name; raises unless it fits."""
        groups = state_dict["param_groups"]
        by_group = [[entry.name for entry in group] for group in self._groups]
        others = [group.get("param_names") for group in groups]
        if "fastps" not in state_dict:  # torch's knows no prefix, and mostly only their order
            named = [group.get("param_names", ours) for ours, group in zip(by_group, groups, strict=False)]
            others = [[self.prefix + name.removeprefix(self.prefix) for name in names] for names in named]
            sizes = [len(group["params"]) for group in groups]
            if sizes != [len(group) for group in by_group]:
                ours, theirs = (", ".join(map(str, n)) for n in (map(len, by_group), sizes))
                raise _misfit(f"groups of {ours} parameters", f"groups of {theirs}")
            for rule, group in zip(self._rules, groups, strict=True):
                if (other := lookalike(rule, group)) is not None:
                    raise _misfit(type(rule).__name__, f"a state with the settings of {other}")
        if others != by_group:
            raise _misfit(f"the groups {_groups(by_group)}", _groups(others))
        for rule, group in zip(self._rules, groups, strict=True):
            check_unchanged(rule, {**settings_of(rule), **group})
        names = [entry.name for entry in self.entries]
        keys = [key for group in groups for key in group["params"]]  # numbers, or names of set_state_dict
        states = {names[keys.index(key)]: _on_cpu(state) for key, state in state_dict["state"].items()}
        if any(not state and isinstance(key, str) for key, state in state_dict["state"].items()):
            raise _misfit("a state of flatten_optimizer_state_dict=False", "parameters without state")
        for one in self.those():
            if one.name in states and not fits(one, states[one.name]):
                expected, got = f"state of {one.rule}", quoted(sorted(states[one.name]))
                raise ConfigError(
                    "the saved optimizer state does not fit",
                    tensor=one.name,
                    expected=expected,
                    got=f"{got} or other shapes",
                )
        return states

    def takes_over_from(self, worker: Worker, rank: int | None) -> bool:
        """Returns whether a worker replaces the one that saved: only one pushes its residuals.

        Args:
            worker: The optimizer's.
            rank: Of the worker that saved. Without ranks it is the first worker of the run, and the one that
                trains in a warm start. A rank on one side only is compared with 0.
        """
        if rank is None and self.rank is None:
            return worker.began_alone
        return (rank or 0) == (self.rank or 0)

    def take_over(self, states: Mapping[str, State], values: Mapping[str, Array]) -> bool:
        """Gives a saved optimizer state to servers that have taken no step.

        Args:
            states: The state of each parameter that has one.
            values: float32 values, for parameters that show them.

        Returns:
            True if the servers are at the saved step now.
        """
        if not states:
            return True
        saved = max(int(state.get("step", 0)) for state in states.values())
        now = self.steps_taken()
        if now == 0:
            self.assign(states)
            for entry in self.entries:
                if entry.name in values and rounds_to(values[entry.name], entry.param):
                    self.ps.assign(entry.name, values[entry.name])
        elif now != saved:
            _log.warning(
                "the servers have taken %d steps, the loaded optimizer state is of step %d: training uses "
                'theirs (fastps.torch.resume(..., keep="checkpoint") returns to a checkpoint)',
                now,
                saved,
            )
        return now in (0, saved)

    def steps_taken(self) -> int:
        """Most steps that the servers have taken with a parameter."""
        return max((int(state["step"]) for state in fetch(self.ps, self.those()).values()), default=0)

    def assign(self, states: Mapping[str, State]) -> None:
        """Replaces the servers' optimizer state; parameters without a saved one begin."""
        for one, entry in zip(self.those(), self.entries, strict=True):
            stored = as_stored(one.rule, states.get(one.name, {}))
            self.ps.load_state(one.name, {**new_state(one.rule, entry.array), **stored})


def plain_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups with Python's numbers: ``torch.load`` reads NumPy's only without ``weights_only``."""
    return [{key: plain(value) for key, value in group.items()} for group in groups]


def _misfit(expected: str, got: str) -> ConfigError:
    return ConfigError("invalid state", expected=expected, got=got)


def _groups(groups: Iterable[Iterable[str] | None]) -> str:
    """Groups of parameters by their names."""
    return "; ".join(quoted(group or ()) for group in groups)


def _on_cpu(state: Mapping[str, Any]) -> State:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def is_of_one_worker(own: Mapping[str, Any]) -> bool:
    """Returns whether a worker's state has gradients, which would count twice if two workers loaded it."""
    return bool(own["sum"] or own.get("rows")) or any(map(np.any, own["residuals"].values()))


def _tensors(value: Any) -> Any:
    """Tensors for arrays, so that ``torch.load`` takes them with ``weights_only``."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    return [_tensors(item) for item in value] if isinstance(value, tuple) else value


def arrays_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().resolve_neg().numpy()
    if isinstance(value, dict):
        return {key: arrays_of(item) for key, item in value.items()}
    return tuple(arrays_of(item) for item in value) if isinstance(value, list) else value
