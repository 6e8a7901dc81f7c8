"""The ``examples`` subcommand: lists the examples of the package, and copies them into a folder."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from fastps._shared.process import EXIT_OK, CommandError
from fastps._shared.text import counted

__all__ = ["Example", "add_arguments", "examples", "execute"]

_FOLDER = Path(__file__).resolve().parents[1] / "examples"
"""In the repository a link to its folder ``examples``, whose files pyproject.toml puts into wheels."""


class Example(NamedTuple):
    """One file of the folder."""

    name: str
    summary: str
    extras: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help="copy all examples into this folder",
    )


def execute(args: argparse.Namespace) -> int:
    """Lists the examples, or copies them."""
    found = examples()
    if args.to is not None:
        _copy(found, args.to)
        print(f"copied {counted(len(found), 'example')} to {args.to}")
        return EXIT_OK
    for example in found:
        needs = f" (fastps[{','.join(example.extras)}])" if example.extras else ""
        print(f"{example.name}{needs}\n    {example.summary}")
    print("\nfastps examples --to examples copies them. In brackets: the extras to install.")
    return EXIT_OK


def examples() -> list[Example]:
    """All examples, by name."""
    patterns = ("*.py", "engines/*.py", "engines/*.sbatch", "notebooks/*.ipynb")
    paths = sorted(path for pattern in patterns for path in _FOLDER.glob(pattern))
    return [_example(path) for path in paths]


def _example(path: Path) -> Example:
    text = _description(path)
    needs = re.search(r"^Needs (?:no extra|the extras? ([\w, ]+))\.$", text, re.MULTILINE)
    if needs is None:
        raise CommandError(f"{path} does not say which extra it needs")
    extras = re.split(r", | and ", needs[1]) if needs[1] else []
    return Example(path.relative_to(_FOLDER).as_posix(), text.splitlines()[0].lstrip("# "), tuple(extras))


def _description(path: Path) -> str:
    """The docstring of a script, the first cell of a notebook, the comments of a batch script."""
    if path.suffix == ".sbatch":
        return "\n".join(re.findall(r"^#(?:$| (.*)$)", path.read_text(), re.MULTILINE))
    if path.suffix == ".ipynb":
        return "".join(json.loads(path.read_text())["cells"][0]["source"])
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def _copy(found: list[Example], folder: Path) -> None:
    """Copies the files; changes nothing if one of them would replace a different file."""
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"--to {folder} is no folder: choose another one")
    for example in found:
        target = folder / example.name
        if target.exists() and target.read_bytes() != (_FOLDER / example.name).read_bytes():
            raise CommandError(f"{target} differs from the example: remove it, or choose another folder")
    for example in found:
        target = folder / example.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_FOLDER / example.name, target)
