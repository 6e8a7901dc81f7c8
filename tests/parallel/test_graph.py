"""Graphs: what they compute, in one process with and without threads, and what they refuse."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CUTS, RULES, batch, chain, cnn, cross_entropy, factories, mlp, pulled, train, unsplit
from torch import nn

import fastps
from fastps.torch import parallel
from fastps.torch.parallel import Graph, NodeError, Replica
from fastps.torch.parallel.pieces import summed

MODELS = {"mlp": mlp, "cnn": cnn}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def local(graph, threads=False, **options):
    return Replica.local(graph, threads, timeout=30, **options)


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


# -- the same bits as the whole model ------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("model", "parts"), CUTS)
def test_a_cut_chain_has_the_bits_of_the_whole_model(model, parts, micro_batches, threads):
    for rule in RULES.values():
        whole = unsplit(MODELS[model](), micro_batches, rule)
        with fastps.Store() as store, local(chain(model, CUTS[model, parts]), threads) as replica:
            train(replica, store, micro_batches, rule)
            same(pulled(store), whole)


def test_dropout_draws_the_same_wherever_a_node_is():
    found = []
    for cuts, threads in (([4], False), ([4], True), ([2, 4], True), ([], False), ([1, 2, 3, 6], False)):
        torch.manual_seed(len(cuts))  # which the masks do not depend on
        with fastps.Store() as store, local(chain("cnn", cuts, 0.3), threads) as replica:
            train(replica, store, 4, RULES["adam"], steps=6)
            found.append(pulled(store))
    for others in found[1:]:
        same(found[0], others)
    other = chain("cnn", CUTS["cnn", 2], 0.3)
    with fastps.Store() as store, local(other, number=1) as replica:
        train(replica, store, 4, RULES["adam"], steps=6)
        assert any((store.pull(name) != found[0][name]).any() for name in found[0])  # another replica's


def test_a_layer_that_a_chain_has_twice():
    drop, linear, found = nn.Dropout(0.3), nn.Linear(8, 8), []
    for cuts in ([], [1], [2], [1, 2]):
        graph = Graph.sequential(nn.Sequential(drop, linear, drop), cuts, nn.functional.mse_loss)
        with local(graph) as replica:
            found.append(replica.predict(input=torch.ones(3, 8))["output"])
    assert all(torch.equal(found[0], other) for other in found)


def test_a_factory_that_draws_nothing_makes_what_draws():
    found = []
    for threads in (False, True):
        graph = Graph(seed=4)
        drop = graph.node("drop", graph.input("x"), part=0, make=lambda: nn.Dropout(0.5))
        graph.output("dropped", graph.node("same", nn.Identity(), drop, part=1))
        graph.loss(lambda v: v.mean(), graph.node("out", nn.Linear(9, 1), drop, part=1))
        with local(graph, threads) as replica:
            found += [replica.predict(x=torch.ones(5, 9))["dropped"] for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(found[:3], found[3:], strict=True))


def test_the_generator_of_the_program_stays_as_it_was():
    graph = chain("mlp", [3], 0.5)
    before = torch.get_rng_state()
    with local(graph) as replica:
        x, y = batch(0)
        replica.step(input=x, target=y)
    assert torch.equal(torch.get_rng_state(), before)


# -- values and gradients ------------------------------------------------------------------------------------


def gradients(graph, threads=False, micro_batches=1, **inputs):
    with local(graph, threads) as replica:
        loss = replica.step(micro_batches=micro_batches, **inputs)
        return loss, {name: param.grad for name, param in replica.named_parameters()}


def test_gradients_of_pieces_are_summed_apart_from_the_whole_one():
    """Another node may have the whole gradient, too."""
    value, whole, piece = torch.zeros(3), torch.ones(3), torch.ones(1)
    for gradients in (
        [((), whole), ((slice(1),), piece)],
        [((slice(1),), piece), ((), whole)],
    ):
        total = summed([*gradients, ((2,), None)], value)
        assert total is not None
        assert total.tolist() == [2, 1, 1], gradients
        assert (whole.tolist(), piece.tolist(), value.tolist()) == ([1] * 3, [1], [0] * 3)
    assert summed([((), None)], value) is None


@pytest.mark.parametrize("threads", [False, True])
def test_a_diamond_a_skip_and_pieces_used_twice(threads):
    torch.manual_seed(0)
    a, b, c, d = (nn.Linear(8, 8) for _ in range(4))
    head = nn.Linear(8, 1)
    graph = Graph()
    x = graph.input("x")
    top = graph.node("a", a, x[:, :8], part=0)
    left = graph.node("b", b, top, part=1)
    right = graph.node("c", c, top, part=2)
    piece = top[:, 2:6]

    def join(x, y, skip, one, again):
        return x * y + skip + torch.cat([one, again], 1) + one[:, :1]

    joined = graph.node("join", join, left, right, top, piece, piece, part=2)  # a skip over part 1
    late = graph.node("d", d, joined, part=1)
    out = graph.node("head", head, graph.node("add", torch.add, late, top[:, -1:], part=1), part=0)
    graph.loss(nn.functional.mse_loss, out, graph.input("y"))

    x, y = torch.randn(6, 9), torch.randn(6, 1)
    modules = [copy.deepcopy(module) for module in (a, b, c, d, head)]
    top = modules[0](x[:, :8])
    joined = join(modules[1](top), modules[2](top), top, top[:, 2:6], top[:, 2:6])
    loss = nn.functional.mse_loss(modules[4](modules[3](joined) + top[:, -1:]), y)
    loss.backward()
    found, grads = gradients(graph, threads, x=x, y=y)
    assert found == pytest.approx(loss.item())
    for name, module in zip(("a", "b", "c", "d", "head"), modules, strict=True):
        torch.testing.assert_close(grads[f"{name}.weight"], module.weight.grad)
        torch.testing.assert_close(grads[f"{name}.bias"], module.bias.grad)


@pytest.mark.parametrize("threads", [False, True])
def test_values_without_a_gradient_and_unused_ones(threads):
    """Integers and masks go forward only; an output that the loss does not need answers that it has none."""
    torch.manual_seed(0)
    table, head = nn.Embedding(10, 4), nn.Linear(4, 1)
    graph = Graph()
    ids = graph.input("ids")
    both = graph.node("look up", lambda i: (i % 10, i > 5, i.to(torch.float16)), ids, part=0)
    index, mask, half = graph.outputs(both, 3)
    rows = graph.node("table", table, index, part=1)
    pair = graph.outputs(graph.node("two", lambda r: (r * 2, r.detach() + 1, r * 3), rows, part=1), 3)

    def both_masked(r, plain, mask, half):
        return (r + plain) * mask[..., None] + half[..., None] * 0

    masked = graph.node("masked", both_masked, pair[0], pair[1], mask, half, part=0)
    unused = graph.node("unused", lambda m, p: m + 0 * p.detach(), masked, pair[2], part=2)
    out = graph.node("head", head, unused, part=1)
    graph.loss(nn.functional.mse_loss, out, graph.input("y"))
    ids, y = torch.arange(12).reshape(12, 1) % 15, torch.randn(12, 1, 1)
    _, grads = gradients(graph, threads, micro_batches=3, ids=ids, y=y)

    expected = copy.deepcopy(table), copy.deepcopy(head)
    rows = expected[0](ids % 10)
    value = expected[1]((rows * 2 + rows.detach() + 1) * (ids > 5)[..., None])
    nn.functional.mse_loss(value, y).backward()
    torch.testing.assert_close(grads["table.weight"], expected[0].weight.grad)
    torch.testing.assert_close(grads["head.weight"], expected[1].weight.grad)


@st.composite
def graphs(draw):
    """Up to 8 nodes on 3 parts: each adds some of the values before it, whole or a piece, on a part."""
    nodes = []
    for k in range(draw(st.integers(1, 8))):
        sources = draw(st.lists(st.integers(-1, k - 1), min_size=1, max_size=3))
        pieces = [draw(st.booleans()) for _ in sources]
        nodes.append((draw(st.integers(0, 2)), list(zip(sources, pieces, strict=True))))
    return nodes, draw(st.integers(1, 3)), draw(st.integers(0, 2**16))


class Mixed(nn.Module):
    """Adds its inputs, pieces at their place, and multiplies."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator) / 2)

    def forward(self, *values):
        total = torch.zeros(len(values[0]), 4)
        for value in values:
            total = total + (value if value.shape[1] == 4 else nn.functional.pad(value, (1, 1)))
        return torch.tanh(total @ self.weight)


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_random_graphs_agree_with_one_autograd_pass(case):
    nodes, micro_batches, seed = case
    modules = [Mixed(seed + k) for k in range(len(nodes))]
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)

    graph = Graph()
    handles, values, plain = {-1: graph.input("x")}, {-1: x}, copy.deepcopy(modules)
    used = set()
    parts = {part for part, _ in nodes}
    numbers = {part: k for k, part in enumerate(sorted(parts))}
    for k, (part, sources) in enumerate(nodes):
        taken = [handles[s][:, 1:3] if piece else handles[s] for s, piece in sources]
        handles[k] = graph.node(f"node{k}", modules[k], *taken, part=numbers[part])
        values[k] = plain[k](*(values[s][:, 1:3] if piece else values[s] for s, piece in sources))
        used |= {s for s, _ in sources}
    ends = [k for k in range(len(nodes)) if k not in used]

    def distance(*everything):
        return sum((value - everything[-1]).square().mean() for value in everything[:-1])

    graph.loss(distance, *(handles[k] for k in ends), graph.input("y"))
    distance(*(values[k] for k in ends), y).backward()
    needs_x = -1 in used
    inputs = {"x": x, "y": y} if needs_x else {"y": y}
    assert needs_x  # the first node uses it
    _, grads = gradients(graph, True, micro_batches, **inputs)
    for k, module in enumerate(plain):
        torch.testing.assert_close(grads[f"node{k}.weight"], module.weight.grad, rtol=1e-4, atol=1e-6)


def test_unequal_micro_batches_are_weighted_by_their_rows():
    graph, whole = chain("mlp", [3]), mlp()
    x, y = batch(0, rows=7)
    loss = cross_entropy(whole(x), y)
    loss.backward()
    found, grads = gradients(graph, micro_batches=3, input=x, target=y)
    assert found == pytest.approx(loss.item())
    for name, param in whole.named_parameters():
        torch.testing.assert_close(grads[name], param.grad)


@pytest.mark.parametrize("threads", [False, True])
def test_a_loss_without_inputs_of_its_part_is_weighted_by_rows(threads):
    """Its part learns from messages how many rows a micro-batch has."""
    linear = nn.Linear(3, 1)
    graph = Graph()
    hidden = graph.node("hidden", linear, graph.input("x"), part=0)
    graph.loss(lambda v: v.mean(), graph.node("square", torch.square, hidden, part=1))
    x = torch.arange(21.0).reshape(7, 3)
    loss = linear(x).square().mean()
    loss.backward()
    expected, linear.weight.grad, linear.bias.grad = linear.weight.grad, None, None
    found, grads = gradients(graph, threads, micro_batches=3, x=x)
    assert found == pytest.approx(loss.item())
    torch.testing.assert_close(grads["hidden.weight"], expected)


def test_shapes_may_change_and_a_scalar_input_goes_to_all_micro_batches():
    graph = Graph()
    scaled = graph.node("scale", lambda x, s: x * s, graph.input("x"), graph.input("s"), part=0)
    graph.loss(lambda v: v.mean(), graph.node("linear", nn.Linear(3, 1), scaled, part=1))
    graph.output("scaled", scaled)
    with local(graph) as replica:
        for rows in (4, 9):
            replica.step(x=torch.ones(rows, 3), s=torch.tensor(2.0), micro_batches=3)
        assert replica.predict(x=torch.ones(5, 3), s=torch.tensor(3.0))["scaled"].tolist() == [[3.0] * 3] * 5


def test_shared_parameters_have_the_sum_of_their_gradients():
    torch.manual_seed(0)
    layer, head = nn.Linear(4, 4), nn.Linear(4, 2)

    def siamese(parts):
        graph = Graph()
        twins = [
            graph.node(f"twin{k}", copy.deepcopy(layer), graph.input(f"x{k}"), part=part, params="twin")
            for k, part in enumerate(parts)
        ]
        both = graph.node("head", copy.deepcopy(head), twins[0], part=parts[0])
        graph.loss(
            lambda h, *others: (h.sum(1) * sum(o.square().sum(1) for o in others)).mean(), both, *twins[1:]
        )
        return graph

    x = [torch.randn(5, 4) for _ in range(3)]
    inputs = {f"x{k}": value for k, value in enumerate(x)}
    values = [layer(value) for value in x]
    loss = (head(values[0]).sum(1) * (values[1].square() + values[2].square()).sum(1)).mean()
    loss.backward()
    for parts in ((0, 0, 0), (0, 1, 2), (1, 0, 1)):
        for threads in (False, True):
            with fastps.Store() as store, local(siamese(parts), threads) as replica:
                assert [n for n, _ in replica.named_parameters()].count("twin.weight") == 1
                optimizer = replica.optimizer(store, fastps.SGD(lr=0.1))
                for _ in range(2):
                    optimizer.zero_grad()
                    assert replica.step(**inputs) is not None
                    if store.versions("twin.weight")["twin.weight"] == 1:
                        found = dict(replica.named_parameters())["twin.weight"].grad
                        torch.testing.assert_close(found, layer.weight.grad)
                    optimizer.step()
                layers = [m for n, m in replica.modules.items() if n.startswith("twin")]
                replica.step(**inputs)
                assert all(torch.equal(m.weight, layers[0].weight) for m in layers)
                assert store.names() == ["head.bias", "head.weight", "twin.bias", "twin.weight"]
                optimizer.close()


@pytest.mark.parametrize("threads", [False, True])
def test_autocast_holds_for_all_parts(threads):
    """torch has it for one thread only."""
    x, y = batch(0)

    def dtypes():
        """Of what the parts give in a step."""
        found.clear()
        replica.step(input=x, target=y)
        return set(found)

    found = []
    with local(chain("mlp", [2]), threads) as replica:
        for part in ("0-1", "2-4"):
            replica.modules[part].register_forward_hook(lambda *call: found.append(call[2].dtype))
        plain = replica.step(input=x, target=y)
        with torch.autocast("cpu", torch.bfloat16):
            assert dtypes() == {torch.bfloat16}
            assert replica.predict(input=x)["output"].dtype == torch.bfloat16
        assert dtypes() == {torch.float32}
        assert replica.step(input=x, target=y) == plain


def test_factories_run_under_the_graph_s_seed():
    torch.manual_seed(1)
    with local(factories()) as one:
        torch.manual_seed(2)
        with local(factories(), threads=True) as other:
            pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
            assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def test_clipping_uses_the_norm_of_the_whole_model():
    for threads in (False, True):
        with local(chain("mlp", [2, 4]), threads) as replica:
            whole = mlp()
            x, y = batch(0)
            replica.step(input=x * 100, target=y)
            cross_entropy(whole(x * 100), y).backward()
            expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            assert replica.clip_grad_norm_(0.1) == pytest.approx(float(expected), rel=1e-5)
            for name, param in replica.named_parameters():
                torch.testing.assert_close(param.grad, dict(whole.named_parameters())[name].grad)


def test_prediction_stats_and_modes():
    graph = chain("mlp", [3], 0.5)
    whole = mlp(0.5).eval()
    with local(graph, threads=True) as replica:
        x, y = batch(0)
        assert torch.equal(replica.eval().predict(input=x)["output"], whole(x))
        assert not torch.equal(replica.train().predict(input=x)["output"], whole(x))
        assert not replica.predict(input=x)["output"].requires_grad
        before = replica.stats()["edges"]["0-2: 0 -> 1"]["values"]
        replica.step(input=x, target=y, micro_batches=2)
        stats = replica.stats()
        edge = stats["edges"]["0-2: 0 -> 1"]
        assert (stats["steps"], edge["values"] - before, edge["gradients"]) == (1, 2, 2)
        assert edge["gradient_bytes"] == 22 * 32 * 4
        assert stats["activation_bytes"] >= 22 * (32 + 10) * 4
        assert (replica.part, replica.parts, replica.nodes) == (None, 2, ["0-2", "3-5", "loss"])


def test_state_dict_of_the_whole_model(ps):
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    graph = Graph.sequential(model, [1], cross_entropy)
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items() if value.ndim}
    ps.register("0.weight", torch.zeros(8, 64).numpy(), optimizer=fastps.SGD(), group="part0")
    with pytest.raises(
        fastps.ConfigError, match=r'not on the servers: expected "0.bias", .*"2.weight", got .*; make'
    ):
        graph.state_dict(ps)
    with local(graph) as replica:
        optimizer = replica.optimizer(ps, fastps.SGD())
        graph.load_state_dict(ps, state)
        optimizer.pull_model()
        assert torch.equal(model[1].running_mean, state["1.running_mean"])
        assert all(torch.equal(value, state[name]) for name, value in graph.state_dict(ps).items())
        assert all(torch.equal(value, state[name]) for name, value in replica.named_parameters())
        assert list(graph.state_dict(ps)) == [name for name, _ in model.named_parameters()]
        assert {ps.spec(name).group for name in ("0.weight", "2.weight")} == {"part0", "part1"}
        with pytest.raises(fastps.ConfigError, match=r'missing "2\.bias", unknown "3\.bias"'):
            graph.load_state_dict(ps, {("3.bias" if n == "2.bias" else n): v for n, v in state.items()})
        for name in ("2.bias", "1.running_mean"):
            with pytest.raises(fastps.ConfigError, match=rf'tensor "{name}".*shape'):
                graph.load_state_dict(
                    ps, {key: value * 2 for key, value in state.items()} | {name: torch.ones(1)}
                )
        assert all(torch.equal(value, state[name]) for name, value in graph.state_dict(ps).items())
        optimizer.close()


# -- what is refused -----------------------------------------------------------------------------------------


def small(**changed):
    """A graph of two nodes."""
    graph = Graph()
    x = graph.input("x")
    a = graph.node("a", changed.get("a", nn.Linear(3, 3)), x, part=0)
    b = graph.node("b", changed.get("b", nn.Linear(3, 3)), a[changed.get("piece", slice(None))], part=1)
    return graph, x, a, b


def refused(match, kind=fastps.ConfigError):
    return pytest.raises(kind, match=match)


def test_graphs_that_are_refused_while_they_are_built():
    graph, x, a, b = small()
    with refused('two nodes have one name.*"a"'):
        graph.node("a", nn.ReLU(), x, part=0)
    with refused('unknown handle.*"c".*another graph'):
        graph.node("c", nn.ReLU(), Graph().input("x"), part=0)
    with refused('unknown handle.*"c"'):
        graph.node("c", nn.ReLU(), torch.ones(3), part=0)
    for part in (-1, True, 0.5):
        with refused('"c".*part'):
            graph.node("c", nn.ReLU(), x, part=part)
    with refused('"c".*factory'):
        graph.node("c", nn.ReLU(), x, part=0, make=nn.ReLU)
    with refused('"c".*factory'):
        graph.node("c", None, x, part=0)
    with refused('"c".*params'):
        graph.node("c", nn.ReLU(), x, part=0, params="")
    shared = nn.Linear(3, 3)
    graph.node("d", shared, x, part=0)
    with refused('"e".*same params.*"d"'):
        graph.node("e", shared, x, part=1)
    for piece in (slice(None, None, 2), None, "1", 1.5, True):
        with refused('piece of node "a"'):
            a[piece]
    with refused("one index"):
        a[0][1]
    with pytest.raises(TypeError):
        list(a)
    for name in ("", "micro_batches", "loss", "not a name"):
        with refused("input name"):
            graph.input(name)
    with refused("node name"):
        graph.node("loss", nn.ReLU(), x, part=0)
    two = graph.node("two", lambda x: (x, x), x, part=0)
    one, other = graph.outputs(two, 2)
    for again in (lambda: graph.outputs(two, 2), lambda: graph.outputs(a, 2), lambda: graph.outputs(x, 2)):
        with refused("not used yet"):
            again()
    with refused('"two" has several outputs.*"f"'):
        graph.node("f", nn.ReLU(), two, part=0)
    with refused("output that a node computes"):
        graph.output("o", x)
    graph.output("o", b)
    with refused('one name: expected another name, got "o"'):
        graph.output("o", b)
    with refused("value of a node first"):
        graph.loss(cross_entropy, x, b)
    graph.loss(cross_entropy, b, x)
    with refused("loss is given twice"):
        graph.loss(cross_entropy, b, x)
    with refused("cuts"):
        Graph.sequential(mlp(), [4, 2])
    assert other is not one


def test_graphs_that_are_refused_before_they_run():
    graph, _, a, b = small()
    with refused("no loss"):
        local(graph)
    graph.loss(lambda v: v.mean(), a)
    with refused('unused handle.*"b"'):
        local(graph)
    graph, *_, b = small()
    graph.loss(lambda v: v.mean(), graph.node("c", nn.ReLU(), b, part=3))
    with refused("part 2 has no node"):
        local(graph)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("part", [0, 1])
def test_shared_parameters_of_other_shapes_are_refused(part, threads):
    """Also those that would be broadcast."""
    for rows in (4, 1):
        graph = Graph()
        x = graph.input("x")
        first = graph.node("n0", nn.Linear(3, 3), x, part=0, params="p")
        second = graph.node("n1", nn.Linear(3, rows), x, part=part, params="p")
        graph.loss(lambda a, b: a.mean() + b.mean(), first, second)
        with refused(f'share parameters.*"n0" and "n1".*weight of 3, 3.*weight of {rows}, 3'):
            local(graph, threads)


def two_nodes(first, second, part=0):
    """A graph of two nodes, each given by a name and its other arguments."""
    graph = Graph()
    x = graph.input("x")
    values = [
        graph.node(name, x, part=at, **{"make": make, **options})
        for at, (name, make, options) in zip((0, part), (first, second), strict=True)
    ]
    graph.loss(lambda *each: sum(value.mean() for value in each), *values)
    return graph


@pytest.mark.parametrize("part", [0, 1])
def test_parameters_of_two_nodes_that_have_one_name_are_refused(part):
    def linear():
        return nn.Linear(3, 3)

    def nested():
        return nn.ModuleDict({"b": linear()})

    nested_one = ("a", nested, {}), ("a.b", linear, {})
    shared_one = ("a", linear, {}), ("c", linear, {"params": "a"})
    for first, second in (nested_one, shared_one, shared_one[::-1]):
        with refused(f'one name .nodes "{first[0]}" and "{second[0]}".*".*weight" twice'):
            local(two_nodes(first, second, part))
    graph = two_nodes(("a", linear, {"params": "a"}), ("c", linear, {"params": "a"}), part)
    with local(graph) as replica:  # which is no mistake
        assert [name for name, _ in replica.named_parameters()] == ["a.weight", "a.bias"]


def test_one_tensor_in_two_nodes_is_refused():
    layer = nn.Linear(3, 3)
    graph = Graph()
    x = graph.input("x")
    graph.node("a", nn.Sequential(layer, nn.ReLU()), x, part=0)
    with refused('"b".*same params.*"a"'):
        graph.node("b", nn.Sequential(nn.Flatten(), layer), x, part=1)
    with refused('"a.synthetic".*of its own.*"a"|edge "a".*of its own.*"a"'):
        graph.decouple(graph.handles["a"], layer)
    with refused('"loss".*of its own.*"a"'):
        graph.loss(layer, graph.handles["a"])
    made = two_nodes(("a", lambda: layer, {}), ("b", lambda: nn.Sequential(layer), {}), 1)
    with refused('same parameters .nodes "a" and "b"'):
        local(made)
    tied = nn.Sequential(layer, nn.ReLU(), layer)
    with refused('"2".*same params.*"0-1"'):
        Graph.sequential(tied, [2])


class Tied(nn.Module):
    """Has one parameter under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("how", ["same", "inside", "copy", "made"])
def test_a_module_that_two_nodes_share(how, part, threads):
    """A second part has a copy, as in a separate process."""
    x, module = torch.randn(5, 3), Tied()
    expected = copy.deepcopy(module)
    (expected(x).square().mean() + expected(x * 2).square().mean()).backward()
    pair = {
        "same": (module, module),
        "inside": (nn.Sequential(module), nn.Sequential(module)),
        "copy": (module, copy.deepcopy(module)),
        "made": (module, module),
    }[how]
    graph = Graph()

    def add(name, module, value, part):
        if how == "made":
            return graph.node(name, value, part=part, make=lambda: module, params="p")
        return graph.node(name, module, value, part=part, params="p")

    one = add("one", pair[0], graph.input("x"), 0)
    two = add("two", pair[1], graph.input("other"), part)
    graph.loss(lambda *each: sum(value.square().mean() for value in each), one, two)
    with local(graph, threads) as replica, fastps.Store() as store:
        optimizer = replica.optimizer(store, fastps.SGD(lr=0.1))
        replica.step(x=x, other=x * 2)
        for (_, found), wanted in zip(replica.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad)
        optimizer.step()
        replica.step(x=x, other=x)
        for name in ("one", "two"):
            own = replica.modules[name][0] if how == "inside" else replica.modules[name]
            assert own.first.weight is own.second.weight
            assert torch.equal(own.first.weight, module.first.weight)
        optimizer.close()


def test_what_is_refused_at_run_time():
    graph, *_, b = small(piece=slice(0, 5))
    graph.loss(lambda v: v.mean(), b)
    for threads in (False, True):
        match = r'piece out of range \(node "a"\).*\[0:5\].*\(3, 3\)'
        with local(graph, threads) as replica, refused(match):
            replica.step(x=torch.ones(3, 3))
    graph, *_, b = small()
    graph.loss(lambda v: v.mean(), b)
    with local(graph) as replica:
        with refused('input missing.*"x"'):
            replica.step()
        with refused('input missing.*"x".*ndarray'):
            replica.step(x=np.ones(3))
        with refused('unknown input "y"'):
            replica.step(x=torch.ones(3, 3), y=torch.ones(3))
        with refused("at least 4 rows, got 3"):
            replica.step(x=torch.ones(3, 3), micro_batches=4)
        with refused("no output"):
            replica.predict(x=torch.ones(3, 3))
        with refused("micro_batches"):
            replica.step(x=torch.ones(3, 3), micro_batches=0)
    with refused("closed"):
        replica.step(x=torch.ones(3, 3))
    for function, match in ((lambda x: 3, '"a".*got int'), (lambda x: (x, x), r'"a".*1 outputs.*\(3, 3\)')):
        graph, *_, b = small(a=function)
        graph.loss(lambda v: v.mean(), b)
        with local(graph) as replica, refused(match):
            replica.step(x=torch.ones(3, 3))
    graph, *_, b = small()
    graph.loss(lambda v: v, b)
    with local(graph) as replica, refused('"loss".*one element.*3, 3'):
        replica.step(x=torch.ones(3, 3))


@pytest.mark.parametrize("threads", [False, True])
def test_a_node_that_fails_is_named(threads):
    graph, *_, b = small(b=nn.Linear(4, 3))
    graph.loss(lambda v: v.mean(), b)
    with local(graph, threads) as replica:
        with refused('part 1, node "b", step 0, micro-batch 0.*RuntimeError.*mat1', NodeError) as caught:
            replica.step(x=torch.ones(3, 3))
        assert (caught.value.part, caught.value.node) == (1, "b")
        assert isinstance(caught.value.__cause__, RuntimeError)
        with refused("b" if not threads else "start again", fastps.FastpsError):
            replica.step(x=torch.ones(3, 3))


def test_a_function_that_changes_its_input_is_refused():
    for function in (torch.relu_, lambda x: x.add_(1)):
        graph, *_, b = small(b=function)
        graph.loss(lambda v: v.mean(), b)
        graph.output("b", b)
        with local(graph) as replica:
            with refused('"b"', NodeError):
                replica.step(x=torch.ones(3, 3))
            with refused('"b".*in place', NodeError):
                replica.predict(x=torch.ones(3, 3))


@pytest.mark.parametrize("threads", [False, True])
def test_a_gradient_that_is_not_finite_counts_nowhere(threads):
    with local(chain("mlp", [3]), threads) as replica, fastps.Store() as store:
        optimizer = replica.optimizer(store, fastps.SGD(lr=0.1))
        x, y = batch(0)
        with refused('part 0, node "0-2", step 0', fastps.NonFiniteError):
            replica.step(input=x * torch.inf, target=y)
        optimizer.zero_grad()
        replica.step(input=x, target=y)
        optimizer.step()
        assert {store.versions()[name] for name in store.names()} == {2}
        optimizer.close()


def test_large_gradients_are_finite():
    """float32's sum of squares overflows; the gradients do not."""
    graph = Graph()
    out = graph.node("a", nn.Linear(3, 1), graph.input("x"), part=0)
    graph.loss(lambda v: v.mean() * 1e25, out)
    with local(graph) as replica:
        replica.step(x=torch.ones(2, 3))
        assert 1e25 < replica.clip_grad_norm_(1.0) < 1e26


def test_the_replica_s_number_comes_from_the_environment(monkeypatch):
    graph, *_, b = small()
    graph.loss(lambda v: v.mean(), b)
    monkeypatch.setenv("REPLICA", "3")
    with local(graph) as replica:
        assert replica.number == 3
    monkeypatch.setenv("REPLICA", "x")
    with refused(r"REPLICA.*'x'"):
        local(graph)
    with refused(r"number.*-2"):
        local(graph, number=-2)
    with refused(r"RANK, WORLD_SIZE.*Replica.local"):
        Replica(graph)


def test_a_part_without_parameters_has_an_optimizer_that_does_nothing():
    made = parallel.NoParameters(fastps.Adam(lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1)
    with made:
        made.zero_grad()
        assert made.step(lambda: 3) == 3
        scheduler.step()
        made.push_model(), made.pull_model(), made.flush(), made.close()
    assert made.stats() == {}
