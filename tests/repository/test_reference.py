"""The reference pages of errors and commands agree with the code.

FASTPS_REGENERATE=1 rewrites the page of the commands.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
from pathlib import Path

import pytest

import commands_page
import fastps
from fastps.commands import cli

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("fastps.errors", "fastps.rl", "fastps.simulate", "fastps.torch.parallel")


def errors() -> dict[str, type]:
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    public = [
        getattr(module, name) for module in map(importlib.import_module, MODULES) for name in module.__all__
    ]
    return {one.__name__: one for one in public if inspect.isclass(one) and issubclass(one, Exception)}


def test_each_error_has_cause_and_cure() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text()
    _, *sections = page.split("\n## ")
    known = errors()
    assert [section.partition("\n")[0] for section in sections] == sorted(known)
    for section in sections:
        form = r"(\w+)\n\n(?:Is also a `(\w+)`\.\n\n)?\*\*Cause:\*\* .+\n\n\*\*Cure:\*\* .+\n?"
        name, also = re.fullmatch(form, section).groups()
        plain = [base for base in known[name].__mro__ if base.__module__ == "builtins"]
        assert plain[0] is (getattr(builtins, also) if also else Exception), name


def test_every_error_of_the_package_is_public() -> None:
    """Also one in a module without a page."""
    found = {
        name for name, one in vars(fastps).items() if inspect.isclass(one) and issubclass(one, Exception)
    }
    assert found <= set(errors())


def test_each_command_has_its_help() -> None:
    commands_page.check(cli.all_commands())
