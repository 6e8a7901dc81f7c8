"""Measurements of a shard: staleness, times of answers, bytes and refusals, against what was done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from served import Served, samples, serving

import fastps

ZEROS = np.zeros(100, np.float32)
SLICE = 258_048
#: Three slices.
BIG = 600_000


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--shards", "2") as one:
        yield one


def measured(served: Served) -> Counter[str]:
    """Each series of both shards together, such as ``refusals{reason=fenced}``."""
    found: Counter[str] = Counter()
    for (name, labels), value in samples(served.get("/metrics")).items():
        shown = ",".join(f"{k}={v}" for k, v in labels if k != "shard")
        found[f"{name.removeprefix('fastps_')}{{{shown}}}"] += value
    return found


def test_bytes_are_counted_by_codec_and_transport(served: Served) -> None:
    before = measured(served)
    with fastps.connect(served.addresses, transport="tcp") as ps:
        ps.register("big", np.zeros(BIG, np.float32), fastps.SGD(lr=1.0))
        gradient = np.ones(BIG, np.float32)
        ps.push("big", gradient)
        ps.push("big", gradient, codec=fastps.Int8())
        ps.pull("big")
    with fastps.connect(served.addresses) as ps:  # shared memory, where values are lent
        ps.push("big", gradient, codec=fastps.BFloat16())
        ps.pull("big")
        ps.unregister("big")
    more = measured(served) - before
    rest = BIG - 2 * SLICE
    int8 = sum(n + -(-n // 64) for n in (SLICE, SLICE, rest))
    assert more["received_bytes_total{codec=Float32,transport=tcp}"] == 4 * 2 * BIG  # values, then a gradient
    assert more["received_bytes_total{codec=Int8,transport=tcp}"] == int8
    assert more["received_bytes_total{codec=BFloat16,transport=shared_memory}"] == 2 * BIG
    assert more["sent_bytes_total{codec=Float32,transport=tcp}"] == 4 * BIG
    assert more["sent_bytes_total{codec=Float32,transport=shared_memory}"] == 4 * rest
    for kind, count in {"gradient": 9, "assign": 3, "pull": 6}.items():
        assert more[f"answer_seconds_count{{kind={kind}}}"] == count, kind
        assert 0 < more[f"answer_seconds_sum{{kind={kind}}}"] < 60
        assert more[f"answer_seconds_bucket{{kind={kind},le=+Inf}}"] == count


def test_staleness_is_that_of_the_workers_and_refusals_have_reasons(served: Served) -> None:
    before, stale, scaled, rejected = measured(served), Counter[int](), 0, 0
    modes = [fastps.Async(max_staleness=0, on_stale="reject"), fastps.Async(max_staleness=1)]
    with fastps.connect(served.addresses) as ps:
        for name, mode in zip("rs", modes, strict=True):
            ps.register(name, ZEROS, fastps.SGD(lr=0.1))
            with (
                fastps.Worker(ps, {name: ZEROS.copy()}, mode) as a,
                fastps.Worker(ps, {name: ZEROS.copy()}, mode) as b,
            ):
                for worker in (a, a, a, b, a, b, b):
                    worker.step({name: ZEROS})
                for worker in (a, b):
                    stats = worker.stats()
                    stale.update(stats["staleness"])
                    scaled += stats["scaled"]
                    rejected += stats["rejected"]
        more = measured(served) - before
        with pytest.raises(fastps.NonFiniteError):
            ps.push("r", np.full(100, 1e38, np.float32), lr=1e30)
        counters = [shard["counters"] for shard in ps.stats()["shards"]]
        ps.unregister("r")
        ps.unregister("s")
    assert stale.total() > 0 < scaled
    assert rejected > 0
    assert more["push_staleness_count{}"] == stale.total()
    assert more["push_staleness_sum{}"] == sum(tau * count for tau, count in stale.items())
    assert more["push_staleness_bucket{le=0}"] == stale[0]
    assert more["gradients_scaled_total{}"] == scaled
    assert more["gradients_stale_total{}"] == rejected == more["refusals_total{reason=stale_push}"]
    after = measured(served)
    assert (after - before)["refusals_total{reason=non_finite}"] == 1
    refused = sum(value for name, value in after.items() if name.startswith("refusals_total{"))
    assert refused == sum(one["frames_refused"] for one in counters) == after["frames_refused_total{}"]


def test_rounds_late_gradients_and_modes(served: Served) -> None:
    before = measured(served)
    mode = fastps.Sync(workers=1, backup=1)
    with fastps.connect(served.addresses) as ps:
        ps.register("t", ZEROS, fastps.SGD(lr=0.1))
        with (
            fastps.Worker(ps, {"t": ZEROS.copy()}, mode) as first,
            fastps.Worker(ps, {"t": ZEROS.copy()}, mode) as late,
        ):
            first.step({"t": ZEROS})
            late.step({"t": ZEROS})  # its version was made without it
            more = measured(served) - before
        ps.unregister("t")
    assert more["rounds_total{}"] == 1
    assert more["gradients_late_total{}"] == 1
    kinds = [name for name in more if name.startswith("group_mode{group=default,kind=Sync")]
    assert len(kinds) == 1
