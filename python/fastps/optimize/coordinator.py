"""`Coordinator`: the loop of `minimize`. It commands vectors and replicas, and holds only scalars.

An iteration is three rounds of commands to the shards: the direction, the first trial point and an empty
sum; the sum as the gradient, and its products; the commit. Each further trial is two. Before a gradient is
there, replicas add their portions to the sum.

The tensors change only in commits, and what a commit does is stored on shard 0 before it is sent. A
coordinator that takes over sends it again, which changes no slice that has it, and searches from there. All
that follows is a function of what the commit left, so that both get the same bits.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fastps.errors import ConfigError, NonFiniteError, UnknownOutcomeError
from fastps.optimize.batches import Batches
from fastps.optimize.gradient_check import GradientCheck
from fastps.optimize.line_search import StrongWolfe, Trial
from fastps.optimize.method import Accepted, Method
from fastps.optimize.result import Iteration, OptimizeResult, Status
from fastps.optimize.state import Limits, Problem, State
from fastps.optimize.vectors import BatchReport, Operation, PortionFailure, Vectors, exact_sum

__all__ = ["Coordinator"]


class _Point(NamedTuple):
    """The function at the trial point, and what is needed of its gradient h."""

    trial: Trial
    mixed: float = math.nan
    square: float = math.nan
    norm: float = math.nan

    @property
    def is_finite(self) -> bool:
        """True if neither the function nor a product has overflowed."""
        return all(map(math.isfinite, (self.trial.fun, self.trial.slope, self.mixed, self.square)))


class Coordinator:
    """One run.

    Args:
        v: The vectors of `COMMON` and of the method.
        batches: Computes portions.
        problem: The problem.
        method: Chooses directions.
        rule: Finds step lengths; with a c2.
        limits: Limits of the run.
        settings: Settings that a coordinator which continues this run must share, in words.
        callback: Called after each commit; True or StopIteration stops.
    """

    def __init__(
        self,
        v: Vectors,
        batches: Batches,
        problem: Problem,
        method: Method,
        rule: StrongWolfe,
        limits: Limits,
        settings: str = "",
        callback: Callable[[OptimizeResult], Any] | None = None,
    ) -> None:
        self._v, self._batches, self._problem = v, batches, problem
        self._method, self._limits, self._callback = method, limits, callback
        self._rule = rule
        self._settings = settings
        self._directions = method._begin(size=problem.size)
        self._products: list[float] = []
        self._nfev = 0
        self._largest = 0.0
        self._rounds = 0
        self._began = 0.0
        #: State after the last commit; None before the first.
        self.state: State | None = None
        #: Set if a check found the gradient wrong before any step: then there is nothing to continue from.
        self.is_refused = False

    def run(self, stored: State | None = None, check_gradient: bool = False) -> OptimizeResult:
        """Runs until a limit: from the tensors' values, or from the last commit of another coordinator."""
        self._began = time.monotonic()
        state = self._start() if stored is None else self._take_over(stored)
        if check_gradient:
            try:
                self._check_gradient(state)
            except ConfigError:
                self.is_refused = stored is None
                raise
        status = self._over(state)
        while status is None:
            status = self._iterate(state)
            state = self.state or state
        return self._result(state, status)

    # -- the course of a run ---------------------------------------------------------------------------------

    def _start(self) -> State:
        """Evaluates the point in the tensors, and commits it."""
        v = self._v
        if v.stored is not None:  # the vectors of an interrupted run are overwritten from here on
            v.save("")
        first = self._first_portion()
        losses, _, point = self._evaluate(0.0, v.copy("t", "w"))
        if losses[0] != first:
            warnings.warn(
                f"the loss of portion 0 was {first!r}, and {losses[0]!r} at the same point: the "
                "objective is no function of its arguments, so searches may fail; does the model draw random "
                "numbers, or were the two computed on different CPUs?",
                RuntimeWarning,
                stacklevel=4,
            )
        if not point.is_finite:
            got = f"f = {point.trial.fun:g}, |gradient|^2 = {point.square:g}"
            raise NonFiniteError(
                "the function or its gradient is too large at the first point",
                expected="finite values",
                got=got,
                advice="assign other initial values, or scale the loss",
            )
        self._nfev = 1
        return self._commit(Iteration(0, point.trial.fun, point.norm, 0.0, 1), point.square, [])

    def _first_portion(self) -> float:
        """The loss of portion 0 at the point in the tensors; its gradient fixes the grid of the next sum."""
        v = self._v
        while True:
            [loss], _ = self._sum(1, v.copy("t", "w"))
            with contextlib.suppress(UnknownOutcomeError):  # a restarted server has lost its part of the sum
                self._largest = float(self._run(v.end_sum("h"), v.max_abs("h"))[0]) or 1.0
                return loss

    def _take_over(self, state: State) -> State:
        """Sends the last commit again, and asks for all products."""
        self.state, self._nfev, self._largest = state, state.nfev, state.largest
        self._directions = self._method._begin(state.memory, size=self._problem.size)
        self._run(*self._committing(state), number=state.number)
        products = self._directions.products(self._v, again=True)
        if products is not None:
            self._products = _numbers(self._run(products)[0])
        return state

    def _iterate(self, state: State) -> Status | None:
        """Searches along one direction and commits the best point; the reason to stop, or None."""
        v, directions = self._v, self._directions
        if self._is_at_limit():
            return Status.EVALUATIONS
        if state.square == 0:  # the gradient is so small that its square is not a number above 0
            return Status.NO_LOWER
        factors = directions.direction(self._products)
        first = directions.first_step(math.sqrt(state.square))
        if not 0 < first < math.inf or not all(map(math.isfinite, factors.values())):
            return self._restart()
        results, point = self._measure(first, v.combine("p", factors), v.dot("g", "p"))
        slope = float(results[0])
        if not -math.inf < slope < 0:
            return self._restart()
        search = self._rule.begin(state.fun, slope, first, self._problem.eps)
        search = search.tell(point.trial.fun, point.trial.slope)
        while (step := search.step) is not None and not self._is_at_limit():
            point = self._measure(step)[1]
            search = search.tell(point.trial.fun, point.trial.slope)
        best = search.best
        visible = self._problem.eps * abs(state.fun)
        if best is None or (search.accepted is None and best.fun >= state.fun - visible):
            return self._restart(search.is_hidden) if search.step is None else Status.EVALUATIONS
        if best != point.trial:
            if self._is_at_limit():
                return Status.EVALUATIONS
            point = self._measure(best.step)[1]
            if not point.is_finite:  # the objective is no function
                return self._restart()
        slopes = slope, point.trial.slope
        directions.accept(Accepted(best.step, *slopes, state.square, point.square, point.mixed))
        at = Iteration(state.iteration + 1, point.trial.fun, point.norm, best.step, self._nfev)
        return self._over(self._commit(at, point.square, state.history))

    def _restart(self, is_hidden: bool = False) -> Status | None:
        """Tries steepest descent after a search that found nothing lower, or stops if that was one."""
        if self._directions.is_restarted:
            return Status.ROUNDING if is_hidden else Status.NO_LOWER
        self._directions.restart()
        return None

    def _over(self, state: State) -> Status | None:
        stop = self._stops(state) and state.iteration > 0  # scipy's callback does not see the start
        if state.norm <= self._limits.tol:
            return Status.CONVERGED
        if stop:
            return Status.CALLBACK
        if state.has_stalled(self._problem.eps):
            return Status.ROUNDING
        if state.iteration >= self._limits.max_iterations:
            return Status.ITERATIONS
        return Status.EVALUATIONS if state.nfev >= self._limits.max_evaluations else None

    def _stops(self, state: State) -> bool:
        """Calls the callback; returns whether it stops the run."""
        try:
            return self._callback is not None and _is_true(
                self._callback(self._result(state, Status.RUNNING))
            )
        except StopIteration:  # as for scipy
            return True

    # -- rounds of commands ----------------------------------------------------------------------------------

    def _run(self, *operations: Operation, number: int | None = None) -> list[Any]:
        self._rounds += 1
        return list(self._v.run(*operations, number=number))

    def _sum(self, asked: int, *before: Operation) -> tuple[list[float], list[Any]]:
        """Has replicas add portions 0 to `asked` at the trial point, which the operations `before` make.

        Returns:
            The losses of the portions, empty if a loss or a gradient is not finite; and the operations'
            results.
        """
        coarser = 0
        while True:
            batch = self._v._next_batch
            begin = self._v.begin_sum(batch, asked, largest=self._largest, coarser=coarser)
            results = self._run(*before, begin)
            report = self._batches.compute(batch, asked)
            found = {failure.kind: failure for failure in report.failures}
            losses = [done[0] for done in report.finished if done is not None]
            if not found and math.isfinite(exact_sum(losses)):
                return losses, results
            if not found or "not_finite" in found:
                if self.state is None:
                    raise _not_finite(found.get("not_finite") or _largest_of(report))
                return [], results
            coarser += "outside" in found

    def _is_at_limit(self) -> bool:
        return self._nfev >= self._limits.max_evaluations

    def _evaluate(self, step: float, *before: Operation) -> tuple[list[float], list[Any], _Point]:
        """The portions' losses, the results of `before`, and the function, at the trial point."""
        while True:
            losses, results = self._sum(self._problem.portions, *before)
            with contextlib.suppress(UnknownOutcomeError):  # a restarted server has lost its part of the sum
                return losses, results, self._point(step, losses)

    def _measure(self, step: float, *before: Operation) -> tuple[list[Any], _Point]:
        """Evaluates the trial point ``w + step p``; `before` are operations that come first."""
        self._nfev += 1
        at = self._v.combine("t", {"w": 1.0, "p": step})
        _, results, point = self._evaluate(step, *before, at)
        return results, point

    def _point(self, step: float, losses: list[float]) -> _Point:
        """The function at the trial point, whose sum is complete."""
        if not losses:
            return _Point(Trial(step, math.inf, math.nan))
        v, problem = self._v, self._problem
        mean = {"h": 1.0 / problem.samples, **({"t": problem.l2} if problem.l2 else {})}
        asked = v.block(["h"], ["p", "g", "h"]), v.max_abs("h"), v.dot("t", "t")
        products, norm, length = self._run(v.end_sum("h"), v.combine("h", mean), *asked)
        slope, mixed, square = products[0]
        fun = exact_sum(losses) / problem.samples + (0.5 * problem.l2 * length if problem.l2 else 0.0)
        point = _Point(Trial(step, fun, slope), mixed, square, norm)
        # A point that is not finite itself could not be committed.
        if self.state is None or (point.is_finite and math.isfinite(length)):
            return point
        return _Point(Trial(step, math.inf, math.nan))

    def _commit(self, at: Iteration, square: float, before: list[Iteration]) -> State:
        """Makes the trial point the tensors' value."""
        number, memory = self._v.next_number, self._directions.memory
        history = [*before, at]
        state = State(
            number, at.fun, square, at.grad_norm, at.nfev, self._largest, memory, history, self._settings
        )
        self._v.save(state.to_json())
        results = self._run(*self._committing(state), number=state.number)
        self._products = _numbers(results[-1]) if results else []
        self.state = state
        return state

    def _committing(self, state: State) -> list[Operation]:
        """The program of a commit."""
        v, directions = self._v, self._directions
        pairs = directions.commit(v) if state.iteration > 0 else []
        # Also at first, where it changes no value: the grid of the next sums follows.
        change = [*pairs, v.copy("g", "h"), v.copy("w", "t")]
        products = directions.products(v)
        return change if products is None else [*change, products]

    # -- results ---------------------------------------------------------------------------------------------

    def _check_gradient(self, state: State) -> None:
        """Fails if the gradient is wrong at the last commit. Its evaluations are no part of the run."""

        def evaluate(step: float) -> float:
            return self._evaluate(step, self._v.combine("t", {"w": 1.0, "p": step}))[2].trial.fun

        GradientCheck(self._v, state.fun, self._problem.eps, self._largest, evaluate).run()

    def _result(self, state: State, status: Status) -> OptimizeResult:
        return OptimizeResult(
            success=status in (Status.CONVERGED, Status.ROUNDING),
            status=int(status),
            message=self._message(state, status),
            fun=state.fun,
            grad_norm=state.norm,
            nit=state.iteration,
            nfev=self._nfev,
            seconds=time.monotonic() - self._began,
            rounds=self._rounds,
            backups_issued=self._batches.issued,
            backups_won=self._batches.won,
            history=tuple(state.history),
            replicas=dict(self._batches.shares),
        )

    def _message(self, state: State, status: Status) -> str:
        limits, is_narrow = self._limits, self._problem.eps > 1e-10
        norm = f"the largest element of the gradient is {state.norm:.3g}"
        if status is Status.RUNNING:
            return norm
        if status is Status.CONVERGED:
            return f"{norm}, within tol={limits.tol:g}"
        if status is Status.ROUNDING:
            more = "; float64 tensors allow more" if is_narrow else ""
            return f"rounding hides any lower point: {norm}, above tol={limits.tol:g}{more}"
        why = {
            Status.ITERATIONS: f"stopped at max_iterations={limits.max_iterations}",
            Status.EVALUATIONS: f"stopped at max_evaluations={limits.max_evaluations}",
            Status.NO_LOWER: "found no lower point",
            Status.CALLBACK: "stopped by the callback",
        }[status]
        advice = "minimize again to continue from here, with a higher limit or a larger tol"
        if status is Status.CALLBACK:
            advice = "minimize again to continue from here"
        elif status is Status.NO_LOWER:
            exact = "float64 tensors allow more" if is_narrow else "a larger tol is reached"
            advice = (
                f"this may be as far as rounding allows ({exact}), or the gradients are wrong "
                "(check_gradient=True compares them with differences)"
            )
        return f"{why}: {norm}, above tol={limits.tol:g}; {advice}"


def _numbers(result: Any) -> list[float]:
    return [float(x) for x in np.ravel(result)]


def _is_true(result: object) -> bool:
    """Returns whether a callback's result is True, also NumPy's."""
    return isinstance(result, (bool, np.bool_)) and bool(result)


def _largest_of(report: BatchReport) -> PortionFailure:
    """The portion with the largest loss, of finite ones whose sum is not."""
    losses = [(abs(done[0]), k, done[1]) for k, done in enumerate(report.finished) if done is not None]
    _, portion, replica = max(losses)
    return PortionFailure(replica, portion, "too_large", None)


def _not_finite(found: PortionFailure) -> NonFiniteError:
    what = "the loss" if found.tensor is None else "a gradient"
    got = "NaN or infinity"
    if found.kind == "too_large":
        what, got = "the sum of the losses", "a loss that is too large"
    return NonFiniteError(
        f"{what} is not finite at the first point, in portion {found.portion} of replica {found.replica}",
        tensor=found.tensor,
        expected="finite values",
        got=got,
        advice="assign other initial values",
    )
