"""A resumed run continues as if it had never stopped, or is refused with a remedy, in any order."""

from __future__ import annotations

import argparse
import copy
import itertools
import threading

import numpy as np
import pytest
import torch
from torch import nn

import fastps
import fastps.torch
from fastps.torch import ParameterServerOptimizer


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Many small models: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(ps, seed=0, rule=None, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    rule = rule or fastps.Adam(lr=0.05)
    return model, ParameterServerOptimizer(model.named_parameters(), ps, rule, **options)


def train(model, optimizer, steps):
    for k in steps:
        torch.manual_seed(k)
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def weights(model):
    """Not the buffers, which a refused step has updated before it was refused."""
    return torch.cat([param.detach().flatten() for param in model.parameters()])


PLAIN = ["plain.pt", "plain-equal.pt"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Checkpoints of step 10 of two equal runs, by fastps and by plain torch, and the model of step 20.

    How many values of the two runs are equal depends on torch's instruction set. So one file of plain torch
    has the values of fastps, and the other one has at least one that differs, by one unit in the last place.
    """
    folder = tmp_path_factory.mktemp("runs")
    with fastps.Store() as store:
        model, optimizer = build(store)
        train(model, optimizer, range(10))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "usual.pt")
        fastps.torch.save(model, optimizer, folder / "own.pt", epoch=3)
        equal = copy.deepcopy(model.state_dict())
        train(model, optimizer, range(10, 20))
        end = weights(model)
    model, _ = build(fastps.Store())
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    train(model, adam, range(10))
    other = model.state_dict()
    other["0.weight"][0, 0] = equal["0.weight"][0, 0].nextafter(torch.tensor(torch.inf))
    torch.save({"model": equal, "optimizer": adam.state_dict()}, folder / "plain-equal.pt")
    torch.save({"model": other, "optimizer": adam.state_dict()}, folder / "plain.pt")
    return folder, end


def full(steps):
    """A store where a run has taken some steps."""
    store = fastps.Store()
    train(*build(store), range(steps))
    return store


ORDERS = [
    order
    for order in itertools.permutations(["model", "optimizer", "load model", "load optimizer"])
    if order.index("model") < min(order.index("optimizer"), order.index("load model"))
    and order.index("optimizer") < order.index("load optimizer")
]


@pytest.mark.parametrize("file", ["usual.pt", "plain.pt"])
@pytest.mark.parametrize("steps", [None, 10, 13], ids=["new", "same", "further"])
@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_every_order_is_right_or_refused_with_the_way_on(runs, order, steps, file, caplog):
    folder, end = runs
    saved, parts = torch.load(folder / file, weights_only=True), {}
    store = fastps.Store() if steps is None else full(steps)

    def make(part):
        match part:
            case "model":
                parts["model"], _ = build(fastps.Store(), seed=7)
            case "optimizer":
                named = parts["model"].named_parameters()
                parts["optimizer"] = ParameterServerOptimizer(named, store, fastps.Adam(lr=0.05))
            case "load model":
                parts["model"].load_state_dict(saved["model"])
            case "load optimizer":
                parts["optimizer"].load_state_dict(saved["optimizer"])

    refused = None
    try:
        for part in order:
            make(part)
        train(parts["model"], parts["optimizer"], range(10, 20))
    except (fastps.ForeignWriteError, fastps.ConfigError) as error:
        refused = error
    if isinstance(refused, fastps.ConfigError):
        assert file == "plain.pt"
        assert "fastps.torch.resume()" in str(refused)
        return
    if refused is not None:
        assert "push_model" in str(refused)
        parts["optimizer"].push_model()
        parts["optimizer"].load_state_dict(saved["optimizer"])
        train(parts["model"], parts["optimizer"], range(10, 20))
    if steps == 13:
        assert "the servers have taken 13 steps" in caplog.text
    else:
        torch.testing.assert_close(weights(parts["model"]), end, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("file", ["own.pt", "usual.pt", *PLAIN])
@pytest.mark.parametrize("steps", [None, 10, 13], ids=["new", "same", "further"])
@pytest.mark.parametrize("first", [None, "model", "optimizer", "both"])
def test_resume_is_right_in_every_order(runs, file, steps, first):
    """Whatever was loaded before it."""
    folder, end = runs
    saved = torch.load(folder / file, weights_only=True)
    store = fastps.Store() if steps is None else full(steps)
    model, optimizer = build(store, seed=7)
    if first in ("model", "both"):
        model.load_state_dict(saved["model"])
    if first in ("optimizer", "both") and file not in PLAIN:
        try:
            optimizer.load_state_dict(saved["optimizer"])
        except fastps.ForeignWriteError:
            assert first == "both"
    before = store.pull(store.names())
    others = (
        first == "optimizer" and file not in PLAIN if steps is None else steps == 13 or file == "plain.pt"
    )
    if others:  # the servers' steps are of another run, or their values are not those of the checkpoint
        with pytest.raises(fastps.ConfigError, match=f"step {steps or 10} of another run"):
            fastps.torch.resume(model, optimizer, folder / file)
        after = store.pull(store.names())
        assert all((before[name] == after[name]).all() for name in before)
    more = fastps.torch.resume(model, optimizer, folder / file, keep="checkpoint" if others else None)
    assert more == ({"epoch": 3} if file == "own.pt" else {})
    train(model, optimizer, range(10, 20))
    torch.testing.assert_close(weights(model), end, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [[None] * 3, [0, 1, 2]], ids=["no ranks", "ranks"])
def test_several_workers_load_one_state_and_push_its_residuals_once(ps, ranks):
    """The residuals are part of one gradient, even if several workers load the state."""
    with fastps.Store() as former:
        model, optimizer = build(former, codec=fastps.OneBit(), rank=ranks[-1])
        train(model, optimizer, range(3))
        state = optimizer.state_dict()
    kept = state["fastps"]["residuals"]
    assert any(residual.any() for residual in kept.values())
    workers = [build(ps, codec=fastps.OneBit(), rank=rank)[1] for rank in ranks]
    found = []
    for worker in workers:
        worker.load_state_dict(state)
        found.append(worker.state_dict()["fastps"]["residuals"])
    having = [any(residual.any() for residual in residuals.values()) for residuals in found]
    assert having == ([True, False, False] if ranks[0] is None else [False, False, True])
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("ranks", [(None, None), (0, None), (None, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("mode", [None, fastps.WarmStart(steps=1, then=fastps.Async())], ids=str)
def test_one_worker_takes_its_own_state(ranks, mode):
    """With a rank at one side only, in a warm start, and beside others that joined before."""
    with fastps.Store() as store, fastps.Store() as new:
        model, optimizer = build(store, codec=fastps.OneBit(), rank=ranks[0])
        train(model, optimizer, range(3))
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        _, other = build(new, codec=fastps.OneBit(), rank=ranks[1], mode=mode)
        other.load_state_dict(state)
        for found in (optimizer.state_dict(), other.state_dict()):
            residuals = found["fastps"]["residuals"]
            assert residuals.keys() == state["fastps"]["residuals"].keys()
            assert any(residual.any() for residual in residuals.values())
        _, late = build(store, codec=fastps.OneBit(), rank=ranks[0])
        own = late.state_dict()
        late.load_state_dict(own)
        assert late.state_dict()["fastps"].keys() == own["fastps"].keys()


def test_a_worker_resumes_while_the_run_continues(tmp_path):
    """The servers are further than its checkpoint: their values count."""
    with fastps.Store() as store:
        model, optimizer = build(store)
        train(model, optimizer, range(5))
        fastps.torch.save(model, optimizer, tmp_path / "run.pt")
        train(model, optimizer, range(5, 9))
        other, late = build(store, seed=7)
        fastps.torch.resume(other, late, tmp_path / "run.pt")
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert store.state("0.weight")["step"].tolist() == [9]
        fastps.torch.resume(other, late, tmp_path / "run.pt", keep="checkpoint")  # goes back
        assert store.state("0.weight")["step"].tolist() == [5]
        fastps.torch.resume(other, late, tmp_path / "run.pt", keep="servers")


@pytest.mark.parametrize("noted", [False, True])
def test_workers_that_resume_at_once_put_the_checkpoint_once(runs, server, tmp_path, noted):
    """Also where another run has been, which has taken no step."""
    folder, _ = runs
    if noted:
        with fastps.connect(server.addresses) as ps:
            model, optimizer = build(ps)
            fastps.torch.save(model, optimizer, tmp_path / "other.pt")
            optimizer.close()
    failed, barrier = [], threading.Barrier(4)
    steps = 5

    def work():
        try:
            with fastps.connect(server.addresses) as ps:
                model, optimizer = build(ps, seed=threading.get_native_id())
                barrier.wait(30)
                fastps.torch.resume(model, optimizer, folder / "usual.pt")
                for _ in range(steps):
                    optimizer.zero_grad()
                    model(torch.ones(4, 4)).sum().backward()
                    optimizer.step()
                optimizer.close()
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    with fastps.connect(server.addresses) as ps:  # no step came before the checkpoint, or was lost by it
        assert ps.state("0.weight")["step"].tolist() == [10 + 4 * steps]


@pytest.mark.parametrize("saver", [None, 1])
def test_one_worker_gets_the_residuals(ps, tmp_path, monkeypatch, saver):
    """The residuals of the saver's codec go to the model once: by its rank, or by the first worker."""
    monkeypatch.delenv("RANK", raising=False)

    def residuals(optimizer):
        return optimizer.state_dict()["fastps"]["residuals"]

    with fastps.Store() as store:
        model, optimizer = build(store, codec=fastps.OneBit(), rank=saver)
        train(model, optimizer, range(3))
        fastps.torch.save(model, optimizer, tmp_path / "run.pt")
        kept = residuals(optimizer)
    assert any(residual.any() for residual in kept.values())
    ranks = [None] * 3 if saver is None else range(3)
    workers = [build(ps, codec=fastps.OneBit(), rank=rank) for rank in ranks]
    for worker in workers[::-1]:  # so the last one puts the checkpoint on the servers
        fastps.torch.resume(*worker, tmp_path / "run.pt")
    for place, (_, optimizer) in enumerate(workers):
        assert any(residual.any() for residual in residuals(optimizer).values()) is (place == (saver or 0))
    for name, residual in residuals(workers[saver or 0][1]).items():
        assert torch.equal(residual, kept[name])
    for _, optimizer in workers:
        optimizer.close()


@pytest.mark.parametrize("rule", [fastps.SGD(), fastps.SGD(lr=0.1, momentum=0.9), fastps.Adagrad()], ids=str)
def test_other_rules_resume_from_plain_torch(rule, tmp_path):
    kind = torch.optim.SGD if isinstance(rule, fastps.SGD) else torch.optim.Adagrad
    settings = {"momentum": rule.momentum} if kind is torch.optim.SGD else {}
    model, _ = build(fastps.Store())
    plain = kind(model.parameters(), lr=rule.lr, **settings)
    train(model, plain, range(5))
    torch.save({"model": model.state_dict(), "optimizer": plain.state_dict()}, tmp_path / "plain.pt")
    train(model, plain, range(5, 10))
    with fastps.Store() as store:
        other, optimizer = build(store, seed=7, rule=rule)
        fastps.torch.resume(other, optimizer, tmp_path / "plain.pt")
        train(other, optimizer, range(5, 10))
        torch.testing.assert_close(weights(other), weights(model), rtol=1e-5, atol=1e-5)
        again, back = build(fastps.Store(), seed=8)[0], None
        back = kind(again.parameters(), lr=rule.lr, **settings)
        fastps.torch.save(other, optimizer, tmp_path / "ours.pt")
        saved = torch.load(tmp_path / "ours.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    back.load_state_dict(saved["optimizer"])  # and plain torch from ours
    train(model, plain, range(10, 13))
    train(again, back, range(10, 13))
    torch.testing.assert_close(weights(again), weights(model), rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_changes_nothing(runs, store, tmp_path):
    folder, _ = runs
    model, optimizer = build(store)
    train(model, optimizer, range(2))
    saved = torch.load(folder / "plain.pt", weights_only=True)

    def file(**changed):
        torch.save({**saved, **changed}, tmp_path / "other.pt")
        return tmp_path / "other.pt"

    before, values = store.versions(), weights(model)
    state = saved["optimizer"]
    fewer = {key: tensor for key, tensor in saved["model"].items() if key != "1.bias"}
    shaped = {**saved["model"], "1.bias": torch.zeros(9)}
    sgd = {**state, "state": {0: {"momentum_buffer": torch.zeros(8, 4)}}}
    settings = {**state, "param_groups": [{**state["param_groups"][0], "betas": (0.5, 0.9)}]}
    groups = {**state, "param_groups": [{**state["param_groups"][0], "params": [0, 1]}]}
    (tmp_path / "cut.pt").write_bytes((folder / "own.pt").read_bytes()[:1000])
    for changed, error, text in [
        ({"model": fewer}, fastps.ConfigError, "1.bias"),
        ({"model": shaped}, fastps.ShapeError, r"\(8,\), got \(9,\)"),
        ({"optimizer": sgd}, fastps.ConfigError, "0.weight"),
        ({"optimizer": settings}, fastps.ConfigError, "betas"),
        ({"optimizer": groups}, fastps.ConfigError, "groups of"),
    ]:
        with pytest.raises(error, match=text):
            fastps.torch.resume(model, optimizer, file(**changed), keep="checkpoint")
    for name, error, text in [
        ("cut.pt", fastps.DamagedFileError, "expected a whole file"),
        ("none.pt", OSError, "none.pt"),
    ]:
        with pytest.raises(error, match=text):
            fastps.torch.resume(model, optimizer, tmp_path / name)
    with pytest.raises(fastps.ConfigError, match="keep"):
        fastps.torch.resume(model, optimizer, folder / "own.pt", keep="both")
    with pytest.raises(fastps.ConfigError, match="ParameterServerOptimizer"):
        fastps.torch.resume(model, torch.optim.SGD(model.parameters()), folder / "own.pt")
    with pytest.raises(fastps.ConfigError, match="name of a value"):
        fastps.torch.save(model, optimizer, tmp_path / "run.pt", model2=1, fastps=2)
    assert store.versions() == before
    assert torch.equal(weights(model), values)


def test_a_refusal_names_ways_that_work(runs, server, tmp_path):
    """One worker puts the checkpoint there, another one that runs already resumes as usual."""
    folder, _ = runs
    with fastps.connect(server.addresses) as ps:
        (model, optimizer), (other, late) = build(ps), build(ps)
        train(model, optimizer, range(3))
        for keep, steps in [("servers", 3), ("checkpoint", 10)]:
            with pytest.raises(fastps.ConfigError, match=f'keep="{keep}"'):
                fastps.torch.resume(model, optimizer, folder / "own.pt")
            fastps.torch.resume(model, optimizer, folder / "own.pt", keep=keep)
            assert optimizer.global_step == steps
        fastps.torch.resume(other, late, folder / "own.pt")
        assert torch.equal(weights(other), weights(model))
        train(other, late, range(10, 12))
        assert late.global_step == 12
        optimizer.close()
        late.close()


def test_a_warning_about_other_steps_names_a_way_that_works(runs, caplog):
    folder, _ = runs
    with fastps.Store() as store:
        model, optimizer = build(store)
        fastps.torch.resume(model, optimizer, folder / "own.pt")
        train(model, optimizer, range(3))
        optimizer.load_state_dict(torch.load(folder / "own.pt", weights_only=True)["optimizer"])
        assert 'resume(..., keep="checkpoint") returns' in caplog.text
        fastps.torch.resume(model, optimizer, folder / "own.pt", keep="checkpoint")
        assert optimizer.global_step == 10


def test_what_torch_does_not_read_safely_is_named(runs, tmp_path, store):
    """In a file that something else wrote, with the way on; `save` does not write such a file."""
    folder, end = runs
    saved = torch.load(folder / "plain.pt", weights_only=True)
    torch.save({**saved, "args": argparse.Namespace(lr=0.05)}, tmp_path / "args.pt")
    model, optimizer = build(store, seed=7)
    cure = r"safe_globals\(\[argparse.Namespace\]\)"
    with pytest.raises(fastps.ConfigError, match=cure):
        fastps.torch.resume(model, optimizer, tmp_path / "args.pt")
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert fastps.torch.resume(model, optimizer, tmp_path / "args.pt")["args"].lr == 0.05
    train(model, optimizer, range(10, 20))
    torch.testing.assert_close(weights(model), end, rtol=1e-5, atol=1e-5)
    with pytest.raises(fastps.ConfigError, match=r"value args.*'Namespace'"):
        fastps.torch.save(model, optimizer, tmp_path / "none.pt", args=argparse.Namespace())
    assert not (tmp_path / "none.pt").exists()


@pytest.mark.parametrize("how", [{"codec": fastps.OneBit()}, {"mode": fastps.Local(2, 2, lr=0.05)}], ids=str)
def test_a_run_continues_with_another_codec_or_mode(how, tmp_path, caplog):
    """Without what was left of the former one, which is logged."""
    with fastps.Store() as store:
        model, optimizer = build(store, **how)
        train(model, optimizer, range(4))
        fastps.torch.save(model, optimizer, tmp_path / "run.pt")
    with fastps.Store() as store:
        other, optimizer = build(store, seed=7)
        fastps.torch.resume(other, optimizer, tmp_path / "run.pt")
        assert "begins without the state of the one that saved" in caplog.text
        assert torch.equal(weights(other), weights(model)) or "mode" in how
        train(other, optimizer, range(2))


def test_a_put_that_was_never_finished_is_found(runs):
    folder, _ = runs
    with fastps.serve() as server, fastps.connect(server.addresses, timeout=1.0) as ps:
        ps.register("0.weight.fastps.run", np.zeros(9, np.float32), fastps.SGD(lr=1.0), group="fastps")
        model, optimizer = build(ps, seed=7)
        with pytest.raises(fastps.DeadlineError, match='keep="checkpoint"'):
            fastps.torch.resume(model, optimizer, folder / "own.pt")
        fastps.torch.resume(model, optimizer, folder / "own.pt", keep="checkpoint")
        assert ps.state("0.weight")["step"].tolist() == [10]
        optimizer.close()
