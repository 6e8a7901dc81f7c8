"""`fastps.torch.Objective`: torch's own losses and gradients, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

import fastps
from fastps.optimize import minimize

torch = pytest.importorskip("torch", reason="torch is not installed")
nn = torch.nn

import fastps.torch  # noqa: E402


def squares(model, x, y):
    return ((model(x) - y) ** 2).sum()


def data(samples=40, dtype=torch.float32):
    x = torch.linspace(-2, 2, 3 * samples, dtype=dtype).reshape(samples, 3)
    return torch.utils.data.TensorDataset(x, torch.sin(x).sum(1, keepdim=True))


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


class Listed(torch.utils.data.Dataset):
    """A data set without a fast path."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, k):
        return self.dataset[k]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wrap", [lambda d: d, Listed], ids=["tensors", "items"])
def test_losses_and_gradients_are_torch_s_own(dtype, wrap):
    net, dataset = model(dtype), data(dtype=dtype)
    objective = fastps.torch.Objective(model(dtype), wrap(dataset), squares, batch_size=7, prefix="net.")
    params = {f"net.{name}": param.detach().numpy().copy() + 0.1 for name, param in net.named_parameters()}
    assert objective.names == list(params)
    assert objective.samples == 40
    loss, gradients = objective(params, np.arange(5, 25))
    with torch.no_grad():
        for param in net.parameters():
            param += 0.1
    expected = squares(net, *dataset[5:25])
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, param in net.named_parameters():
        assert gradients[f"net.{name}"].dtype == params[f"net.{name}"].dtype
        np.testing.assert_allclose(gradients[f"net.{name}"], param.grad, rtol=2e-4, atol=1e-5)


def test_a_model_is_trained_with_its_frozen_and_tied_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
            self.second.weight = self.first.weight
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))))

    torch.manual_seed(0)
    net = Tied()
    objective = fastps.torch.Objective(net, data(), squares)
    assert objective.names == ["first.weight", "first.bias", "second.bias"]
    with fastps.Store() as store:
        objective.register(store)
        objective.register(store)  # a second replica's values do not count
        result = minimize(store, objective.names, objective, samples=objective.samples, portions=4, tol=1e-3)
        assert result.fun < result.history[0].fun
        objective.pull(store)
        with torch.no_grad():
            assert float(squares(net, *data()[:])) / 40 == pytest.approx(result.fun, rel=1e-4)


REFUSED = [
    (nn.BatchNorm1d(3), "layer '1' .BatchNorm1d. in training mode"),
    (nn.Dropout(0.1), "layer '1' .Dropout. is active"),
    (nn.LSTM(3, 3, 2, dropout=0.1), "layer '1' .LSTM. has active dropout"),
]


@pytest.mark.parametrize(("layer", "text"), REFUSED, ids=["batch norm", "dropout", "lstm"])
def test_layers_whose_loss_is_no_function_are_refused(layer, text):
    net = nn.Sequential(nn.Linear(3, 3), layer)
    with pytest.raises(fastps.ConfigError, match=text):
        fastps.torch.Objective(net, data(), squares)
    objective = fastps.torch.Objective(net.eval(), data(), squares)
    net.train()
    with pytest.raises(fastps.ConfigError, match=r"call model\.eval\(\)"):
        objective({name: p.detach().numpy() for name, p in net.named_parameters()}, np.arange(3))


def test_bad_arguments_are_refused():
    with pytest.raises(fastps.ConfigError, match="invalid model"):
        fastps.torch.Objective(squares, data(), squares)
    with pytest.raises(fastps.ConfigError, match="invalid dataset"):
        fastps.torch.Objective(model(), iter([1]), squares)
    with pytest.raises(fastps.ConfigError, match="invalid batch_size"):
        fastps.torch.Objective(model(), data(), squares, batch_size=0)
    with pytest.raises(fastps.ConfigError, match="a model with parameters to train"):
        fastps.torch.Objective(nn.Tanh(), data(), squares)
    with pytest.raises(fastps.DTypeError, match=r'tensor "0\.weight".: expected float32 or float64'):
        fastps.torch.Objective(model(torch.float16), data(), squares)
    objective = fastps.torch.Objective(model(), data(), lambda net, x, y: (net(x) - y) ** 2)
    params = {name: p.detach().numpy() for name, p in model().named_parameters()}
    with pytest.raises(fastps.ConfigError, match="loss returned no sum: expected a scalar tensor"):
        objective(params, np.arange(3))
