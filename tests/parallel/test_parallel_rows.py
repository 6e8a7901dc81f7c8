"""Images cut by rows: border rows travel, weights are shared or each part's own."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path

import pytest
import torch
from models import cross_entropy
from torch import nn

import fastps
from fastps.torch.parallel import Graph, Replica
from fastps.torch.parallel.links.messages import Kind
from fastps.torch.parallel.links.queues import Queues

ROOT = Path(__file__).resolve().parents[2]
SIDE = 12


def example():
    spec = importlib.util.spec_from_file_location("model_parallel", ROOT / "examples/model_parallel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def close(found, expected, tolerance):
    """Within a tolerance, relative to the largest."""
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


class Images(nn.Module):
    """A batch of images as a parameter, so that its gradient can be read."""

    def __init__(self, images):
        super().__init__()
        self.images = nn.Parameter(images)

    def forward(self, _):
        return self.images


class Local(nn.Module):
    """A locally connected layer: each position has its own weights for its 3 x 3 neighbourhood."""

    def __init__(self, weight, top, bottom):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.zeros = (1, 1, int(top), int(bottom))

    def forward(self, *rows):
        padded = nn.functional.pad(torch.cat(rows, 2), self.zeros)
        patches = padded.unfold(2, 3, 1).unfold(3, 3, 1)[:, 0]
        return torch.tanh((patches * self.weight).sum((-1, -2)))[:, None]


def kinds_sent(monkeypatch):
    """The kinds of all messages between threads, from now on."""
    found, send = set(), Queues.send

    def sends(self, part, message):
        found.add(message.kind)
        send(self, part, message)

    monkeypatch.setattr(Queues, "send", sends)
    return found


def split_rows(parts):
    return [SIDE // 2 * k // parts * 2 for k in range(parts)] + [SIDE]


@pytest.mark.parametrize("parts", [2, 3])
def test_a_convolutional_net_cut_by_rows(parts, monkeypatch):
    torch.manual_seed(0)
    rows, bounds = example(), split_rows(parts)
    images, labels = torch.randn(5, 1, SIDE, SIDE), torch.randint(0, 10, (5,))
    kinds, results = kinds_sent(monkeypatch), []
    for _ in range(2):
        graph = Graph()
        source = graph.node("images", Images(images.clone()), graph.input("given"), part=0)
        logits = rows.by_rows(graph, source, SIDE, parts)
        graph.loss(cross_entropy, logits, graph.input("label"))
        graph.output("logits", logits)
        with Replica.local(graph, threads=True, timeout=30) as replica:
            replica.step(given=torch.zeros(()), label=labels)
            found = replica.predict(given=torch.zeros(()))["logits"]
            grads = {name: param.grad for name, param in replica.named_parameters()}
            modules = replica.modules
        results.append((found, grads))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in grads)
    assert {Kind.PARAMETER, Kind.PARAMETER_GRADIENT} <= kinds

    conv1, conv2 = (nn.Conv2d(*channels, 3, padding=1) for channels in ((1, 16), (16, 16)))
    for name, conv in (("conv1", conv1), ("conv2", conv2)):
        conv.load_state_dict(modules[f"{name}.0"].conv.state_dict())
    whole = images.clone().requires_grad_()
    hidden = torch.relu(conv2(torch.relu(conv1(whole))))
    expected = sum(
        modules[f"head.{k}"](hidden[:, :, a:b]) for k, (a, b) in enumerate(itertools.pairwise(bounds))
    )
    cross_entropy(expected, labels).backward()
    close(found, expected.detach(), 1e-6)
    close(grads["images.images"], whole.grad, 1e-6)
    for name, conv in (("conv1", conv1), ("conv2", conv2)):
        close(grads[f"{name}.conv.weight"], conv.weight.grad, 1e-5)
        close(grads[f"{name}.conv.bias"], conv.bias.grad, 1e-5)


@pytest.mark.parametrize("parts", [2, 3])
def test_a_locally_connected_layer_sends_no_gradient_of_a_parameter(parts, monkeypatch):
    torch.manual_seed(0)
    weights = [torch.randn(SIDE, SIDE, 3, 3) for _ in range(2)]
    images, targets = torch.randn(5, 1, SIDE, SIDE), torch.randn(5, 1, SIDE, SIDE)
    bounds, last = split_rows(parts), parts - 1
    graph = Graph()
    image, layer = graph.input("image"), []
    for k, (a, b) in enumerate(itertools.pairwise(bounds)):
        own = image[:, :, max(a - 1, 0) : min(b + 1, SIDE)]
        layer.append(graph.node(f"one.{k}", Local(weights[0][a:b], k == 0, k == last), own, part=k))
    ends = []
    for k, (a, b) in enumerate(itertools.pairwise(bounds)):
        above = [layer[k - 1][:, :, -1:]] if k > 0 else []
        below = [layer[k + 1][:, :, :1]] if k < last else []
        module = Local(weights[1][a:b], k == 0, k == last)
        ends.append(graph.node(f"two.{k}", module, *above, layer[k], *below, part=k))
    graph.loss(
        lambda *rows: nn.functional.mse_loss(torch.cat(rows[:-1], 2), rows[-1]), *ends, graph.input("y")
    )
    kinds = kinds_sent(monkeypatch)
    with Replica.local(graph, threads=True, timeout=30) as replica, fastps.Store() as store:
        optimizer = replica.optimizer(store, fastps.SGD(lr=0.1))
        replica.step(image=images, y=targets)
        grads = {name: param.grad for name, param in replica.named_parameters()}
        edges = replica.stats()["edges"]
        optimizer.close()
    whole = [nn.Parameter(weight) for weight in weights]
    layers = [Local(weight.detach(), True, True) for weight in whole]
    nn.functional.mse_loss(layers[1](layers[0](images)), targets).backward()
    for name, module in zip(("one", "two"), layers, strict=True):
        found = torch.cat([grads[f"{name}.{k}.weight"] for k in range(parts)])
        close(found, module.weight.grad, 1e-5)
    assert not {Kind.PARAMETER, Kind.PARAMETER_GRADIENT} & kinds
    rows = {name: edge for name, edge in edges.items() if name.startswith("one")}
    assert len(rows) == 2 * (parts - 1)
    assert all(edge["value_bytes"] == edge["gradient_bytes"] == 5 * SIDE * 4 for edge in rows.values())


@pytest.mark.parametrize("partition", ["layers", "rows"])
def test_the_example_trains(partition, monkeypatch, capsys, tmp_path):
    """All parts in this process, on the package's digits."""
    monkeypatch.delenv("FASTPS_DATA_DIR", raising=False)
    with fastps.serve(shards=2) as server:
        options = [
            "--partition",
            partition,
            "--parts",
            "2",
            "--epochs",
            "2",
            "--record",
            str(tmp_path / "steps"),
        ]
        monkeypatch.setattr("sys.argv", ["model_parallel.py", server.addresses, *options])
        example().main()
        with fastps.connect(server.addresses) as ps:
            assert {ps.versions(name)[name] for name in ps.names()} == {1 + 2 * 23}
    printed = capsys.readouterr().out
    assert float(re.findall(r"epoch 2  accuracy (\S+)", printed)[0]) > 0.8, printed
    assert len((tmp_path / "steps").read_text().splitlines()) == 1 + 2 * 23 + 1
