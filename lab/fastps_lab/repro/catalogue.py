"""All claims and figures: those of the modules in `claims/` and `figures/`."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from fastps.commands.kit import CommandError, meant
from fastps_lab.repro import claims, figures
from fastps_lab.repro.claim import Claim

__all__ = ["CLAIMS", "FIGURES", "find"]


def _of(package: ModuleType) -> dict[str, Claim]:
    names = (found.name for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))
    modules = map(importlib.import_module, names)
    return {claim.name: claim for module in modules for claim in getattr(module, "CLAIMS", ())}


CLAIMS, FIGURES = _of(claims), _of(figures)


def find(names: list[str], quick: bool) -> list[Claim]:
    """The claims of these names, or for ``["all"]`` those of a form, without those apart; before each one
    those that it uses. After ``figures`` the names are those of figures.

    Raises:
        CommandError: There is none of a name.
    """
    known, kind, shown = CLAIMS, "claim", "fastps-lab repro list"
    if names[0] == "figures":
        known, kind, shown = FIGURES, "figure", "fastps-lab repro figures list"
        names = names[1:] or ["all"]
    short = {name.removeprefix("figures/"): claim for name, claim in known.items()}
    if names == ["all"]:
        forms = ("both", "quick" if quick else "full")
        names = [name for name, claim in short.items() if claim.forms in forms]
    if unknown := [name for name in names if name not in short]:
        hint = meant(unknown[0], short, "{}")
        raise CommandError(f"no {kind} {unknown[0]!r}; {shown} shows all names{hint}")
    wanted = dict.fromkeys(each for name in names for each in (*short[name].uses, short[name].name))
    return [known[name] for name in wanted]
