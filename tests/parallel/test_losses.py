"""Losses of micro-batches: together they are the loss of the whole batch, whatever its reduction."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastps
from fastps.torch.parallel import Graph, Replica

ROWS, CLASSES = 10, 5
WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 4.0, 0.5])


def weighted(logits, target):
    """The sum and the weight of a cross-entropy with class weights and ignored targets."""
    total = F.cross_entropy(logits, target, WEIGHTS, ignore_index=0, reduction="sum")
    return total, WEIGHTS[target][target != 0].sum()


def plain(logits, target):
    return F.cross_entropy(logits, target, WEIGHTS, ignore_index=0)


def summed(logits, target):
    return F.cross_entropy(logits, target, reduction="sum")


def batch(ignored=range(5)):
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 3), torch.randint(1, CLASSES, (ROWS,))
    y[list(ignored)] = 0
    return x, y


def graph(loss, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    return Graph.sequential(model, [1], loss, **options), model


def stepped(graph, micro_batches, threads, data):
    with Replica.local(graph, threads, timeout=30) as replica:
        loss = replica.step(input=data[0], target=data[1], micro_batches=micro_batches)
        return loss, {name: param.grad for name, param in replica.named_parameters()}


CASES = [
    (weighted, {}, plain),
    (summed, {"reduction": "sum"}, summed),
    (nn.CrossEntropyLoss(reduction="sum"), {}, summed),
    (functools.partial(F.cross_entropy, reduction="sum"), {"reduction": "sum"}, summed),
    (nn.CrossEntropyLoss(), {}, F.cross_entropy),
    (F.cross_entropy, {"reduction": "mean"}, F.cross_entropy),
]


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3, 4])
@pytest.mark.parametrize(("loss", "options", "whole"), CASES)
def test_micro_batches_do_not_change_the_loss(loss, options, whole, micro_batches, threads):
    made, model = graph(loss, **options)
    x, y = batch()
    expected = whole(model(x), y)
    expected.backward()
    gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    found, grads = stepped(made, micro_batches, threads, (x, y))
    assert found == pytest.approx(expected.item(), rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(grads[name], gradient)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("ignored", [range(2), range(5)])  # in the second case all targets of a micro-batch
@pytest.mark.parametrize("loss", [plain, summed, nn.CrossEntropyLoss(ignore_index=0)])
def test_a_loss_that_is_no_mean_over_rows_says_what_it_is(loss, ignored, threads):
    made, _ = graph(loss)
    with pytest.raises(fastps.FastpsError, match=r"no mean over rows.*\(sum, weight\)"):
        stepped(made, 4, threads, batch(ignored))
    stepped(graph(loss)[0], 1, threads, batch(ignored))


def test_the_first_step_compares_and_the_others_do_not():
    calls = []

    def counted(logits, target):
        calls.append(len(target))
        return F.cross_entropy(logits, target)

    made, _ = graph(counted)
    x, y = batch()
    with Replica.local(made) as replica:
        for _ in range(2):
            replica.step(input=x, target=y, micro_batches=2)
    assert calls == [5, 5, 10, 5, 5]


def test_a_loss_that_draws_random_numbers_is_taken_as_a_mean():
    def noisy(logits, target):
        return F.cross_entropy(logits, target) + torch.rand(())

    stepped(graph(noisy)[0], 4, False, batch())


def test_inputs_of_the_loss_that_have_no_rows_are_the_same_for_all():
    torch.manual_seed(0)
    made = Graph()
    out = made.node("out", nn.Linear(3, 1), made.input("x"), part=0)
    made.loss(lambda v, s: (v * s).mean(), out, made.input("s"))
    with Replica.local(made) as replica:
        replica.step(x=torch.ones(7, 3), s=torch.tensor(2.0), micro_batches=3)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("loss", [plain, weighted])
def test_a_loss_that_is_not_finite_raises_and_training_continues(loss, micro_batches, threads):
    """All targets are ignored: torch's loss is NaN, and its gradients are 0."""
    made, _ = graph(loss)
    with Replica.local(made, threads, timeout=30) as replica, fastps.Store() as store:
        optimizer = replica.optimizer(store, fastps.SGD(lr=0.1))
        x, y = batch(ignored=range(ROWS))
        with pytest.raises(fastps.NonFiniteError, match=r'loss is not finite \(part 1, node "loss", step 0'):
            replica.step(input=x, target=y, micro_batches=micro_batches)
        optimizer.zero_grad()
        replica.step(input=x, target=batch(ignored=())[1])
        optimizer.step()
        optimizer.close()


BAD = [
    (lambda z, y: (z.sum(), -1.0), "expected a weight that is a finite number >= 0, got float"),
    (lambda z, y: (z.sum(), torch.ones(2)), r"a finite number >= 0, got \(2,\)"),
    (lambda z, y: (z.sum(), 1.0, 1.0), "a tuple of that and a weight"),
    (lambda z, y: (1.0, z), "a tuple of that and a weight"),
    (lambda z, y: (), "a tuple of that and a weight"),
    (lambda z, y: (z.sum(), 2.0) if len(y) == 3 else z.sum(), "a weight for each micro-batch, or for none"),
]


@pytest.mark.parametrize(("loss", "text"), BAD)
def test_a_bad_weight_is_refused(loss, text):
    with pytest.raises(fastps.ConfigError, match=text):
        stepped(graph(loss)[0], 4, False, batch())


def test_a_bad_reduction_is_refused():
    with pytest.raises(fastps.ConfigError, match="invalid reduction: expected 'mean', 'sum' or None"):
        graph(plain, reduction="none")
