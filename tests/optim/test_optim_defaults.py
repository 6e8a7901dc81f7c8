"""The settings of Python's optimizers, their order and defaults, are those of core's tables."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import fastps

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "rust" / "core" / "src" / "kernel" / "optim"
# The struct of each optimizer in core; AdamW differs from Adam in one default.
STRUCTS = {"SGD": "Sgd", "RMSprop": "Rmsprop", "AdamW": "Adam", "ScheduleFreeSGD": "ScheduleFreeSgd"}


def core_settings(struct: str) -> dict[str, object]:
    """Names and defaults from the struct's `settings!` list, in order; beta1 and beta2 are one pair."""
    (source,) = [
        text for path in FOLDER.glob("*.rs") if f"pub struct {struct} {{" in (text := path.read_text())
    ]
    body = source.split(f"pub struct {struct} {{")[1].split("\n    }")[0]
    found: dict[str, object] = {}
    for name, kind, default in re.findall(r"^ +(\w+): (\w+) = ([^;,]+)[;,]", body, re.MULTILINE):
        if kind == "EpsMode":
            found[name] = default.removeprefix("EpsMode::").lower()
        elif name in ("beta1", "beta2"):
            found["betas"] = (*found.get("betas", ()), ast.literal_eval(default))  # type: ignore[misc]
        else:
            found[name] = ast.literal_eval(default.capitalize() if kind == "bool" else default)
    return found


@pytest.mark.parametrize("optimizer", fastps.optim.Optimizer.__subclasses__(), ids=lambda o: o.__name__)
def test_settings_and_defaults_are_those_of_core(optimizer: type[fastps.optim.Optimizer]) -> None:
    core = core_settings(STRUCTS.get(optimizer.__name__, optimizer.__name__))
    if optimizer is fastps.AdamW:
        (decay,) = re.findall(r"Self\(Adam \{ weight_decay: ([^,]+), ", (FOLDER / "adam.rs").read_text())
        core["weight_decay"] = ast.literal_eval(decay)
    python = {field.name: field.default for field in dataclasses.fields(optimizer)}
    assert python == core
