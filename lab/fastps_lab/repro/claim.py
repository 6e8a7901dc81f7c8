"""Definition of a claim: its measurement, the condition under which it holds, and its picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fastps_lab.repro.tasks import Task, task

__all__ = ["Claim", "Figures", "Setting", "Verdict", "row"]

#: Measured figures, in the types of JSON.
Figures = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Settings of a run of claims.

    Attributes:
        quick: On the digits in the package, with few runs.
        seed: Seeds of runs are the integers that follow it.
        dataset_dir: Folder of data sets, such as ``mnist/``; only the full form needs it.
    """

    quick: bool
    seed: int = 0
    dataset_dir: str | None = None

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
        return task("mnist", f"{self.dataset_dir}/mnist")

    def seeds(self, runs: int) -> list[int]:
        """Seeds of this many runs."""
        return [self.seed + k for k in range(1, runs + 1)]


class Verdict(NamedTuple):
    """Verdict on a claim (None: it could not be measured), and the measured figures in words."""

    holds: bool | None
    measured: str


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, or of ours, that a command can check.

    Attributes:
        name: Name on the command line.
        says: The claim in a sentence.
        source: Source of the claim.
        paper: The source's figure.
        threshold: Condition under which it holds, in words.
        measure: Measures the figures.
        judge: Judges the figures of `measure`.
        draw: Draws the figures; None: there is no picture.
        forms: ``"both"``; ``"quick"`` or ``"full"`` if there is only one; ``"apart"``: a long full form that
            ``all`` leaves out.
        needs: Data sets of the full form.
        packages: Packages that the full form needs besides NumPy, by pip's names.
        clock: ``"virtual"``; ``"wall"`` if times are real ones; None if there are no times.
        repeats: Whether two runs on one machine print the same digits; real threads and processes do not.
        reproduces: Whether it is known to hold. If not, a run in which it does not hold reports it as not
            reproduced, with its figures, and does not fail.
        note: Further information for the reader.
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
