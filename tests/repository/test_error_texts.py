"""An error composes its text: no call of one repeats its fields in the message."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"tensor", "expected", "got"}
REPEATED = re.compile(r"\bexpected .*, got |\(tensor\b", re.DOTALL)


def text_of(message: ast.expr, scope: ast.AST) -> str:
    """The literal parts of a message, and of what is assigned to its variables in this function."""
    nodes = list(ast.walk(message))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and any(getattr(t, "id", None) in names for t in node.targets):
            nodes += ast.walk(node.value)
    return "".join(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))


def repeating(source: str) -> set[int]:
    """Lines of the calls with fields of an error whose message has the fields, too."""
    found = set()
    for scope in ast.walk(ast.parse(source)):
        if not isinstance(scope, (ast.Module, ast.FunctionDef)):
            continue
        for call in ast.walk(scope):
            if not isinstance(call, ast.Call) or not FIELDS & {keyword.arg for keyword in call.keywords}:
                continue
            where = scope if isinstance(scope, ast.FunctionDef) else call
            if any(REPEATED.search(text_of(message, where)) for message in call.args[:1]):
                found.add(call.lineno)
    return found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('raise ShapeError("wrong shape", tensor=name, expected="(2,)", got=got)', set()),
        ("raise ShapeError(f'wrong shape (tensor \"{name}\")', tensor=name)", {1}),
        ('raise ConfigError(f"bad: expected {a}, got {b}", expected=a, got=b)', {1}),
        ('raise errors.StalePush("bad: expected a, " f"got {b}", expected="a", got=b)', {1}),
        ('raise CommandError(f"bad: expected {a}, got {b}")', set()),
        ('def f(kind):\n    text = f"bad: expected {a}, got {b}"\n    return kind(text, got=b)', {3}),
    ],
)
def test_the_check_sees_a_call_that_repeats_its_fields(source: str, lines: set[int]) -> None:
    assert repeating(source) == lines


def test_no_error_repeats_its_fields_in_its_message() -> None:
    files = sorted((ROOT / "python/fastps").rglob("*.py"))
    assert len(files) > 200
    found = {str(path.relative_to(ROOT)): lines for path in files if (lines := repeating(path.read_text()))}
    assert not found
