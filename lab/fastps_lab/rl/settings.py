"""The settings of ``fastps-lab rl``: one table for ``--set``, the help and the guide."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fastps.commands.kit import CommandError, meant
from fastps.rl.a3c import A3C
from fastps.rl.algorithm import Algorithm
from fastps.rl.cem import CEM
from fastps.rl.evolution import EvolutionStrategies
from fastps.rl.gorila import Gorila
from fastps.rl.naive import Naive
from fastps.rl.trpo import TRPO

__all__ = ["ALGORITHMS", "Setting", "defaults", "listing", "parsed", "rows", "settings_of", "summary"]

#: The algorithms by name, with the settings that the command starts from.
ALGORITHMS: dict[str, Algorithm] = {
    "naive": Naive(),
    "a3c": A3C(steps=20),
    "trpo": TRPO(),
    "es": EvolutionStrategies(),
    "cem": CEM(),
    "gorila": Gorila(),
}

#: Fields that decide which processes start: options of their own set them.
_PROCESSES = {"workers": "--workers", "replay": "--replay", "role": "--role", "actors": "--actors"}
#: What `inspect.getdoc` leaves of an argument of a docstring: its names, and its text, which may continue.
_ARGUMENT = re.compile(r"^    ((?:\w+, )*\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


class Setting(NamedTuple):
    """A setting of an algorithm.

    Attributes:
        kind: Type of its field, such as ``int`` or ``float | None``.
        default: Value unless it is set.
        text: Meaning and range, from the algorithm's docstring.
    """

    name: str
    kind: Any
    default: Any
    text: str


def settings_of(algorithm: str) -> dict[str, Setting]:
    """The settings of an algorithm by name, in the order of its fields."""
    of = ALGORITHMS[algorithm]
    hints, texts = get_type_hints(type(of)), dict(_texts(type(of)))
    names = [field.name for field in dataclasses.fields(of) if field.name not in _PROCESSES]
    return {name: Setting(name, hints[name], getattr(of, name), texts[name]) for name in names}


def _texts(kind: type[Algorithm]) -> Iterator[tuple[str, str]]:
    """The meanings of an algorithm's arguments."""
    _, _, arguments = (inspect.getdoc(kind) or "").partition("Args:\n")
    for names, text in _ARGUMENT.findall(arguments.partition("\n\n")[0]):
        plain = " ".join(text.replace("`", "").split()).rstrip(".")
        yield from ((name, plain) for name in names.split(", "))


def parsed(algorithm: str, given: Iterable[str]) -> dict[str, Any]:
    """The values of settings that were given as ``NAME=VALUE``.

    Raises:
        CommandError: There is no such setting; a value has another type; or a name is given twice.
    """
    known, chosen = settings_of(algorithm), dict[str, Any]()
    for text in given:
        name, equals, value = text.partition("=")
        if name in _PROCESSES:
            raise CommandError(f"--set {text}: use {_PROCESSES[name]} instead")
        if name not in known:
            names = ", ".join(known)
            raise CommandError(f"--set {text}: {algorithm} has only {names}{meant(name, known, '{}')}")
        if not equals:
            raise CommandError(f"--set {text}: give a value, such as {name}={_shown(known[name].default)}")
        if name in chosen:
            raise CommandError(f"--set {name} is given twice")
        chosen[name] = _value(known[name], text, value)
    return chosen


def _value(setting: Setting, given: str, text: str) -> Any:
    """A value of a setting's type; the algorithm checks its range."""
    kinds = _alternatives(setting.kind)
    if type(None) in kinds and text == "none":
        return None
    if bool in kinds:
        if text not in ("true", "false"):
            raise CommandError(f"--set {given}: expected true or false")
        return text == "true"
    for kind, expected in ((int, "an integer"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                more = ", or none" if type(None) in kinds else ""
                raise CommandError(f"--set {given}: expected {expected}{more}") from None
    return text


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or a type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _shown(value: Any) -> str:
    """A value as ``--set`` takes it."""
    words = {None: "none", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return str(value) if isinstance(value, (int, str)) else f"{value:g}"


def defaults(name: str, *algorithms: str) -> str:
    """The defaults of a setting that several algorithms have, such as ``80, 20, 2``."""
    return ", ".join(_shown(settings_of(algorithm)[name].default) for algorithm in algorithms)


def summary(algorithm: str) -> str:
    """The settings of an algorithm and their defaults, in one line."""
    return ", ".join(f"{one.name}={_shown(one.default)}" for one in settings_of(algorithm).values())


def listing(algorithm: str) -> str:
    """What ``--set help`` prints: every setting, its default, and its meaning."""
    found = [(f"{one.name}={_shown(one.default)}", _meaning(one)) for one in settings_of(algorithm).values()]
    width = max(len(shown) for shown, _ in found)
    return "\n".join(f"{shown:<{width}}  {text}" for shown, text in found)


def rows() -> list[list[str]]:
    """The settings of all algorithms as rows of a table: algorithm, setting, default, meaning."""
    return [
        [f"`{algorithm}`", f"`{one.name}`", f"`{_shown(one.default)}`", _meaning(one)]
        for algorithm in ALGORITHMS
        for one in settings_of(algorithm).values()
    ]


def _meaning(setting: Setting) -> str:
    """Meaning of a setting, with the values of one that has only some."""
    words = [
        word for kind in _alternatives(setting.kind) if get_origin(kind) is Literal for word in get_args(kind)
    ]
    named = all(word in setting.text for word in words)
    return setting.text if named else f"{setting.text} ({', '.join(words)})"
