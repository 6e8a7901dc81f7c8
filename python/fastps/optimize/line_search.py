"""`StrongWolfe`: a line search that is a value, so that a coordinator can store it and continue later."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeGuard, TypeVar

from fastps._shared.checks import given, integer, invalid

__all__ = ["Search", "StrongWolfe", "Trial", "is_number"]

#: Growth of the trial step while the function falls: the minimum, the factor where the slope says nothing,
#: and the maximum.
_GROWTH = (1.2, 5.0, 10.0)
#: An interval that two steps leave longer than this share of it is bisected.
_SHRINK = 0.66
#: Where the cubic's minimum is nearer than this share of the interval to the secant step, the slope is nearly
#: straight, and the secant step suffers less from rounding.
_STRAIGHT = 1e-4
#: Trials whose decrease rounding hides that end a search.
_HIDDEN = 5


class Trial(NamedTuple):
    """The function on the line, at one step.

    Attributes:
        step: How far along the direction.
        fun: The function there; infinite or NaN where it is not defined.
        slope: Its derivative along the direction there.
    """

    step: float
    fun: float
    slope: float


_Result = TypeVar("_Result")
_Interval: TypeAlias = tuple[Trial, Trial]
#: Yields steps, gets the trials there, and returns a result.
_Steps: TypeAlias = Generator[float, Trial, _Result]


@dataclass(frozen=True)
class StrongWolfe:
    """Line search: the conditions for a good step (strong Wolfe) and the way to find one.

    A step `a` is accepted if ``f(a) <= f(0) + c1 a f'(0)`` and ``|f'(a)| <= c2 |f'(0)|``. Near a minimum,
    rounding hides the first condition: differences of f are smaller than its last digits. There, where
    ``|f(a) - f(0)| <= eps |f(0)|``, derivatives decide: ``f'(a) <= (2 c1 - 1) f'(0)`` takes its place
    (approximate Wolfe). Steps are bracketed and then found as in Hager and Zhang 2005
    (SIAM J. Optim. 16(1)), with the minimum of the cubic through two trials where it differs from their
    secant step on the derivative.

    Args:
        c1: Share of the decrease that the first derivative promises; 0 < c1 < 0.5.
        c2: Share of the slope that may remain; c1 < c2 < 1. None: what suits the method, 0.9, and 0.1 for
            conjugate gradients. A small value, such as 1e-3, searches nearly exactly.
        max_trials: Most trials of one search.

    Raises:
        ConfigError: An argument is out of range.

    >>> from fastps.optimize import StrongWolfe
    >>> f, slope = lambda x: (x - 3) ** 2, lambda x: 2 * (x - 3)
    >>> search = StrongWolfe(c2=0.1).begin(f(0), slope(0), first=1.0)
    >>> while (step := search.step) is not None:
    ...     search = search.tell(f(step), slope(step))
    >>> search.accepted, len(search.trials)
    (Trial(step=3.0, fun=0.0, slope=0.0), 2)
    """

    c1: float = 1e-4
    c2: float | None = None
    max_trials: int = 40

    def __post_init__(self) -> None:
        if not is_number(self.c1) or not 0 < self.c1 < 0.5:
            raise invalid("c1", "a number between 0 and 0.5", self.c1)
        if self.c2 is not None and (not is_number(self.c2) or not self.c1 < self.c2 < 1):
            raise invalid("c2", f"a number between c1={self.c1} and 1, or None", self.c2)
        given(self, "max_trials", integer("max_trials", self.max_trials, 1, 1000))

    def begin(self, fun: float, slope: float, first: float, eps: float = 1e-14) -> Search:
        """A search from a point with this function value and slope.

        Args:
            fun: f(0), finite.
            slope: f'(0), below 0.
            first: The first step to try, > 0.
            eps: Relative error of the function's values; 1e-14 suits float64, 1e-7 float32.
        """
        return Search(self, Trial(0.0, fun, slope), first, eps)

    def accepts(self, start: Trial, trial: Trial, eps: float) -> bool:
        """Returns whether the step is good enough."""
        steepness = -start.slope
        c2 = 0.9 if self.c2 is None else self.c2
        if not math.isfinite(trial.fun) or not abs(trial.slope) <= c2 * steepness:
            return False
        if trial.fun <= start.fun - self.c1 * trial.step * steepness:
            return True
        near = abs(trial.fun - start.fun) <= eps * abs(start.fun)
        return near and trial.slope <= (1 - 2 * self.c1) * steepness


@dataclass(frozen=True)
class Search:
    """A search along one line: what was asked and the trials so far. It is a value: `tell` returns the next.

    Attributes:
        rule: When a step is accepted.
        start: The point that the search starts from, at step 0.
        first: The first step.
        eps: Relative error of the function's values.
        trials: The evaluated trials, in order.
    """

    rule: StrongWolfe
    start: Trial
    first: float
    eps: float
    trials: tuple[Trial, ...] = ()

    @property
    def step(self) -> float | None:
        """The next step to evaluate; None: the search is over."""
        if self.accepted is not None or len(self.trials) >= self.rule.max_trials:
            return None
        if sum(map(self._is_near, self.trials)) >= _HIDDEN:
            return None
        steps = self._steps()
        step = next(steps)
        try:
            for trial in self.trials:
                step = steps.send(trial)
        except StopIteration:
            return None
        return step

    @property
    def accepted(self) -> Trial | None:
        """The trial that ended the search; None: none has been good enough so far."""
        if self.trials and self.rule.accepts(self.start, self.trials[-1], self.eps):
            return self.trials[-1]
        return None

    @property
    def best(self) -> Trial | None:
        """The accepted trial, or else the lowest of those below the start; None: there is none."""
        lower = [t for t in self.trials if t.fun < self.start.fun and math.isfinite(t.slope)]
        return self.accepted or min(lower, key=lambda trial: trial.fun, default=None)

    @property
    def is_hidden(self) -> bool:
        """True if the search ended without an accepted trial because rounding hides all lower points."""
        if self.step is not None or self.accepted is not None or not any(map(self._is_near, self.trials)):
            return False
        beyond = min((t for t in self.trials if not self._is_near(t)), key=lambda t: t.step, default=None)
        return beyond is None or beyond.slope >= 0  # else slope and function contradict each other

    def _is_near(self, trial: Trial) -> bool:
        """Returns whether the decrease that the initial slope promises is below the function's rounding."""
        return -self.start.slope * trial.step <= self.eps * abs(self.start.fun)

    def tell(self, fun: float, slope: float) -> Search:
        """The search with one more trial: the function and its slope at `step`."""
        step = self.step
        if step is None:
            raise ValueError("the search is over: it asks for no more trials")
        return replace(self, trials=(*self.trials, Trial(step, fun, slope)))

    # -- Hager and Zhang's procedure; it is run again from the start with each trial -------------------------

    def _steps(self) -> _Steps[None]:
        """The steps to evaluate; ends where the interval is as short as rounding allows."""
        low, high = yield from self._bracket()
        while high.step - low.step > 1e-15 * high.step:
            length = high.step - low.step
            low, high = yield from self._secant_twice(low, high)
            if high.step - low.step > _SHRINK * length:
                low, high = yield from self._update(low, high, 0.5 * (low.step + high.step))

    def _is_low(self, trial: Trial) -> bool:
        """Still falls, and is not above the start by more than rounding."""
        return trial.slope < 0 and trial.fun <= self.start.fun + self.eps * abs(self.start.fun)

    def _bracket(self) -> _Steps[_Interval]:
        """An interval whose left end is low and whose right end is not."""
        low, step = self.start, self.first
        while True:
            trial = yield step
            if not self._is_low(trial):
                return (low, trial) if trial.slope >= 0 else (yield from self._bisect(low, trial))
            low, step = trial, self._farther(low, trial)

    def _bisect(self, low: Trial, high: Trial) -> _Steps[_Interval]:
        """Shortens an interval whose right end is too high, but does not rise, until its right end rises."""
        while True:
            share = 0.5 if math.isfinite(high.fun) else 0.1  # far back from where f is not defined
            trial = yield low.step + share * (high.step - low.step)
            if self._is_low(trial):
                low = trial
            elif trial.slope >= 0:
                return low, trial
            else:
                high = trial

    def _update(self, low: Trial, high: Trial, step: float) -> _Steps[_Interval]:
        """The part of the interval, cut at a step, that has the minimum."""
        if not low.step < step < high.step:
            return low, high
        trial = yield step
        if self._is_low(trial):
            return trial, high
        return (low, trial) if trial.slope >= 0 else (yield from self._bisect(low, trial))

    def _secant_twice(self, low: Trial, high: Trial) -> _Steps[_Interval]:
        """The step to the minimum, and one from the same side as the end that it replaced."""
        step = self._minimum(low, high)
        new_low, new_high = yield from self._update(low, high, step)
        if step == new_high.step:
            step = self._minimum(high, new_high)
        elif step == new_low.step:
            step = self._minimum(low, new_low)
        else:
            return new_low, new_high
        return (yield from self._update(new_low, new_high, step))

    def _farther(self, before: Trial, trial: Trial) -> float:
        """A longer step, since the function still falls: where its minimum probably is."""
        least, usual, most = (times * trial.step for times in _GROWTH)
        step = self._minimum(before, trial)
        return min(max(step, least), most) if step > trial.step else usual

    def _minimum(self, a: Trial, b: Trial) -> float:
        """Returns the minimum of the cubic through both trials; a secant step where that is as good, or where
        the cubic or rounding hides the minimum.
        """
        secant, length = _secant(a, b), b.step - a.step
        rounding = self.eps * abs(self.start.fun)
        if not 10 * rounding <= abs(length) * max(abs(a.slope), abs(b.slope)):
            return secant
        middle = a.slope + b.slope - 3 * (b.fun - a.fun) / length
        scale = max(abs(middle), abs(a.slope), abs(b.slope))
        square = (middle / scale) ** 2 - (a.slope / scale) * (b.slope / scale) if scale else -1.0
        if not 0 <= square < math.inf:
            return secant
        root = math.copysign(scale * math.sqrt(square), length)
        below = b.slope - a.slope + 2 * root
        cubic = b.step - length * (b.slope + root - middle) / below if below else math.nan
        return secant if abs(cubic - secant) <= _STRAIGHT * abs(length) else cubic


def _secant(a: Trial, b: Trial) -> float:
    """Returns the zero of the line through both slopes; NaN if there is none."""
    rise = b.slope - a.slope
    return (a.step * b.slope - b.step * a.slope) / rise if rise != 0 else math.nan


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**1023)
