"""A row of the GPU check: a measurement that runs in its own process, and its table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

#: Figures of a row, as JSON has them.
Figures = dict[str, Any]


class Setting(NamedTuple):
    """Sizes and data for a row."""

    #: Sizes of the rehearsal, which takes a second or two for each row, on two cores.
    small: bool
    #: The images of CIFAR-10, as `make gpu-check` writes them; None: there are none.
    images: Path | None = None


class Row(NamedTuple):
    """A measurement.

    `measure` raises `Skipped` if the machine lacks what it needs; any other exception fails only this
    row.
    """

    name: str
    measure: Callable[[Setting], Figures]
    #: Lines of Markdown.
    show: Callable[[Figures], list[str]]
    #: Seconds after which its process is killed.
    limit: float


class Skipped(Exception):  # noqa: N818
    """The reason why a row cannot run on this machine."""
