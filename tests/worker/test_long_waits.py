"""A worker that waits for others is shown while it waits, and says for whom."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fastps
from fastps.commands.cli import main

LATE = 60.0
ZEROS = {"w": np.zeros(200, np.float32), "b": np.zeros(3, np.float32)}
ONES = {name: values + 1 for name, values in ZEROS.items()}


def register(ps):
    for name, values in ZEROS.items():
        ps.register(name, values, optimizer=fastps.SGD(lr=1.0))


def workers(server, capfd):
    """The workers that ``fastps status`` shows, by name."""
    capfd.readouterr()
    assert main(["status", server.addresses, "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)["workers"]
    return {one["name"]: one["report"] for one in shown if one["report"] is not None}


def until(true):
    end = time.monotonic() + LATE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def waits(report):
    return report is not None and (report["waited"] or 0.0) > 0.95


def logged(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("waiting for other workers")]


def test_a_worker_is_shown_before_its_first_step(server, capfd):
    with fastps.connect(server.addresses) as ps:
        register(ps)
        for mode in (fastps.Async(), fastps.Sync(workers=2)):
            with fastps.Worker(ps, ZEROS, mode, name=f"{mode!r}"[:5], rank=3):
                until(lambda: "".join(workers(server, capfd)) == f"{mode!r}"[:5])  # noqa: B023
                (report,) = workers(server, capfd).values()
                assert (report["rank"], report["steps"], report["waited"]) == (3, 0, None)


def test_a_step_that_waits_for_one_that_never_came_says_so(server, capfd, caplog):
    """And so does the error of the second worker that gives up, when the first one has left."""
    begin = threading.Barrier(2)

    def train(rank):
        with fastps.connect(server.addresses, timeout=12) as ps:
            try:
                with fastps.Worker(
                    ps, ZEROS, fastps.Sync(workers=3), name=f"gpu-{rank}", rank=rank
                ) as worker:
                    begin.wait(LATE)
                    time.sleep(rank)
                    worker.step(ONES)
            except fastps.DeadlineError as error:
                return str(error)
        return "no error"

    with fastps.connect(server.addresses) as ps:
        register(ps)
    with ThreadPoolExecutor(2) as pool, caplog.at_level(logging.WARNING, "fastps"):
        runs = [pool.submit(train, rank) for rank in range(2)]
        until(lambda: all(waits(workers(server, capfd).get(f"gpu-{rank}")) for rank in range(2)))
        assert not any(run.done() for run in runs)
        errors = [run.result(LATE) for run in runs]
    both = r'group "default" has 2 of 3 workers \("gpu-[01]" \(rank [01]\), "gpu-[01]" \(rank [01]\)\)'
    assert len(logged(caplog)) == 2  # one each
    for line in logged(caplog):
        assert re.fullmatch(f"waiting for other workers: {both}", line)
    for error in errors:
        assert re.search(f"{both}.*; 1 missing: start them, or use workers=2", error)
    assert errors[1].count("1 of which has left meanwhile") == 1


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (fastps.Sync(workers=3), r'has 3 of 3 workers \(.*\); "gpu-2" \(rank 2\) computes, or is stopped'),
        (fastps.Bounded(staleness=1), r'"gpu-2" \(rank 2\) in group "default"'),
    ],
    ids=["sync", "bounded"],
)
def test_those_that_wait_differ_from_the_one_that_computes(server, capfd, caplog, mode, says):
    woken, late = threading.Event(), threading.Event()

    def train(rank):
        with (
            fastps.connect(server.addresses, timeout=LATE) as ps,
            fastps.Worker(ps, ZEROS, mode, name=f"gpu-{rank}", rank=rank) as worker,
        ):
            joined.wait(LATE)
            for k in range(12):
                if (rank, k) == (2, 4):
                    late.set()
                    assert woken.wait(LATE)
                worker.step(ONES)

    joined = threading.Barrier(3)
    with fastps.connect(server.addresses) as ps:
        register(ps)
    with ThreadPoolExecutor(3) as pool, caplog.at_level(logging.WARNING, "fastps"):
        runs = [pool.submit(train, rank) for rank in range(3)]
        try:
            assert late.wait(LATE)
            until(lambda: len(logged(caplog)) >= 2)
            shown = workers(server, capfd)
        finally:
            woken.set()
        for run in runs:
            run.result(LATE)
    assert [waits(shown[f"gpu-{rank}"]) for rank in range(3)] == [True, True, False]
    for line in logged(caplog):
        assert re.search(says, line)


def test_the_others_of_a_warm_start_are_shown_while_they_wait(server, capfd):
    mode = fastps.WarmStart(steps=2, then=fastps.Async())
    with fastps.connect(server.addresses) as ps, ThreadPoolExecutor(1) as pool:
        register(ps)
        with fastps.Worker(ps, ZEROS, mode, name="first") as first:
            other = pool.submit(lambda: fastps.Worker(ps, ZEROS, mode, name="other"))
            until(lambda: waits(workers(server, capfd).get("other")))
            assert workers(server, capfd)["other"]["steps"] == 0
            first.step(ONES)
            first.step(ONES)
            other.result(LATE).close()
