"""`fastps.torch.LocalOptimizer`: rounds of local steps, equal to an independent loop bit for bit."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps

torch = pytest.importorskip("torch")
import sys  # noqa: E402

import fastps.torch  # noqa: E402
from fastps.commands.kit.servers import LocalCluster  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "faults"))
from shards import PATIENT, Shards  # noqa: E402

from cases import case  # noqa: E402

EVERY, ROUNDS, BATCH = 3, 4, 8


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))


def inner(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def backward(net: torch.nn.Module, worker: int, step: int) -> None:
    draw = torch.Generator().manual_seed(100 * worker + step)
    x = torch.randn(BATCH, 6, generator=draw)
    net.zero_grad()
    (net(x) - x[:, :2].sin()).square().mean().backward()


def alone(workers: int, samples: list[int]) -> dict[str, Any]:
    """The same rounds in one thread, with torch's SGD as the outer optimizer."""
    shared, nets = model(), [model() for _ in range(workers)]
    inners = [inner(net) for net in nets]
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    share = np.float32(1) / np.float32(EVERY * sum(samples[:workers]))
    for done in range(ROUNDS):
        for k, (net, optimizer) in enumerate(zip(nets, inners, strict=True)):
            net.load_state_dict(shared.state_dict())
            for step in range(EVERY):
                backward(net, k, done * EVERY + step)
                optimizer.step()
        for name, param in shared.named_parameters():
            total = torch.zeros_like(param)
            for k, net in enumerate(nets):
                total += (param.detach() - net.get_parameter(name).detach()) * float(EVERY * samples[k])
            param.grad = total * float(share)
        outer.step()
    return {name: param.detach().numpy() for name, param in shared.named_parameters()}


def together(
    addresses: list[str], workers: int, samples: list[int], middle: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """The rounds by workers in threads; `middle` is called while all but one wait for the third version."""
    mode, errors = fastps.DiLoCo(every=EVERY, workers=workers, deterministic=True), []
    waits = threading.Event()
    nets = [model() for _ in range(workers)]  # threads share the generator that seeds them

    def work(k: int) -> None:
        net = nets[k]
        with (
            fastps.connect(addresses, timeout=PATIENT, ack="logged") as ps,
            fastps.torch.LocalOptimizer(net.named_parameters(), inner(net), ps, mode, rank=k) as optimizer,
        ):
            for step in range(ROUNDS * EVERY):
                backward(net, k, step)
                if step == 3 * EVERY - 1 and k == workers - 1:
                    waits.wait(1.0)  # the others' contributions are probably under way
                    middle()
                optimizer.step(samples=samples[k])
            assert optimizer.worker.stats()["samples_contributed"] == ROUNDS * EVERY * samples[k]

    def tried(k: int) -> None:
        try:
            work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=tried, args=(k,)) for k in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    with fastps.connect(addresses, timeout=PATIENT) as ps:
        return ps.pull(ps.names())


@pytest.mark.timeout(300)
def test_rounds_equal_an_independent_loop_bit_for_bit(tmp_path: Path) -> None:
    for workers in (1, 2, 4):
        samples = [BATCH, 5, 7, 11]
        expected = alone(workers, samples)
        for shards in (1, 2, 3):
            with (
                case(workers, shards),
                fastps.serve(shards, data_dir=tmp_path / f"{workers}-{shards}") as server,
            ):
                got = together(server.addresses, workers, samples)
                assert all((got[name] == expected[name]).all() for name in expected)


@pytest.mark.timeout(300)
def test_two_processes_train_by_the_program_of_the_page(tmp_path: Path) -> None:
    """Muon has the matrices; the servers are at two addresses."""
    page = Path(__file__).parents[2] / "docs/how-to/low-communication.md"
    (program,) = re.findall(r"<<'END'\n(.*?)^END$", page.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    with LocalCluster(2, tmp_path) as cluster:
        command = [sys.executable, str(tmp_path / "train.py"), cluster.addresses]
        both = [subprocess.Popen([*command, seed], stdout=subprocess.PIPE, text=True) for seed in "12"]
        try:
            printed = [one.communicate(timeout=240)[0] for one in both]
        finally:
            for one in both:
                one.kill()
        assert [one.returncode for one in both] == [0, 0]
        assert all(float(loss) < 0.4 for loss in printed), printed
        with fastps.connect(cluster.addresses) as ps:
            assert ps.versions("0.weight")["0.weight"] > 10


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Shards]:
    shards = Shards(2, data=tmp_path)
    yield shards
    shards.close()


@pytest.mark.timeout(300)
def test_servers_killed_in_a_round_change_no_bit(durable: Shards) -> None:
    samples = [BATCH, 5]

    def restart() -> None:
        for k in range(2):
            durable.restart(k)

    got, expected = together(durable.addresses, 2, samples, restart), alone(2, samples)
    assert all((got[name] == expected[name]).all() for name in expected)


def made(store: fastps.Store, **how: Any) -> tuple[torch.nn.Module, fastps.torch.LocalOptimizer]:
    net = model()
    return net, fastps.torch.LocalOptimizer(
        net.named_parameters(), inner(net), store, fastps.DiLoCo(every=EVERY), **how
    )


def test_a_saved_round_continues_where_it_was() -> None:
    values = []
    for saved in (False, True):
        store = fastps.Store()
        net, optimizer = made(store, codec=fastps.Int8())
        for step in range(2 * EVERY):
            backward(net, 0, step)
            optimizer.step(samples=BATCH)
            if saved and step == EVERY + 1:
                state = optimizer.state_dict()
                optimizer.close()
                net, optimizer = made(store, codec=fastps.Int8())
                optimizer.load_state_dict(state)
        values.append(store.pull(store.names()))
        optimizer.close()
    assert all((values[0][name] == values[1][name]).all() for name in values[0])
    # The servers have gone on: the saved round is dropped, and the next one begins at their values.
    net, optimizer = made(store, codec=fastps.Int8())
    optimizer.load_state_dict(state)
    assert all((param.detach().numpy() == store.pull(name)).all() for name, param in net.named_parameters())
    assert optimizer.worker.stats()["samples_lost"] == 2 * BATCH


def test_a_run_continues_from_its_file(tmp_path: Path) -> None:
    """Inner states, rates, the unfinished round, residuals and the outer momentum, with a scaled loss."""
    values: list[dict[str, Any]] = []
    for servers in ("", "the same", "new"):
        store = fastps.Store()
        net, optimizer = made(store, codec=fastps.Int8(), rank=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        for step in range(3 * EVERY + 1):
            backward(net, 0, step)
            for param in net.parameters():
                param.grad *= scaler.scale(torch.tensor(1.0))
            if step == EVERY:
                net[0].weight.grad[0, 0] = float("inf")  # the scaler skips it: no step of the round
            scaler.step(optimizer, samples=BATCH)
            scaler.update()
            schedule.step()
            if servers and step == EVERY + 2:
                more = {"schedule": schedule.state_dict(), "scaler": scaler.state_dict()}
                fastps.torch.save(net, optimizer, tmp_path / servers, **more)
                optimizer.close()
                store = fastps.Store() if servers == "new" else store
                net, optimizer = made(store, codec=fastps.Int8(), rank=1)
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
                more = fastps.torch.resume(net, optimizer, tmp_path / servers)
                schedule.load_state_dict(more["schedule"])
                scaler.load_state_dict(more["scaler"])
                assert fastps.torch.peek(tmp_path / servers).steps == 1
        names = [name for name, _ in net.named_parameters()]
        values.append(store.pull(names))
        assert store.versions("0.bias")["0.bias"] >= 4
        with case(servers):
            assert all((values[0][name] == values[-1][name]).all() for name in names)
        optimizer.close()
    # A worker of another rank begins at the servers' values, with the saver's inner states.
    other, begins = made(store, rank=0)
    fastps.torch.resume(other, begins, tmp_path / "new", keep="servers")
    assert begins.optimizers[0].state[other[0].bias]["step"] == EVERY + 2
    assert all((param.detach().numpy() == values[-1][name]).all() for name, param in other.named_parameters())
    with pytest.raises(fastps.ConfigError, match="inner optimizers"):
        begins.load_state_dict({**begins.state_dict(), "optimizers": []})


def test_buffers_go_to_the_servers_once_a_round(store: fastps.Store) -> None:
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Linear(6, 2), torch.nn.BatchNorm1d(2)) for _ in range(3)]

    def optimizer_of(net: torch.nn.Module) -> fastps.torch.LocalOptimizer:
        mode, named = fastps.DiLoCo(every=EVERY), net.named_parameters()
        return fastps.torch.LocalOptimizer(named, inner(net), store, mode, model=net, buffers="latest")

    with optimizer_of(nets[0]) as optimizer:
        for step in range(EVERY + 1):
            backward(nets[0], 0, step)
            optimizer.step()
            if step == EVERY - 1:
                pushed = nets[0][1].running_mean.clone()
    assert store.versions("1.running_mean")["1.running_mean"] == 3  # registered, a round, the last ones
    fastps.torch.load(nets[1], store)
    with optimizer_of(nets[2]):
        for net in nets[1:]:
            assert torch.equal(net[1].running_mean, nets[0][1].running_mean)
    assert not torch.equal(pushed, nets[0][1].running_mean)
    with pytest.raises(fastps.ConfigError, match="model"):
        fastps.torch.LocalOptimizer(
            nets[0].named_parameters(), inner(nets[0]), store, fastps.DiLoCo(every=2), buffers="latest"
        )


def test_schedulers_hooks_and_closures_see_the_inner_optimizers(store: fastps.Store) -> None:
    net = model()
    weights = [p for p in net.parameters() if p.ndim == 2]
    rest = [p for p in net.parameters() if p.ndim != 2]
    both = [torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(rest, lr=0.01)]
    optimizer = fastps.torch.LocalOptimizer(net.named_parameters(), both, store, fastps.DiLoCo(every=2))
    schedule, calls = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for step in range(4):
        assert optimizer.step(lambda step=step: backward(net, 0, step) or 3.0) == 3.0
        schedule.step()
    assert [group["lr"] for one in both for group in one.param_groups] == [0.1 / 16, 0.01 / 16]
    assert (len(calls), store.versions("0.weight")["0.weight"]) == (4, 3)


def test_bad_input_is_refused_by_name(store: fastps.Store) -> None:
    net, other, mode = model(), model(), fastps.DiLoCo(every=2)
    named, local = dict(net.named_parameters()), fastps.torch.LocalOptimizer
    half = torch.optim.SGD([net[0].weight], lr=0.1)
    for words, make in {
        "LocalOptimizer|ParameterServerOptimizer": lambda: local(
            named.items(), inner(net), store, fastps.Async()
        ),
        "another model": lambda: local(named.items(), inner(other), store, mode),
        "none for": lambda: local(named.items(), half, store, mode),
        "two for": lambda: local(named.items(), [inner(net), half], store, mode),
        "LocalOptimizer takes DiLoCo": lambda: fastps.torch.ParameterServerOptimizer(
            named.items(), store, fastps.SGD(lr=0.1), mode
        ),
    }.items():
        with case(words), pytest.raises(fastps.ConfigError, match=words):
            make()
    assert store.names() == []
    optimizer = local(named.items(), inner(net), store, mode)
    for samples in (0, -1, float("nan"), float("inf"), "8"):
        with case(samples), pytest.raises(fastps.ConfigError, match="samples"):
            optimizer.step(samples=samples)
    before = store.pull(store.names())
    for step in range(2):
        backward(net, 0, step)
    with torch.no_grad():
        net[0].bias.fill_(float("nan"))
    optimizer.step()
    with pytest.raises(fastps.NonFiniteError, match=r"0\.bias"):
        optimizer.step()
    assert store.versions("0.bias")["0.bias"] == 1
    assert all((param.detach().numpy() == before[name]).all() for name, param in named.items())


def test_fragments_and_overlap_equal_an_independent_loop_bit_for_bit(store: fastps.Store) -> None:
    """Muon inside for the matrices, SGD for the rest; the largest fragment is the first."""
    every, overlap, alpha, steps = 5, 1, np.float32(0.25), 17
    parts = [("0.weight",), ("0.bias", "2.weight", "2.bias")]

    def both(net: torch.nn.Module) -> list[torch.optim.Optimizer]:
        weights = [net.get_parameter(name) for name in ("0.weight", "2.weight")]
        biases = [net.get_parameter(name) for name in ("0.bias", "2.bias")]
        return [torch.optim.Muon(weights, lr=0.02), torch.optim.SGD(biases, lr=0.05, momentum=0.9)]

    mode = fastps.DiLoCo(every, fragments=2, overlap=overlap, alpha=float(alpha))
    net = model()
    with fastps.torch.LocalOptimizer(net.named_parameters(), both(net), store, mode) as optimizer:
        for step in range(steps):
            backward(net, 0, step)
            optimizer.step(samples=BATCH)
        trained = {name: param.detach().numpy().copy() for name, param in net.named_parameters()}

    shared, local = model(), model()
    inners, began = both(local), {name: p.detach().clone() for name, p in shared.named_parameters()}
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    turns = {2: 0, 5: 1}  # the first ends after two steps, the second after three more
    counts = [0, 0]
    for step in range(steps):
        backward(local, 0, step)
        for one in inners:
            one.step()
        counts = [count + 1 for count in counts]
        at = step % every + 1
        if (step + 1 - overlap) % every in (0, 2) and step >= overlap:
            part = turns[(step - overlap) % every + 1]
            for name in parts[part]:
                began[name] = shared.get_parameter(name).detach().clone()
                values = local.get_parameter(name).detach().numpy()
                values[...] = alpha * values + (1 - alpha) * began[name].numpy()
        if at in turns:
            part = turns[at]
            outer.zero_grad()
            weight = float(counts[part] * BATCH)
            for name in parts[part]:
                difference = began[name] - local.get_parameter(name).detach()
                shared.get_parameter(name).grad = (difference * weight) * float(np.float32(1 / weight))
            outer.step()
            counts[part] = 0
    for name, param in local.named_parameters():
        np.testing.assert_array_equal(trained[name], param.detach().numpy(), err_msg=name)
        np.testing.assert_array_equal(store.pull(name), shared.get_parameter(name).detach().numpy())


def test_the_run_file_keeps_a_fragment_under_way(store: fastps.Store, tmp_path: Path) -> None:
    mode = fastps.DiLoCo(every=4, fragments=2, overlap=1)
    nets = [model(), model()]
    trained = []
    for net in nets:
        with fastps.torch.LocalOptimizer(net.named_parameters(), inner(net), store, mode) as optimizer:
            if trained:
                fastps.torch.resume(net, optimizer, tmp_path / "run.pt", keep="checkpoint")
            for step in range(0 if not trained else 6, 14):
                if step == 6 and not trained:  # the third is sent, and not mixed in
                    fastps.torch.save(net, optimizer, tmp_path / "run.pt")
                backward(net, 0, step)
                optimizer.step()
            trained.append({name: param.detach().numpy().copy() for name, param in net.named_parameters()})
    for name, values in trained[0].items():
        np.testing.assert_array_equal(trained[1][name], values, err_msg=name)
