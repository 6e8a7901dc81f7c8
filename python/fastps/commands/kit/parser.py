"""A parser of arguments whose errors name the nearest word."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from fastps._fastps import without_secrets
from fastps._shared.text import meant

__all__ = ["Parser"]

#: A value that the function of an option cannot read as a number.
_NO_NUMBER = re.compile(r"argument ([^\s/:]+)\S*: invalid (?:_\w+|int|float) value: '(.*)'$")
_CHOICES = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser`, also for subcommands, which report their own unknown options."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for option in self._option_string_actions if option.startswith("--")]
            name = unknown[0].partition("=")[0]
            hint = meant(name, options, "{}") if name.startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        choice = _CHOICES.search(message)
        if choice is not None:
            message += meant(choice[1], re.findall(r"[\w-]+", choice[2]), "{}")
        if (wrong := _NO_NUMBER.search(message)) is not None:
            option, text = wrong.groups()
            message = f"{option} takes a number, got {text!r}"
            if text.endswith(".py"):
                message += f"; write {option} 2 {text}"
        super().error(without_secrets(message))
