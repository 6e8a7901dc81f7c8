"""For tests that loop over cases: the error of a failing one names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*name: object) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {', '.join(map(str, name))}")
        raise
