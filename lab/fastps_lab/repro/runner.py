"""Runs claims, each in a separate process, and writes each result as soon as it is known."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from fastps.commands.kit import hold_on_to
from fastps.commands.kit.plot import has_matplotlib
from fastps_lab.repro.catalogue import CLAIMS
from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict
from fastps_lab.repro.picture import draw

__all__ = ["Result", "measure", "no_children_left", "one_blas_thread", "pool", "run"]

#: Numbers of threads that BLAS libraries read once, when they are loaded. With one thread, two runs on one
#: machine print the same digits.
BLAS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")

Result = dict[str, Any]


def run(claims: list[Claim], setting: Setting, out: Path, jobs: int) -> Generator[Result]:
    """Runs claims in up to `jobs` processes; yields each result when it is written.

    A process that dies ends its whole pool. Each lost claim runs once more, in a separate process.
    """
    with one_blas_thread(), no_children_left():
        measuring, lost, flights = pool(jobs), {claim.name: claim for claim in claims}, []
        with contextlib.suppress(BrokenProcessPool):
            flights += [measuring.submit(measure, name, setting, out) for name in lost]
        for flight in concurrent.futures.as_completed(flights):
            with contextlib.suppress(BrokenProcessPool):
                result = flight.result()
                del lost[result["name"]]
                yield result
        measuring.shutdown()
        yield from _run_again(list(lost.values()), setting, out, jobs)


def _run_again(claims: list[Claim], setting: Setting, out: Path, jobs: int) -> Iterator[Result]:
    """Runs up to `jobs` claims at a time, each in a separate pool; fails those whose process dies."""
    waiting = deque(claims)
    flights: dict[concurrent.futures.Future[Result], tuple[Claim, ProcessPoolExecutor]] = {}
    while waiting or flights:
        while waiting and len(flights) < jobs:
            claim, single = waiting.popleft(), pool(1)
            flights[single.submit(measure, claim.name, setting, out)] = claim, single
        for flight in concurrent.futures.wait(flights, return_when="FIRST_COMPLETED").done:
            claim, single = flights.pop(flight)
            single.shutdown()
            try:
                yield flight.result()
            except BrokenProcessPool:
                verdict = Verdict(None, "not measured: its process died, and once more when it ran again")
                yield {**_write(claim, setting, out, verdict, {}), "seconds": 0.0}


def pool(jobs: int) -> ProcessPoolExecutor:
    """Processes that measure; they end with this one."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(os.getpid(),))


@contextlib.contextmanager
def no_children_left() -> Iterator[None]:
    """If this ends early, the processes that measure end, too."""
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise


def _begin(command: int) -> None:
    """Lets Ctrl-C end a process that measures, without a traceback, and so the end of the command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    hold_on_to(command)


def measure(name: str, setting: Setting, out: Path) -> Result:
    """Measures one claim, judges it, and writes ``NAME.png`` and then ``NAME.json``.

    A claim that raises an exception fails with its text.
    """
    claim = CLAIMS[name]
    begin = time.perf_counter()
    for kind in ("json", "png"):  # of an earlier run
        (out / f"{name}.{kind}").unlink(missing_ok=True)
    figures: Figures = {}
    try:
        figures = json.loads(json.dumps(claim.measure(setting)))  # as a reader of the file gets them
        verdict = claim.judge(figures)
        if claim.draw is not None and has_matplotlib():
            draw(claim, figures, out / f"{name}.png")
    except Exception as error:
        if os.environ.get("FASTPS_TRACEBACK") == "1":
            traceback.print_exc()
        verdict = Verdict(None, f"not measured: {type(error).__name__}: {' '.join(str(error).split())}")
    result = _write(claim, setting, out, verdict, figures)
    return {**result, "seconds": time.perf_counter() - begin}


def _write(claim: Claim, setting: Setting, out: Path, verdict: Verdict, figures: Figures) -> Result:
    """Writes a claim's result, completely or not at all, and returns it."""
    result: Result = {
        "name": claim.name,
        "status": _status(claim, verdict),
        "measured": verdict.measured,
        "threshold": claim.threshold,
        "paper": claim.paper,
        "source": claim.source,
        "says": claim.says,
        "note": claim.note,
        "repeats": claim.repeats,
        "seed": setting.seed,
        "form": "quick" if setting.quick else "full",
        "figures": figures,
    }
    part = out / f"{claim.name}.part"
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(out / f"{claim.name}.json")
    return result


def _status(claim: Claim, verdict: Verdict) -> str:
    if verdict.holds:
        return "holds"
    return "not reproduced" if verdict.holds is False and not claim.reproduces else "fails"


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Processes that start meanwhile use one BLAS thread."""
    before = {name: os.environ.get(name) for name in BLAS}
    os.environ.update(dict.fromkeys(BLAS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
