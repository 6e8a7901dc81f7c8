"""All figures, in the order in which they are drawn."""

from __future__ import annotations

from fastps_lab.repro.figures import accuracy, asynchrony, convnets, hogwild, parts, toys
from fastps_lab.repro.figures.figure import Figure

__all__ = ["FIGURES", "select"]

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for module in (toys, accuracy, convnets, parts, hogwild, asynchrony)
    for figure in module.FIGURES
}


def select(names: list[str], form: str) -> list[Figure]:
    """The figures of these names, or all that have the form; before each one those that it uses.

    Raises:
        KeyError: There is no figure of a name.
    """
    wanted = [FIGURES[name] for name in names] or [f for f in FIGURES.values() if form in f.forms]
    chosen = {figure.name for figure in wanted} | {name for figure in wanted for name in figure.uses}
    return [figure for figure in FIGURES.values() if figure.name in chosen]
