"""Synthetic gradients: the rules against an independent reference, what they learn, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoupled import Reference, decoupled, rows_of, stacks, train
from models import digits, pulled
from torch import nn

import fastps
import fastps.torch
from fastps.torch.parallel import Graph, NodeError, Replica, SyntheticGradient

RULES = {"adam": fastps.Adam(lr=1e-3), "sgd": fastps.SGD(lr=0.05, momentum=0.9)}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def run(graph, steps, threads=False, delay=0, **options):
    """Losses, values on the servers, and counters of the edges."""
    with fastps.Store() as store, Replica.local(graph, threads, delay=delay) as replica:
        losses = train(replica, store, digits(), steps, **options)
        return losses, pulled(store), replica.stats()["edges"]


def zero_grad(replica):
    for _, param in replica.named_parameters():
        param.grad = None


# -- the rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", ["dni", "cdni"])
@pytest.mark.parametrize("delay", [0, 10])
def test_parts_in_turn_have_the_bits_of_the_reference(how, rule, delay):
    losses, found, edges = run(decoupled(stacks(5, 3), how), 30, delay=delay, rule=RULES[rule])
    x, y = digits()[:2]
    with fastps.Store() as store:
        reference = Reference(stacks(5, 3), how, store, RULES[rule], delay)
        batches = (rows_of(step, len(x)) for step in range(30))
        assert losses == [reference.step(x[rows], y[rows]) for rows in batches]
        same(found, pulled(store))
    assert [edge["lag"] for edge in edges.values()] == [{delay: 30 - delay}] * 2


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_warm_up_beyond_the_run_has_the_bits_of_true_gradients(threads, micro_batches):
    options = {"micro_batches": micro_batches, "threads": threads}
    losses, plain, _ = run(decoupled(stacks(5, 3), "backprop"), 20, **options)
    others, found, edges = run(decoupled(stacks(5, 3), warm_up=20), 20, **options)
    assert losses == others
    trained = {name: found.pop(name) for name in list(found) if ".synthetic." in name}
    same(found, plain)
    assert sorted({name.partition(".layers")[0] for name in trained}) == [
        "part0.synthetic",
        "part1.synthetic",
    ]
    assert all(values.any() for values in trained.values())  # predictors learn meanwhile
    assert [edge["lag"] for edge in edges.values()] == [{0: 20}] * 2


def test_a_caller_may_reuse_the_memory_of_a_batch_before_its_targets_come():
    (x, y), found = digits()[:2], []
    for reuses in (False, True):
        with fastps.Store() as store, Replica.local(decoupled(stacks(3, 3)), delay=3) as replica:
            optimizer = replica.optimizer(store, fastps.Adam(lr=1e-3))
            image, label = x[:32].clone(), y[:32].clone()
            for step in range(8):
                rows = rows_of(step, len(x), size=32)
                if reuses:
                    image.copy_(x[rows])
                    label.copy_(y[rows])
                else:
                    image, label = x[rows], y[rows]
                optimizer.zero_grad()
                replica.step(image=image, label=label)
                optimizer.step()
            optimizer.close()
            found.append(pulled(store))
    same(*found)


def test_a_warm_up_ends():
    losses, *_ = run(decoupled(stacks(5, 3), "backprop"), 20)
    others, *_ = run(decoupled(stacks(5, 3), warm_up=10), 20)
    assert others[:11] == losses[:11]
    assert others[11] != losses[11]


def test_threads_have_the_bits_of_targets_that_come_a_step_late():
    losses, found, _ = run(decoupled(stacks(5, 3)), 30, delay=1, micro_batches=2)
    others, threaded, edges = run(decoupled(stacks(5, 3)), 30, threads=True, micro_batches=2)
    assert losses == others
    same(found, threaded)
    assert [edge["lag"] for edge in edges.values()] == [{1: 29}] * 2


def test_micro_batches_make_one_step_of_the_mean_over_all_rows():
    """Without BatchNorm, which sees each micro-batch separately, they change the rounding only."""
    found = []
    for micro_batches in (1, 4):
        torch.manual_seed(0)
        graph = decoupled([nn.Sequential(nn.Linear(64, 32), nn.Tanh()), nn.Linear(32, 10)], width=32)
        with fastps.Store() as store, Replica.local(graph) as replica:
            train(replica, store, digits(), 5, micro_batches=micro_batches, rule=fastps.SGD(lr=0.1))
            assert {store.versions()[name] for name in store.names()} == {6}
            found.append(pulled(store))
    for name, values in found[0].items():
        np.testing.assert_allclose(values, found[1][name], rtol=1e-3, atol=1e-6, err_msg=name)


def test_pieces_several_consumers_and_uses_on_the_same_part():
    """The target is the sum of the gradients that all consumers return, each at its place."""
    torch.manual_seed(0)
    below, left, right = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(2, 1)
    graph = Graph()
    hidden = graph.node("hidden", below, graph.input("x"), part=0)
    targets = []

    class Spy(nn.Module):
        def forward(self, value):
            return torch.zeros_like(value)

    value = graph.decouple(hidden, Spy(), warm_up=1)
    whole = graph.node("left", left, value, part=1)
    piece = graph.node("right", right, value[:, 2:4], part=2)
    beside = graph.node("beside", lambda v: v.sum(1, keepdim=True), value, part=0)
    graph.loss(lambda a, b, c: (a * b + c).square().mean(), whole, piece, beside)
    x = torch.randn(5, 4)
    for threads in (False, True):
        with Replica.local(graph, threads) as replica:
            replica.step(x=x, micro_batches=2)
            targets.append({name: p.grad for name, p in replica.named_parameters()})
            zero_grad(replica)
            replica.step(x=x)  # warm no more: a gradient of zeros
            assert not dict(replica.named_parameters())["hidden.weight"].grad.any()
            assert set(replica.stats()["edges"]) >= {"hidden: 0 -> 1", "hidden[:, 2:4]: 0 -> 2"}
            zero_grad(replica)
    h = below(x)
    (left(h) * right(h[:, 2:4]) + h.sum(1, keepdim=True)).square().mean().backward()
    for found in targets:
        torch.testing.assert_close(found["hidden.weight"], below.weight.grad)
        torch.testing.assert_close(found["right.bias"], right.bias.grad)


def test_a_value_without_gradient_passes_as_it_is():
    graph = Graph()
    fixed = graph.node("fixed", lambda x: x * 2, graph.input("x"), part=0)
    out = graph.node("out", nn.Linear(3, 1), graph.decouple(fixed, SyntheticGradient(3)), part=1)
    graph.loss(lambda v: v.mean(), out)
    with Replica.local(graph, threads=True) as replica:
        for _ in range(6):
            replica.step(x=torch.ones(2, 3))
        assert replica.stats()["edges"]["fixed: 0 -> 1"]["lag"] == {}


def test_a_prediction_needs_no_predictor_and_no_condition():
    for threads in (False, True):
        modules = stacks(3, 2)
        with Replica.local(decoupled(modules), threads) as replica:
            x = digits()[0][:7]
            found = replica.eval().predict(image=x)["logits"]
            assert torch.equal(found, nn.Sequential(*modules).eval()(x))
            assert replica.modules["part0.synthetic"].training is False


def test_the_whole_model_s_state_has_no_predictors(ps):
    graph = decoupled(stacks(3, 2))
    with Replica.local(graph) as replica:
        names = [name for name, _ in replica.named_parameters()]
        replica.optimizer(ps, RULES["sgd"]).close()
        assert {ps.spec(name).group for name in names if "synthetic" in name} == {"part0"}
    assert list(graph.state_dict(ps)) == [name for name in names if "synthetic" not in name]
    graph.load_state_dict(ps, graph.state_dict(ps))


def test_clipping_leaves_predictors_out():
    norms = []
    for how, options in (("backprop", {}), ("cdni", {"warm_up": 9})):
        with Replica.local(decoupled(stacks(3, 2), how, **options)) as replica:
            x, y = digits()[:2]
            replica.step(image=x[:50], label=y[:50])
            norms.append(replica.clip_grad_norm_(0.1))
            grads = {n: p.grad for n, p in replica.named_parameters() if "synthetic" not in n}
            assert torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt() < 0.1001
    assert norms[0] == norms[1]
    with Replica.local(decoupled(stacks(3, 2))) as replica:  # two norms, one for each part
        replica.step(image=x[:50], label=y[:50])
        replica.clip_grad_norm_(1e-3)
        above = [p.grad for n, p in replica.named_parameters() if n.startswith("part1")]
        assert torch.stack([g.square().sum() for g in above]).sum().sqrt() == pytest.approx(1e-3, rel=1e-2)


# -- predictors ----------------------------------------------------------------------------------------------


def test_predictors_begin_with_zeros_and_take_labels():
    value, labels = torch.randn(4, 6), torch.tensor([0, 2, 1, 2])
    images = torch.randn(4, 6, 5, 7)
    cases = [
        (SyntheticGradient(6), value),
        (SyntheticGradient(6, hidden=(8, 9)), value),
        (SyntheticGradient(6, labels=3, hidden=[8]), value),
        (SyntheticGradient.conv(6), images),
        (SyntheticGradient.conv(6, labels=3, hidden=[4], kernel=3), images),
    ]
    for predictor, given in cases:
        conditions = [labels] if predictor.labels else []
        assert torch.equal(predictor(given, *conditions), torch.zeros_like(given))
        optimizer = torch.optim.Adam(predictor.parameters(), lr=0.05)
        target = given * 0.3 + (labels.view(-1, *[1] * (given.ndim - 1)) if conditions else 0)
        losses = []
        for _ in range(200):
            optimizer.zero_grad()
            losses.append((predictor(given, *conditions) - target).square().mean())
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < 0.05 * losses[0]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: SyntheticGradient(0), "features"),
        (lambda: SyntheticGradient(3, labels=-1), "labels"),
        (lambda: SyntheticGradient(3, hidden=[0]), "hidden"),
        (lambda: SyntheticGradient.conv(3, kernel=5), "kernel.*1 or 3.*5"),
        (lambda: SyntheticGradient(3)(torch.ones(2, 4)), r"\(rows, 3\).*\(2, 4\)"),
        (lambda: SyntheticGradient(3)(torch.ones(2, 3), torch.ones(2)), "none, got 1"),
        (lambda: SyntheticGradient(3, labels=2)(torch.ones(2, 3)), "labels, got 0"),
        (lambda: SyntheticGradient(3, labels=2)(torch.ones(2, 3), torch.ones(2)), "integers.*float32"),
        (lambda: SyntheticGradient.conv(3)(torch.ones(2, 3)), r"height, width\).*\(2, 3\)"),
    ],
)
def test_predictors_that_are_refused(make, match):
    with pytest.raises(fastps.ConfigError, match=match):
        make()


# -- what is refused -----------------------------------------------------------------------------------------


def refused(match, kind=fastps.ConfigError):
    return pytest.raises(kind, match=match)


def test_decouplings_that_are_refused_while_the_graph_is_built():
    graph = Graph()
    x, y = graph.input("x"), graph.input("y")
    hidden = graph.node("hidden", nn.Linear(3, 3), x, part=0)
    other = graph.node("other", nn.Linear(3, 3), hidden, part=1)
    predictor = SyntheticGradient(3)
    with refused('edge "x".*the value of a node.*an input'):
        graph.decouple(x, predictor)
    for ahead in (0, -1, True, 1.5):
        with refused('edge "hidden".*ahead >= 1'):
            graph.decouple(hidden, predictor, ahead=ahead)
    with refused('edge "hidden".*warm_up >= 0'):
        graph.decouple(hidden, predictor, warm_up=-1)
    with refused('edge "hidden".*values of part 0.*other of part 1'):
        graph.decouple(hidden, predictor, y, other)
    with refused('edge "hidden".*a module or function'):
        graph.decouple(hidden, 3)
    with refused('edge "hidden".*a module or function'):
        graph.decouple(hidden, predictor, make=lambda: predictor)
    with refused('unknown handle.*"hidden.synthetic".*another graph'):
        graph.decouple(hidden, predictor, Graph().input("y"))
    value = graph.decouple(hidden[:, :2], y, make=lambda: SyntheticGradient(2, labels=2))
    assert repr(value) == "hidden.synthetic"
    with refused("one name"):
        graph.decouple(hidden, predictor)
    with refused('edge "hidden.synthetic".*once'):
        graph.decouple(value, predictor)
    above = graph.node("above", nn.Linear(2, 3), value, part=1)
    graph.decouple(above, predictor)
    with refused('edge "other".*of its own.*"above.synthetic"'):
        graph.decouple(other, predictor)


def chain(predictor, *conditions, below=None, options=None):
    """Two parts, decoupled."""
    graph = Graph()
    handles = {"x": graph.input("x")}
    hidden = graph.node("hidden", below or nn.Linear(3, 4), handles["x"], part=0)
    value = graph.decouple(hidden, predictor, *(handles[name] for name in conditions), **(options or {}))
    out = graph.node("out", nn.Linear(4, 1), value, part=1)
    graph.loss(lambda v: v.square().mean(), out)
    return graph


def test_nothing_above_a_decoupled_value():
    graph = Graph()
    out = graph.node("out", nn.Linear(3, 1), graph.input("x"), part=0)
    graph.loss(lambda v: v.mean(), graph.decouple(out, SyntheticGradient(1)))
    with refused('nothing is above.*edge "out", part 0.*another part.*"loss" on the same part'):
        Replica.local(graph)
    graph = Graph()
    out = graph.node("out", nn.Linear(3, 1), graph.input("x"), part=0)
    graph.decouple(out, SyntheticGradient(1))
    graph.loss(lambda v: v.mean(), out)
    with refused('nothing is above.*edge "out".*got none'):
        Replica.local(graph)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(
    ("predictor", "match"),
    [
        (nn.Linear(4, 3), r"shape \(6, 4\), got \(6, 3\)"),
        (nn.Linear(3, 4), r"shape \(6, 4\), got RuntimeError: .*6x4 and 3x4"),
        (SyntheticGradient(5), r"shape \(6, 4\), got ConfigError: .*\(rows, 5\).*\(6, 4\)"),
        (SyntheticGradient(4, labels=2), r"shape \(6, 4\), got ConfigError: .*the labels, got 0"),
        (lambda value: 3, r"shape \(6, 4\), got int"),
    ],
    ids=["output", "input", "features", "labels", "number"],
)
@pytest.mark.parametrize("warm_up", [0, 5])
def test_a_predictor_of_the_wrong_shape(predictor, match, threads, warm_up):
    graph = chain(predictor, options={"warm_up": warm_up})
    with (
        Replica.local(graph, threads) as replica,
        refused(f'the predictor does not fit .edge "hidden: 0 -> 1".*{match}'),
    ):
        replica.step(x=torch.ones(6, 3))


def test_a_predictor_that_fails_later_is_named():
    class Late(SyntheticGradient):
        calls = 0

        def forward(self, value):
            self.calls += 1
            if self.calls == 3:
                raise ValueError("no such row")
            return super().forward(value)

    with Replica.local(chain(Late(4))) as replica:
        replica.step(x=torch.ones(6, 3))
        with refused('"hidden.synthetic", step 1, micro-batch 0.: ValueError: no such row', NodeError):
            replica.step(x=torch.ones(6, 3))


@pytest.mark.parametrize("threads", [False, True])
def test_a_predictor_that_gives_nan(threads):
    class Spoiled(SyntheticGradient):
        spoils = False

        def forward(self, value):
            return super().forward(value) * (torch.nan if self.spoils else 1)

    graph = chain(Spoiled(4))
    with fastps.Store() as store, Replica.local(graph, threads) as replica:
        optimizer = replica.optimizer(store, RULES["sgd"])
        for step in range(3):
            replica.modules["hidden.synthetic"].spoils = step == 1
            optimizer.zero_grad()
            if step == 1:
                with refused('not finite .edge "hidden: 0 -> 1", step 1', fastps.NonFiniteError):
                    replica.step(x=torch.ones(6, 3))
            else:
                replica.step(x=torch.ones(6, 3))
                optimizer.step()
        assert store.versions("hidden.weight")["hidden.weight"] == 3
        optimizer.close()


def test_a_target_that_is_not_finite():
    """Nothing above has parameters that would show it."""
    graph = Graph()
    hidden = graph.node("hidden", nn.Linear(3, 4), graph.input("x"), part=0)
    scale = graph.input("scale")
    out = graph.node("out", torch.mul, graph.decouple(hidden, SyntheticGradient(4)), scale, part=1)
    graph.loss(lambda v: v.mean(), out)
    with Replica.local(graph) as replica, refused('edge "hidden: 0 -> 1", step 1', fastps.NonFiniteError):
        for value in (1.0, torch.inf):
            replica.step(x=torch.ones(6, 3), scale=torch.tensor(value))


def test_sync_is_refused_because_some_steps_push_no_gradient_of_predictors(ps):
    for mode in (fastps.Sync(workers=2), fastps.WarmStart(steps=2, then=fastps.Sync(workers=2))):
        with Replica.local(chain(SyntheticGradient(4))) as replica:
            with refused('edge "hidden: 0 -> 1".*no target is due pushes no gradient'):
                replica.optimizer(ps, RULES["sgd"], mode)
            with replica.optimizer(ps, RULES["sgd"], fastps.Bounded(staleness=1)) as optimizer:
                replica.step(x=torch.ones(6, 3))
                optimizer.step()


@pytest.mark.parametrize("threads", [False, True])
def test_schedules_follow_the_model_and_not_a_predictor(threads):
    """A predictor has the smallest tensor, and takes no step in the first ones."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1))

        def forward(self, value):
            return value * self.scale

    graph = chain(Scale())
    graph.nodes_by_name["out"].module = nn.Linear(4, 1, bias=False)
    with fastps.Store() as store, Replica.local(graph, threads, delay=3) as replica:
        global_steps = []
        optimizer = replica.optimizer(
            store, RULES["sgd"], on_step=lambda step: global_steps.append(step.global_step)
        )
        schedule = fastps.torch.GlobalSchedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        for _ in range(5):
            optimizer.zero_grad()
            replica.step(x=torch.ones(6, 3))
            optimizer.step()
            schedule.step()
        assert (optimizer.global_step, global_steps) == (5, [1, 2, 3, 4, 5])
        assert schedule.get_last_lr() == [RULES["sgd"].lr / 2**5]
        assert store.versions()["hidden.synthetic.scale"] < 6
        optimizer.close()


def test_a_delay_is_a_number_of_steps():
    with refused("delay.*integer >= 0"):
        Replica.local(chain(SyntheticGradient(4)), delay=-1)
    _, _, edges = run(decoupled(stacks(3, 2)), 8, threads=True, delay=3)
    assert edges["part0: 0 -> 1"]["lag"] == {3: 5}
