"""The form of values in messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fastps import _fastps

__all__ = [
    "ago",
    "counted",
    "hint",
    "meant",
    "nearest",
    "numbers",
    "printable",
    "quoted",
    "some",
    "table",
]


def printable(text: str) -> str:
    """One line of text for a terminal, with control and bidirectional characters as ``\\u001b``."""
    return _fastps.printable(_utf8(text))


def ago(seconds: float | None) -> str:
    """A time in the past, such as ``3 h ago``; ``-`` if it is not known."""
    if seconds is None:
        return "-"
    for limit, unit in [(60, "s"), (60, "min"), (24, "h")]:
        if seconds < limit:
            return f"{seconds:.0f} {unit} ago"
        seconds /= limit
    return f"{seconds:.0f} d ago"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Returns the name that a misspelt one most likely means, ignoring case; None if there is none."""
    known = {_utf8(known): known for known in names}
    near = _fastps.nearest(_utf8(name), list(known))
    return None if near is None else known[near]


def _utf8(text: str) -> str:
    """The text, with ``\\ud800`` in place of a half of a surrogate pair, which UTF-8 cannot have."""
    return text.encode("utf-8", "backslashreplace").decode()


def hint(name: str, names: Iterable[str], form: str = '"{}"') -> str | None:
    """The advice of an error about an unknown name: the nearest one, if there is one."""
    near = nearest(name, names)
    return None if near is None else f"did you mean {form.format(near)}?"


def meant(name: str, names: Iterable[str], form: str = '"{}"') -> str:
    """The end of an error about an unknown name: the nearest one, or nothing."""
    advice = hint(name, names, form)
    return "" if advice is None else f"; {advice}"


def counted(number: int, what: str) -> str:
    """A number of things, such as ``1 shard`` or ``3 shards``."""
    return f"{number} {what}{'s' * (number != 1)}"


def numbers(values: Iterable[int]) -> str:
    """Numbers in a row, such as ``3, 4``; ``none`` if there are none."""
    return ", ".join(map(str, values)) or "none"


def quoted(names: Iterable[str]) -> str:
    """Names in quotes, such as ``"a", "b"``; ``none`` if there are none."""
    return ", ".join(f'"{printable(name)}"' for name in names) or "none"


def some(names: Iterable[str], most: int = 3) -> str:
    """The first names in quotes and the number of the others, such as ``"a", "b", "c" and 7 more``."""
    listed = list(names)
    more = len(listed) - most
    return quoted(listed[:most]) + (f" and {more} more" if more > 0 else "")


def table(title: str, rows: Mapping[str, object]) -> str:
    """An HTML table for notebooks, escaped."""
    from html import escape  # needed only in notebooks

    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items()
    )
    return f"<table><caption>{escape(title)}</caption>{cells}</table>"
