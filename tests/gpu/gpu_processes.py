"""Processes of a check: forked in a rehearsal, where it is quick; spawned on a GPU, which forbids forks."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

from pretended_gpu import REHEARSAL

CONTEXT = multiprocessing.get_context("fork" if REHEARSAL else "spawn")


def _run(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise


class Child:
    """``function(*arguments)`` of a module in its own process."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_run, args=(theirs, function, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def result(self, timeout: float) -> Any:
        """Its result; raises `AssertionError` with its traceback if it failed."""
        succeeded, value = self._answer(timeout)
        assert succeeded, value
        return value

    def failure(self, timeout: float) -> str:
        """Its traceback, when it has ended on its own."""
        succeeded, text = self._answer(timeout)
        assert not succeeded, f"the process has returned {text!r}"
        self._process.join(timeout)
        assert self._process.exitcode not in (None, 0), "the process has not ended"
        return str(text)

    def _answer(self, timeout: float) -> tuple[bool, Any]:
        assert self._pipe.poll(timeout), f"no result within {timeout:g} s"
        answer: tuple[bool, Any] = self._pipe.recv()
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
