"""`evaluator`: pulls the parameters periodically and evaluates them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fastps._fastps import Versions
from fastps._shared import tensor_file
from fastps._shared.checks import as_seconds, at_least, flag, invalid, path_or_none, several
from fastps._shared.kept import NOTES, is_kept
from fastps._shared.text import quoted
from fastps._shared.types import Array, File
from fastps.errors import ConfigError, DeadlineError, NonFiniteError, UnknownTensorError
from fastps.parameter_server import ParameterServer, TensorSpec, View, averages, check_ps, check_view

__all__ = ["Evaluation", "Evaluator", "evaluator"]

#: Interval between two requests for versions, in seconds.
_POLL = 0.1


class Evaluation(NamedTuple):
    """The result of one evaluation.

    Attributes:
        version: Largest version of the trained tensors; 1 means registered and not yet trained.
        metrics: What `fn` returned.
        best: Whether these are the best parameters so far.
    """

    version: int
    metrics: dict[str, float]
    best: bool


@dataclass(frozen=True)
class _Rule:
    """Compares evaluations, and ends the iteration after enough without a better one."""

    by: str | None
    goal: Literal["max", "min"]
    patience: int | None

    def improves(self, metrics: Mapping[str, float], best: Evaluation | None) -> bool:
        if self.by is None or best is None:
            return True
        new, old = metrics[self.by], best.metrics[self.by]
        return new > old if self.goal == "max" else new < old


class Evaluator:
    """Evaluates parameters while workers train them; made by `evaluator`. Iterating yields an `Evaluation`
    each time, and ends by the rules of `evaluator`.

    Attributes:
        best: The best `Evaluation` so far, or None.
        stopped: Reason for the end of the last iteration: ``"patience"``, ``"idle"``, ``"stop"``; else None.
    """

    def __init__(
        self,
        ps: ParameterServer,
        fn: Callable[[dict[str, Array]], Mapping[str, float]],
        every: int,
        names: list[str] | None,
        consistent: bool,
        view: View,
        keep: File | None,
        rule: _Rule,
        idle: float,
    ) -> None:
        self.best: Evaluation | None = None
        self.stopped: Literal["patience", "idle", "stop"] | None = None
        self._ps, self._fn, self._every, self._names = ps, fn, every, names
        self._consistent, self._keep, self._rule, self._idle = consistent, keep, rule, idle
        self._view = view
        self._specs: dict[str, TensorSpec] = {}
        self._last: Versions | None = None  # of the last evaluation
        self._since = 0  # evaluations since the best one
        self._stop = False

    def now(self) -> Evaluation:
        """Evaluates the present parameters.

        Raises:
            NonFiniteError: A parameter or a metric is NaN or infinite; the best parameters stay unchanged.
            ConfigError: `fn` did not return numbers by name, or not the metric to compare by; or no tensor
                keeps an average, which is to be evaluated.
            DeadlineError: With `consistent`: the parameters changed during every pull until the timeout of
                `ps`.
            FastpsError: The servers could not be reached.
            Exception: Whatever `fn` raised, with a note of the version.
        """
        values, versions = self._pull()
        version = self._steps(versions)
        try:
            _check_finite(values)
            metrics = self._checked(self._fn(values))
        except Exception as error:
            error.add_note(f"evaluating version {version}")
            raise
        best = self._rule.improves(metrics, self.best)
        found = Evaluation(version, metrics, best)
        if best and self._keep is not None:
            _write(self._keep, values, found)
        self._last = versions
        self._since = 0 if best else self._since + 1
        self.best = found if best else self.best
        return found

    def stop(self) -> None:
        """Ends the iteration, also from another thread."""
        self._stop = True

    def __iter__(self) -> Iterator[Evaluation]:
        self._stop, self.stopped, self._since = False, None, 0
        changed, seen = time.monotonic(), None
        while not self._stop:
            asked = time.monotonic()
            versions = self._versions()
            changed += time.monotonic() - asked  # a server that restarts is not idle
            if versions != seen:
                changed, seen = time.monotonic(), versions
            quiet = time.monotonic() - changed >= self._idle
            # When nothing changes any more, the last parameters are evaluated, too.
            if versions is not None and (self._is_due(versions) or (quiet and versions != self._last)):
                yield self.now()
                changed = time.monotonic()
                if self._rule.patience is not None and self._since >= self._rule.patience:
                    self.stopped = "patience"
                    return
            elif quiet:
                if versions is None and self._names is not None:
                    self.now()  # says which tensor is not there
                self.stopped = "idle"
                return
            else:
                time.sleep(_POLL)
        self.stopped = "stop"

    def _versions(self) -> Versions | None:
        """The present versions of the tensors; None if they are not there yet."""
        try:
            versions = self._ps.versions(self._chosen())
        except UnknownTensorError:
            return None
        return versions if len(versions) else None

    def _is_due(self, versions: Versions) -> bool:
        """Returns whether enough steps were taken since the last evaluation, or a server has old values."""
        last = self._last
        if last is None or set(last) != set(versions):
            return True
        pairs = (zip(versions.slices(name), last.slices(name), strict=False) for name in last)
        went_back = any(new < old for slices in pairs for new, old in slices)
        return went_back or self._steps(versions) - self._steps(last) >= self._every

    def _steps(self, versions: Versions) -> int:
        """The version of the tensor that has taken most steps: others may be frozen."""
        names = list(versions)
        trained = [name for name in names if not is_kept(self._spec(name).group)] or names
        return max((max(versions.slices(name), default=0) for name in trained), default=0)

    def _chosen(self) -> list[str]:
        if self._names is not None:
            return self._names
        return [name for name in self._ps.names() if self._spec(name).group.rpartition("/")[2] != NOTES]

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._specs:
            self._specs[name] = self._ps.spec(name)
        return self._specs[name]

    def _pull(self) -> tuple[dict[str, Array], Versions]:
        names, end = self._chosen(), time.monotonic() + self._ps.native.timeout
        while True:
            values, versions = self._ps.pull(names, versions=True)
            if self._view == "average":
                values.update(averages(self._ps, names, self._spec))
            # Equal versions before and after a read: it was of one moment (Afek et al., JACM 1993).
            if not self._consistent or self._ps.versions(names) == versions:
                return values, versions
            if time.monotonic() > end:
                raise DeadlineError(
                    f"the parameters changed during every pull for {self._ps.native.timeout:g} s, so none "
                    "was of one moment; let workers push less often, or evaluate what "
                    "fastps checkpoint export --consistent writes"
                )

    def _checked(self, metrics: Any) -> dict[str, float]:
        """The metrics as numbers by name."""
        try:
            found = {str(name): float(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise invalid("result of fn", "numbers by name", metrics) from error
        by = self._rule.by
        if by is not None and by not in found:
            expected, got = f"a metric {by!r}", quoted(sorted(found))
            raise ConfigError("invalid result of fn", expected=expected, got=got)
        for name, value in found.items():
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"the metric {name!r} is {value}", expected="a finite number", got=str(value)
                )
        return found


def evaluator(
    ps: ParameterServer,
    fn: Callable[[dict[str, Array]], Mapping[str, float]],
    *,
    every: int = 100,
    names: Iterable[str] | None = None,
    consistent: bool = False,
    view: View = "values",
    keep: File | None = None,
    by: str | None = None,
    goal: Literal["max", "min"] = "max",
    patience: int | None = None,
    idle: float = 60.0,
) -> Evaluator:
    """Creates an `Evaluator`, which evaluates the parameters at intervals while workers train them.

    Args:
        ps: A `fastps.Store` or the result of `fastps.connect`. It only reads.
        fn: Called with a dict of float32 arrays by name; returns a dict of metrics by name.
        every: Steps of all workers together (versions) between two evaluations.
        names: The tensors; None: all.
        consistent: True: evaluate only parameters of one moment, unchanged during the pull. False: each slice
            is one version, and slices may be some steps apart.
        view: ``"average"``: evaluate, and keep, the averages of the tensors that have one (`fastps.EMA`).
        keep: A file for the best parameters (safetensors), replaced whenever there are better ones.
        by: The metric to compare by. `patience` needs it; without it, `keep` keeps the latest parameters.
        goal: ``"max"`` if larger values of `by` are better, ``"min"`` if smaller ones are.
        patience: End after this many evaluations in a row without improvement; None: never.
        idle: End after this many seconds without a change; the last parameters are still evaluated.

    Raises:
        ConfigError: An argument is invalid.

    >>> store = fastps.Store()
    >>> store.register("w", np.zeros(1, np.float32), optimizer=fastps.SGD(lr=1.0))
    >>> evaluator = fastps.evaluator(
    ...     store, lambda params: {"loss": float(abs(params["w"][0] + 2))}, every=1, by="loss", goal="min"
    ... )
    >>> for _ in range(3):
    ...     receipt = store.push("w", np.ones(1, np.float32))
    ...     evaluator.now()
    Evaluation(version=2, metrics={'loss': 1.0}, best=True)
    Evaluation(version=3, metrics={'loss': 0.0}, best=True)
    Evaluation(version=4, metrics={'loss': 1.0}, best=False)
    >>> evaluator.best.version
    3
    """
    check_ps(ps)
    if not callable(fn):
        raise invalid("fn", "a function of the parameters", fn)
    consistent = flag("consistent", consistent)
    check_view(view)
    if not isinstance(goal, str) or goal not in ("max", "min"):
        raise invalid("goal", "'max' or 'min'", goal)
    if by is not None and not isinstance(by, str):
        raise invalid("by", "the name of a metric", by)
    if patience is not None:
        patience = at_least(1, "patience", patience)
        if by is None:
            raise ConfigError("patience needs by=, the metric to compare by", expected="a name", got="None")
    if isinstance(names, str):
        raise invalid("names", "a list of names, or None", names)
    rule, keep = _Rule(by, goal, patience), path_or_none("keep", keep)
    chosen = None if names is None else several("names", names)
    return Evaluator(
        ps, fn, at_least(1, "every", every), chosen, consistent, view, keep, rule, as_seconds("idle", idle)
    )


def _check_finite(values: Mapping[str, Array]) -> None:
    """Raises if a parameter is not finite: it has overflowed through many steps."""
    for name, array in values.items():
        bad = np.flatnonzero(~np.isfinite(array))
        if bad.size:
            got = str(array.flat[bad[0]])
            raise NonFiniteError(
                f"a parameter has overflowed at element {bad[0]}",
                tensor=name,
                expected="finite values",
                got=got,
            )


def _write(path: File, values: dict[str, Array], found: Evaluation) -> None:
    about = {"evaluation": json.dumps({"version": found.version, "metrics": found.metrics})}
    tensor_file.write(path, values, about)
