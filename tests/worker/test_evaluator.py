"""Evaluating beside workers: what is judged, kept, and when it ends."""

from __future__ import annotations

import itertools
import math
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import fastps
import fastps.checkpoint
import fastps.torch
from fastps.commands.kit.servers import free_ports

safetensors = pytest.importorskip("safetensors.numpy")


def metric(params):
    return {"w": float(params["w"][0])}


def filled(ps, steps=0):
    ps.register("w", np.zeros(2, np.float32), fastps.SGD(lr=1.0))
    push(ps, steps)
    return ps


def push(ps, steps, by=-1.0):
    for _ in range(steps):
        ps.push("w", np.full(2, by, np.float32))


def test_the_best_is_kept(ps, tmp_path):
    """Up to 3, down, and better again."""
    filled(ps)
    path = tmp_path / "best.safetensors"
    evaluator = fastps.evaluator(ps, metric, by="w", keep=path)
    for by, best, kept in [(-3, True, 3), (2, False, 3), (-1, False, 3), (-2, True, 4)]:
        push(ps, 1, float(by))
        assert evaluator.now().best is best
        assert safetensors.load_file(path)["w"].tolist() == [kept, kept]
    assert evaluator.best == fastps.Evaluation(5, {"w": 4.0}, True)
    least = fastps.evaluator(ps, metric, by="w", goal="min")
    assert [least.now().best, least.now().best] == [True, False]


def test_it_follows_a_run_and_ends_when_nothing_changes(server):
    over = threading.Event()

    def work(ps):
        while not over.is_set():
            push(ps, 1)
            time.sleep(0.005)
        push(ps, 5)

    def judge(params):
        judged.append(params)
        if len(judged) == 3:
            over.set()
        return metric(params)

    with fastps.connect(server.addresses) as ps, fastps.connect(server.addresses) as reader:
        filled(ps)
        judged, worker = [], threading.Thread(target=work, args=(ps,))
        worker.start()
        try:
            evaluator = fastps.evaluator(reader, judge, every=20, idle=3.0)
            found = list(evaluator)
        finally:
            over.set()
            worker.join()
        last = ps.versions("w")["w"]
    versions = [evaluation.version for evaluation in found]
    assert versions[-1] == last  # the last ones, too
    assert all(late - early >= 20 for early, late in itertools.pairwise(versions[:-1]))
    assert len(found) >= 3
    assert evaluator.stopped == "idle"


def test_it_waits_for_the_first_worker(store, monkeypatch):
    """An evaluator that starts first; it names a tensor that never comes."""
    asked, plain = [], fastps.Store.versions

    def versions(store, names):
        asked.append(names)
        if len(asked) == 5:
            filled(store, 1)
        return plain(store, names)

    with monkeypatch.context() as patch:
        patch.setattr(fastps.Store, "versions", versions)
        evaluator = fastps.evaluator(store, metric, names=["w"], idle=0.5)
        assert [evaluation.version for evaluation in evaluator] == [2]
    with pytest.raises(fastps.UnknownTensorError, match='"v"'):
        list(fastps.evaluator(store, metric, names=["w", "v"], idle=0.3))


def test_frozen_parameters_do_not_end_it(store):
    """The one tensor that is trained counts, from its first step to its last."""
    filled(store)
    store.register("frozen", np.zeros(1, np.float32), fastps.SGD(lr=1.0))
    evaluator = fastps.evaluator(store, lambda params: push(store, 5) or metric(params), every=5, idle=0.3)
    assert [evaluation.version for evaluation, _ in zip(evaluator, range(4), strict=False)] == [1, 6, 11, 16]


def test_only_what_is_trained_counts(ps):
    """Neither buffers nor what fastps keeps beside a model; notes are not among the parameters."""
    filled(ps, 3)
    for name, group in [("mean", "default.buffers"), ("a.fastps.run", "fastps"), ("rl.frames", "rl.frames")]:
        ps.register(name, np.zeros(2, np.float32), fastps.SGD(lr=1.0), group=group)
        for _ in range(9):
            ps.push(name, np.zeros(2, np.float32))
    seen = []
    evaluator = fastps.evaluator(ps, lambda params: seen.extend(params) or metric(params), idle=0.3)
    assert [evaluation.version for evaluation in evaluator] == [4]
    assert sorted(seen) == ["mean", "rl.frames", "w"]
    of_buffers = fastps.evaluator(ps, lambda params: {"mean": 0.0}, names=["mean"])
    assert of_buffers.now().version == 10  # where nothing else was asked for


def test_a_server_that_is_away_is_not_idle(tmp_path):
    """The time until it is back does not end the evaluation, which sees the next step."""
    listen, data = f"127.0.0.1:{free_ports(1)[0]}", tmp_path / "data"
    with fastps.serve(listen=listen, data_dir=data) as server:
        ps = fastps.connect(server.addresses)
        filled(ps, 1)
        evaluator = fastps.evaluator(ps.another(), metric, every=1, idle=3.0)
        evaluations = iter(evaluator)
        assert next(evaluations).version == 2
        server.stop()
    found = []
    reader = threading.Thread(target=lambda: found.append(next(evaluations, None)))
    reader.start()
    time.sleep(3.2)
    with fastps.serve(listen=listen, data_dir=data) as server, fastps.connect(server.addresses) as again:
        time.sleep(1.0)
        push(again, 1)
        reader.join(30)
        assert [evaluation and evaluation.version for evaluation in found] == [3]
        ps.close()


def test_it_stops_early(store):
    filled(store)
    evaluator = fastps.evaluator(
        store, lambda params: (push(store, 1), {"w": 1.0})[1], every=1, by="w", patience=3
    )
    assert [evaluation.best for evaluation in evaluator] == [True, False, False, False]
    assert evaluator.stopped == "patience"
    for _ in evaluator:
        evaluator.stop()
    assert evaluator.stopped == "stop"


def test_a_server_that_goes_back_is_evaluated_at_once(store):
    filled(store, 9)
    evaluator = fastps.evaluator(store, metric, every=100)
    assert next(iter(evaluator)).version == 10
    store.unregister("w")
    filled(store, 2)
    assert next(iter(evaluator)).version == 3


def test_a_consistent_evaluation_is_of_one_moment(server):
    """Both tensors of each pull had the same number of pushes."""
    stop = threading.Event()

    def work(ps):
        with fastps.connect(server.addresses) as ps:
            while not stop.is_set():
                ps.push({name: np.full(4, -1.0, np.float32) for name in "ab"})
                time.sleep(0.002)

    with fastps.connect(server.addresses) as ps:
        for name in "ab":
            ps.register(name, np.zeros(4, np.float32), fastps.SGD(lr=1.0))
        worker = threading.Thread(target=work, args=(ps,))
        worker.start()
        try:
            evaluator = fastps.evaluator(
                ps,
                lambda p: {"apart": float(abs(p["a"] - p["b"]).max()), "most": max(p["a"][0], p["b"][0])},
                consistent=True,
            )
            found = [evaluator.now() for _ in range(30)]
        finally:
            stop.set()
            worker.join()
        # A push of two tensors is atomic per slice, so a moment may fall between its parts, and no further.
        assert max(one.metrics["apart"] for one in found) <= 1
        assert all(one.metrics["most"] == one.version - 1 for one in found)


def test_what_fn_does_wrong_changes_nothing(store, tmp_path):
    filled(store, 1)
    results = [{"w": 1.0}]

    def fn(params):
        if isinstance(results[-1], Exception):
            raise results[-1]
        return results[-1]

    path = tmp_path / "best.safetensors"
    evaluator = fastps.evaluator(store, fn, by="w", keep=path)
    best, bytes_before = evaluator.now(), path.read_bytes()
    for result, error, text in [
        ({"w": math.nan}, fastps.NonFiniteError, "'w' is nan"),
        ({"w": 2.0, "loss": math.inf}, fastps.NonFiniteError, "'loss' is inf"),
        ({"accuracy": 1.0}, fastps.ConfigError, "a metric 'w'"),
        (0.5, fastps.ConfigError, "numbers by name"),
        ({"w": "good"}, fastps.ConfigError, "numbers by name"),
        (ValueError("mine"), ValueError, "mine"),
    ]:
        results.append(result)
        with pytest.raises(error, match=text) as raised:
            evaluator.now()
        assert raised.value.__notes__ == ["evaluating version 2"]
        assert (evaluator.best, path.read_bytes()) == (best, bytes_before)
    results.append({"w": 2.0})
    assert evaluator.now().best


def test_bad_arguments_are_refused(store):
    for changed, text in [
        ({"every": 0}, "every"),
        ({"goal": "most"}, "goal"),
        ({"patience": 0, "by": "w"}, "patience"),
        ({"patience": 3}, "patience needs by="),
        ({"by": 3}, "by"),
        ({"consistent": 1}, "consistent"),
        ({"idle": 0}, "idle"),
        ({"fn": None}, "fn"),
        ({"names": "weights"}, "invalid names: expected a list of names, or None, got 'weights'"),
        ({"ps": None}, "ps"),
    ]:
        arguments = {"ps": store, "fn": metric, **changed}
        with pytest.raises(fastps.ConfigError, match=text):
            fastps.evaluator(arguments.pop("ps"), arguments.pop("fn"), **arguments)
    with pytest.raises(fastps.UnknownTensorError):
        fastps.evaluator(store, metric, names=["w"]).now()


def test_a_torch_model_is_judged_with_its_buffers(ps, tmp_path):
    def build():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    model, other = build(), build()
    x = 3 + torch.randn(32, 4)
    path = tmp_path / "best.safetensors"
    named = model.named_parameters()
    with fastps.torch.ParameterServerOptimizer(named, ps, fastps.SGD(lr=0.01), model=model) as optimizer:
        for _ in range(5):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def judge(judged):
        assert not judged.training
        assert not torch.is_grad_enabled()
        return {"loss": float(judged(x).square().mean())}

    found = fastps.torch.evaluator(other, ps, judge, by="loss", goal="min", keep=path, consistent=True).now()
    assert found.metrics["loss"] == pytest.approx(float(model.eval()(x).detach().square().mean()), rel=0.2)
    third = build().eval()
    fastps.torch.load(third, path)
    assert float(third(x).detach().square().mean()) == pytest.approx(found.metrics["loss"], rel=1e-5)
    ps.unregister("1.running_var")
    with pytest.raises(fastps.UnknownTensorError, match=r"running_var"):
        fastps.torch.evaluator(other, ps, judge).now()
