"""Definition of a figure: its measurement, its table of numbers, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastps_lab.repro.claim import Setting, Verdict
from fastps_lab.repro.figures.costs.costs import Costs

__all__ = ["VERSION", "Each", "Figure", "Numbers", "Run"]

#: Version of the files of results. Raise it when a figure measures or judges something else.
VERSION = 1

#: Numbers of a figure, in the types of JSON: ``settings`` and ``seeds`` describe its runs.
Numbers = dict[str, Any]


class Each(Protocol):
    """Calls a function of a module with each of some arguments, in processes; the results in their order."""

    def __call__(self, function: Callable[[Any], Any], arguments: Iterable[Any]) -> list[Any]: ...


@dataclass(frozen=True)
class Run:
    """Everything that a measurement depends on.

    Attributes:
        setting: Form, seed and folder of data sets.
        costs: Measured times, which virtual runs read.
        each: Runs a function for many arguments.
        earlier: Numbers of the figures that this one uses, by name.
        kept: Folder in which long runs keep their state, and continue from; None: they keep nothing.
    """

    setting: Setting
    costs: Costs
    each: Each
    earlier: dict[str, Numbers] = field(default_factory=dict)
    kept: str | None = None


@dataclass(frozen=True)
class Figure:
    """A figure of a paper, or one that its text asks for.

    Attributes:
        name: Name on the command line, and of its files.
        title: Subject of the picture, in a sentence.
        source: Paper and number of the figure.
        differs: Differences from the paper.
        threshold: Condition that the judge checks, in words.
        measure: Measures the numbers.
        judge: Judges the numbers: False if a part of the product is broken.
        caption: Results in words; where the paper's order does not come out, it says so.
        rows: Numbers as the rows of a table, whose first one has the names of the columns.
        draw: Draws the numbers.
        minutes: Estimated minutes of one process for the quick and for the full form.
        uses: Figures whose numbers this one draws.
        needs: Data sets of the full form.
        packages: Packages that it needs besides NumPy and Matplotlib, by pip's names.
        forms: Forms that it has.
    """

    name: str
    title: str
    source: str
    differs: str
    threshold: str
    measure: Callable[[Run], Numbers]
    judge: Callable[[Numbers], Verdict]
    caption: Callable[[Numbers], str]
    rows: Callable[[Numbers], Iterable[Sequence[Any]]]
    draw: Callable[[Numbers, Any], None]
    minutes: tuple[float, float]
    uses: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    forms: tuple[str, ...] = ("quick", "full")
