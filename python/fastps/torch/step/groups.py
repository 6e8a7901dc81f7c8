"""Checks of parameter groups."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any

from fastps import optim
from fastps._shared.checks import invalid
from fastps._shared.text import quoted
from fastps.torch._params import settings_of

__all__ = ["check_group"]

#: Keys of a parameter group that are no settings: its parameters, its name, what schedulers keep there (and
#: timm's factor on the rate), and how torch's optimizers compute.
_NO_SETTINGS = {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "swa_lr"}
_NO_SETTINGS |= {"base_momentum", "max_momentum", "lr_scale", "foreach", "fused"}


def check_group(group: Mapping[str, Any], defaults: Mapping[str, Any], optimizer: optim.Optimizer) -> None:
    """Raises `ConfigError` if a group has an unknown key, or asks for AdamW of Adam or the reverse."""
    for key in sorted(group.keys() - defaults.keys() - _NO_SETTINGS):
        settings = sorted(defaults)
        advice = f'the nearest is "{max(settings, key=functools.partial(_likeness, key))}"'
        raise invalid("key of a parameter group", f"one of {quoted(settings)}", key, advice)
    own = settings_of(optimizer).get("decoupled_weight_decay")
    asked = group.get("decoupled_weight_decay", own)
    if own is not None and asked != own:
        other = "Adam" if own else "AdamW"
        raise invalid("decoupled_weight_decay", f"{own}; fastps.{other} is the other rule", asked)


def _likeness(key: str, setting: str) -> float:
    """Similarity of a parameter group's key to a setting, from 0 to 1."""
    return difflib.SequenceMatcher(None, key.lower(), setting).ratio()
