"""Parameters of torch whose servers keep an average."""

from __future__ import annotations

from pathlib import Path

import pytest

import fastps

torch = pytest.importorskip("torch")

import fastps.torch  # noqa: E402

EMA = fastps.EMA(0.5)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def train(store: fastps.Store, rule: fastps.optim.Optimizer, average: fastps.EMA | None) -> torch.nn.Module:
    model = build()
    named = model.named_parameters()
    with fastps.torch.ParameterServerOptimizer(named, store, rule, model=model, average=average) as optimizer:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
    return model


def test_a_reader_loads_averages_and_the_values_of_buffers() -> None:
    for rule, average in ((fastps.AdamW(lr=0.1), EMA), (fastps.ScheduleFreeAdamW(lr=0.1), None)):
        with fastps.Store() as store:
            model, other = train(store, rule, average), build()
            fastps.torch.load(other, store, view="average")
            for name, param in other.named_parameters():
                assert (param.detach().numpy() == store.pull(name, view="average")).all()
            assert not torch.equal(other[0].weight, model[0].weight)
            assert torch.equal(other[1].running_mean, torch.from_numpy(store.pull("1.running_mean")))
            seen = fastps.torch.evaluator(
                build(), store, lambda m: {"sum": m[0].weight.sum().item()}, view="average"
            )
            assert seen.now().metrics["sum"] == other[0].weight.sum().item()


def test_what_has_no_average_is_refused(tmp_path: Path) -> None:
    with fastps.Store() as store:
        model = train(store, fastps.AdamW(lr=0.1), None)
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(fastps.ConfigError, match="keeps no average"):
            fastps.torch.load(model, store, view="average")
        with pytest.raises(fastps.ConfigError, match="this source keeps no averages"):
            fastps.torch.load(model, tmp_path / "file", view="average")
        with pytest.raises(fastps.ConfigError, match=r"(?s)another average.*EMA"):
            train(store, fastps.AdamW(lr=0.1), EMA)
        assert all(map(torch.equal, before, model.parameters()))


def test_a_state_dict_may_come_without_the_average() -> None:
    with fastps.Store() as store:
        train(store, fastps.AdamW(lr=0.1), EMA)
        average = store.pull("0.weight", view="average")
        model = build()
        rule = fastps.AdamW(lr=0.1)
        with fastps.torch.ParameterServerOptimizer(model.named_parameters(), store, rule) as optimizer:
            state = optimizer.state_dict()
            assert (state["state"][0]["average"].numpy() == average).all()
            optimizer.load_state_dict(state)
        plain = torch.optim.AdamW(model.parameters(), lr=0.1)
        fastps.torch.from_store(store, model, plain)
        assert set(plain.state[model[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}
        fastps.torch.to_store(store, model, plain)
        assert (store.pull("0.weight", view="average") == store.pull("0.weight")).all()
