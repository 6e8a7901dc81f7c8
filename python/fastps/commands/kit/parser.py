"""A parser of arguments whose errors name the nearest word, and an option that several commands have."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from fastps._fastps import without_secrets
from fastps._shared.text import meant

__all__ = ["Parser", "add_dataset_dir"]

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
        super().error(without_secrets(message))


class _Renamed(argparse.Action):
    """An old spelling of an option: says so, and sets the value of the new one, its `const`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        print(f"fastps: {option_string} is deprecated; use {self.const}", file=sys.stderr)
        setattr(namespace, self.dest, values)


class _Options(Protocol):
    """A parser or a group of its options."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action: ...


def add_dataset_dir(parser: _Options, meaning: str) -> None:
    """Adds ``--dataset-dir``, the folder of a data set's files, and its old spelling."""
    parser.add_argument("--dataset-dir", metavar="DIR", help=meaning)
    parser.add_argument(
        "--data-dir",
        dest="dataset_dir",
        action=_Renamed,
        const="--dataset-dir",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )
