"""Prepares the docstrings of the API reference; a griffe extension that mkdocs.yml names.

The docstrings of compiled classes come from where PyO3 takes them, the doc comments of the Rust source, and
their types from the stub `_fastps.pyi`, so the site is built without the extension module. In all docstrings,
doctest examples become code blocks, and names such as `fastps.Store` become links.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

SOURCES = Path(__file__).resolve().parent.parent / "rust/python/src"

# A doc comment, other attributes, and `#[pyclass(..., module = "fastps", name = "Sparse")] struct ...`.
_CLASS = re.compile(
    r'((?:^///.*\n)+)(?:^#\[.*\]\n)*?^#\[pyclass\([^\]]*module = "fastps", name = "(\w+)"[^\]]*\)\]\n'
    r"(?:^#\[.*\]\n)*^pub(?:\([^)]*\))? struct (\w+)",
    re.MULTILINE,
)
_METHODS = re.compile(r"^#\[pymethods\]\nimpl (\w+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_METHOD = re.compile(
    r"((?:^    ///.*\n)+)(?:^    #\[.*\]\n)*^    (?:pub(?:\([^)]*\))? )?fn (\w+)", re.MULTILINE
)
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
_NAME = re.compile(r"(?<!`)`(fastps(?:\.\w+)+)`(?!`)")


def _text(comment: str) -> str:
    return "\n".join(re.sub(r"^ */// ?", "", line) for line in comment.splitlines())


def docstrings() -> dict[str, str]:
    """The docstrings of public compiled classes and their methods, by name (`Sparse`, `InDoubt.result`)."""
    found = {}
    for path in sorted(SOURCES.rglob("*.rs")):
        source = path.read_text()
        public = {struct: name for _, name, struct in _CLASS.findall(source)}
        found |= {name: _text(comment) for comment, name, _ in _CLASS.findall(source)}
        for struct, body in _METHODS.findall(source):
            methods = _METHOD.findall(body) if struct in public else []
            found |= {f"{public[struct]}.{name}": _text(comment) for comment, name in methods}
    return found


def _prepare(text: str) -> str:
    def example(found: re.Match[str]) -> str:
        return "Examples:\n" + "\n".join(f"    {line}" for line in found[0].splitlines())

    def link(found: re.Match[str]) -> str:
        return f'<autoref identifier="{found[1]}" optional><code>{found[1]}</code></autoref>'

    parts = _EXAMPLE.split(text)
    examples = [example(found) for found in _EXAMPLE.finditer(text)]
    prose = [_NAME.sub(link, part) for part in parts]
    return "".join(part for pair in zip(prose, [*examples, ""], strict=True) for part in pair)


def _walk(obj: griffe.Object) -> None:
    if obj.docstring and obj.docstring.value.startswith("Internal:"):
        obj.docstring = None  # used inside the package, and not part of the reference
    if obj.docstring:
        obj.docstring.value = _prepare(obj.docstring.value)
    for member in obj.members.values():
        if not member.is_alias:
            _walk(member)


class ApiDocstrings(griffe.Extension):
    """Fills in and prepares docstrings once the package is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        native = pkg["_fastps"]
        for name, text in docstrings().items():
            owner, _, method = name.rpartition(".")
            if not owner or method in native[owner].members:
                native[name].docstring = griffe.Docstring(text, parent=native[name])
            if not owner and "__new__" in native[name].members:
                native[name].members["__init__"] = native[name].members.pop("__new__")
        _walk(pkg)
