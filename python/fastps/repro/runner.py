"""Runs claims, each in a process of its own, and writes what came out as soon as it is known."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastps.repro.catalogue import CLAIMS
from fastps.repro.claim import Claim, Setting
from fastps.repro.picture import draw, has_matplotlib

__all__ = ["Result", "measure", "run"]

#: Numbers of threads that BLAS libraries read once, when they are loaded. With one thread, two runs on one
#: machine print the same digits.
BLAS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")

Result = dict[str, Any]


def run(claims: list[Claim], setting: Setting, out: Path, jobs: int) -> Iterator[Result]:
    """Runs claims in up to `jobs` processes; yields each result when it is written."""
    with _one_blas_thread():
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(jobs, context, initializer=_end_silently) as pool:
            flights = [pool.submit(measure, claim.name, setting, out) for claim in claims]
            try:
                for flight in concurrent.futures.as_completed(flights):
                    yield flight.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in multiprocessing.active_children():
                    child.terminate()
                raise


def _end_silently() -> None:
    """Lets Ctrl-C end a process that measures, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def measure(name: str, setting: Setting, out: Path) -> Result:
    """Measures one claim, judges it, and writes ``NAME.json`` and ``NAME.png``."""
    claim = CLAIMS[name]
    begin = time.perf_counter()
    figures = json.loads(json.dumps(claim.measure(setting)))  # as a reader of the file gets them
    verdict = claim.judge(figures)
    result: Result = {
        "name": name,
        "status": {None: "reported", True: "holds", False: "fails"}[verdict.holds],
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
    seconds = time.perf_counter() - begin
    _write(out / f"{name}.json", json.dumps(result, indent=1))
    if claim.draw is not None and has_matplotlib():
        draw(claim, figures, out / f"{name}.png")
    return {**result, "seconds": seconds}


def _write(path: Path, text: str) -> None:
    """Writes a file completely or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(path)


@contextmanager
def _one_blas_thread() -> Iterator[None]:
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
