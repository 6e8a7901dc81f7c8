"""Definition of a claim or figure: its measurement, the condition under which it holds, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from fastps_lab.repro.costs.costs import Costs, read_costs
from fastps_lab.repro.tasks import Task, task

__all__ = ["Claim", "Figures", "Forms", "Setting", "Verdict", "row"]

#: Measured figures, in the types of JSON. Those of a claim with a table have ``settings`` and ``seeds``.
Figures = dict[str, Any]
Forms = Literal["both", "quick", "full", "apart"]


def here(function: Callable[[Any], Any], arguments: Iterable[Any]) -> list[Any]:
    """Calls a function with each of some arguments in this process."""
    return [function(argument) for argument in arguments]


@dataclass(frozen=True)
class Setting:
    """Everything that a measurement depends on.

    Attributes:
        quick: On the digits in the package, with few runs.
        seed: Seeds of runs are the integers that follow it.
        dataset_dir: Folder of data sets, such as ``mnist/``; only the full form needs it.
        costs: Measured times, which virtual runs read.
        each: Calls a function of a module with each of some arguments; the results in their order. For a
            claim that `spreads`, processes do it.
        earlier: Figures of the claims that this one uses, by name.
        kept: Folder in which long runs keep their state, and continue from; None: they keep nothing.
    """

    quick: bool
    seed: int = 0
    dataset_dir: str | None = None
    costs: Costs = field(default_factory=read_costs)
    each: Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]] = here
    earlier: dict[str, Figures] = field(default_factory=dict)
    kept: str | None = None

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
    """A claim of a paper, or of ours, that a command can check; or a figure of a paper, with its table.

    Attributes:
        name: Name on the command line, and of its files; that of a figure begins with ``figures/``.
        says: The claim, or the subject of the figure, in a sentence.
        source: Source of the claim.
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
        note: Further information for the reader; of a figure, its differences from the paper.
        paper: The source's figure.
        rows: Figures as the rows of a table, whose first one has the names of the columns.
        caption: Results in words; where the paper's order does not come out, it says so.
        minutes: Estimated minutes of one process for the quick and for the full form.
        uses: Claims whose figures this one reads.
        spreads: Whether its measurement spreads its runs over processes, with `Setting.each`; if not, one
            process measures it, beside others.
    """

    name: str
    says: str
    source: str
    threshold: str
    measure: Callable[[Setting], Figures]
    judge: Callable[[Figures], Verdict]
    draw: Callable[[Figures, Any], None] | None = None
    forms: Forms = "both"
    needs: tuple[str, ...] = ("mnist",)
    packages: tuple[str, ...] = ()
    clock: Literal["virtual", "wall"] | None = "virtual"
    repeats: bool = True
    reproduces: bool = True
    note: str = ""
    paper: str = "-"
    rows: Callable[[Figures], Iterable[Sequence[Any]]] | None = None
    caption: Callable[[Figures], str] = lambda _: ""
    minutes: tuple[float, float] = (0.0, 0.0)
    uses: tuple[str, ...] = ()
    spreads: bool = False


def row(values: Any, digits: int = 3) -> str:
    """Numbers, separated by commas."""
    return ", ".join(f"{value:.{digits}g}" for value in values)
