"""An interpreter that has imported fastps and torch, and runs each script in its own fork.

A script starts, runs and ends as under ``python script.py``, without the seconds of CPU time that the imports
take.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import NoReturn, Self


class Interpreter:
    """Runs one script at a time; ``with`` ends it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def run(self, arguments: list[str], folder: Path, output: Path, seconds: int) -> int:
        """Runs a script and its arguments in a folder; returns its exit code, negative after a signal."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps([arguments, str(folder), str(output), seconds]), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())


def _next_script() -> tuple[list[str], str, str, int] | None:
    """In a fork, what it is to run; in the interpreter itself, nothing, once no more scripts come."""
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            return tuple(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def _become(arguments: list[str], folder: str, output: str, seconds: int) -> None:
    """Makes this process what a new interpreter would be."""
    signal.alarm(seconds)
    os.chdir(folder)
    empty, file = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, source in enumerate((empty, file, file)):
        os.dup2(source, number)
    os.close(empty)
    os.close(file)
    sys.stdin = os.fdopen(0)
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = arguments[0]


def _run() -> int:
    """Runs the script as the main module; the exit code."""
    try:
        code = compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec")
        exec(code, sys.modules["__main__"].__dict__)
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Ends as Python does, but takes no module apart: for those of torch that takes two seconds."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    importlib.import_module("fastps")
    importlib.import_module("torch._dynamo")  # torch's optimizers need it
    gc.freeze()  # a collection in a fork would copy all the memory of torch
    script = _next_script()
    if script:
        _become(*script)
    _end(_run() if script else 0)
