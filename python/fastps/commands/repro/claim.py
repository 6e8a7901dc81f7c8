"""What a claim is: how it is measured, when it holds, and its picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fastps.commands.repro.tasks import Task, task

__all__ = ["Claim", "Figures", "Setting", "Verdict", "row"]

#: What was measured, as JSON has it.
Figures = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """How claims are run.

    Attributes:
        quick: On the digits in the package, with few runs.
        seed: Seeds of runs are the integers that follow it.
        data_dir: Folder of data sets, such as ``mnist/``; only the full form needs it.
    """

    quick: bool
    seed: int = 0
    data_dir: str | None = None

    @property
    def task(self) -> Task:
        """The net that this form trains."""
        return self.digits if self.quick else self.mnist

    @property
    def digits(self) -> Task:
        """The net on the digits in the package."""
        return task("digits")

    @property
    def mnist(self) -> Task:
        """The net on MNIST."""
        return task("mnist", f"{self.data_dir}/mnist")

    def seeds(self, runs: int) -> list[int]:
        """Seeds of this many runs."""
        return [self.seed + k for k in range(1, runs + 1)]


class Verdict(NamedTuple):
    """Whether a claim holds, and the measured figures in words; None: it could not be measured."""

    holds: bool | None
    measured: str


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, or of ours, that a command can check.

    Attributes:
        name: What the command line calls it.
        says: The claim in a sentence.
        source: Who claims it.
        paper: The source's figure.
        threshold: When it holds, in words.
        measure: Runs it.
        judge: Decides by the figures that `measure` returned.
        draw: Draws the figures; None: there is no picture.
        forms: ``"both"``; ``"quick"`` or ``"full"`` if there is only one; ``"apart"``: a full form that takes
            so long that ``all`` leaves it out.
        needs: Data sets of the full form.
        packages: What the full form needs besides NumPy, by the names that pip knows.
        clock: ``"virtual"``; ``"wall"`` if times are real ones; None if there are no times.
        repeats: Whether two runs on one machine print the same digits; real threads and processes do not.
        reproduces: Whether it is known to hold. If not, a run in which it does not hold reports it as not
            reproduced, with its figures, and does not fail.
        note: What the reader should know besides.
    """

    name: str
    says: str
    source: str
    paper: str
    threshold: str
    measure: Callable[[Setting], Figures]
    judge: Callable[[Figures], Verdict]
    draw: Callable[[Figures, Any], None] | None = None
    forms: Literal["both", "quick", "full", "apart"] = "both"
    needs: tuple[str, ...] = ("mnist",)
    packages: tuple[str, ...] = ()
    clock: Literal["virtual", "wall"] | None = "virtual"
    repeats: bool = True
    reproduces: bool = True
    note: str = ""


def row(values: Any, digits: int = 3) -> str:
    """Numbers, separated by commas."""
    return ", ".join(f"{value:.{digits}g}" for value in values)
