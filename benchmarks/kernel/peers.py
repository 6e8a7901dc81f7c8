"""The optimizers of kernels.py: settings for fastps, scalars for C, the same step in NumPy and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import fastps

Floats = NDArray[np.float32]
LR, MU, ALPHA, RHO = 1e-3, 0.9, 0.99, 0.9
BETA1, BETA2, EPS, DECAY = 0.9, 0.999, 1e-8, 1e-2


class Rule(NamedTuple):
    """One optimizer."""

    settings: fastps.Optimizer
    # Arrays of state.
    slots: int
    # Kernel in reference/optimizers.c, and its scalars at a step (from 1).
    kernel: str
    scalars: Callable[[int], tuple[float, ...]]
    # One step in NumPy: parameters, state, gradient.
    numpy: Callable[[Floats, list[Floats], Floats], None]
    # Class and arguments in torch.optim; whether it has a fused version.
    torch: tuple[str, dict[str, Any]]
    fused: bool


def _adam(t: int) -> tuple[float, ...]:
    size, root = LR / (1 - BETA1**t), (1 - BETA2**t) ** 0.5
    return (-size, EPS, 1 - BETA1, BETA2, 1 - BETA2, root, 1 - LR * DECAY)


def _np_sgd(p: Floats, _: list[Floats], g: Floats) -> None:
    p -= LR * g


def _np_momentum(p: Floats, state: list[Floats], g: Floats) -> None:
    state[0] *= MU
    state[0] += g
    p -= LR * state[0]


def _np_nesterov(p: Floats, state: list[Floats], g: Floats) -> None:
    state[0] *= MU
    state[0] += g
    p -= LR * (g + MU * state[0])


def _np_adagrad(p: Floats, state: list[Floats], g: Floats) -> None:
    state[0] += g * g
    p -= LR * g / (np.sqrt(state[0]) + 1e-10)


def _np_rmsprop(p: Floats, state: list[Floats], g: Floats) -> None:
    state[0] *= ALPHA
    state[0] += (1 - ALPHA) * g * g
    p -= LR * g / (np.sqrt(state[0]) + EPS)


def _np_adadelta(p: Floats, state: list[Floats], g: Floats) -> None:
    state[0] *= RHO
    state[0] += (1 - RHO) * g * g
    step = np.sqrt(state[1] + 1e-6) / np.sqrt(state[0] + 1e-6) * g
    state[1] *= RHO
    state[1] += (1 - RHO) * step * step
    p -= LR * step


def _np_adam(p: Floats, state: list[Floats], g: Floats) -> None:
    state[0] *= BETA1
    state[0] += (1 - BETA1) * g
    state[1] *= BETA2
    state[1] += (1 - BETA2) * g * g
    p -= LR * state[0] / (np.sqrt(state[1]) + EPS)


def _np_adamw(p: Floats, state: list[Floats], g: Floats) -> None:
    p *= 1 - LR * DECAY
    _np_adam(p, state, g)


RULES = {
    "SGD": Rule(fastps.SGD(lr=LR), 0, "sgd", lambda _: (-LR,), _np_sgd, ("SGD", {}), True),
    "momentum": Rule(
        fastps.SGD(lr=LR, momentum=MU),
        1,
        "momentum",
        lambda _: (-LR, MU),
        _np_momentum,
        ("SGD", {"momentum": MU}),
        True,
    ),
    "Nesterov": Rule(
        fastps.SGD(lr=LR, momentum=MU, nesterov=True),
        1,
        "nesterov",
        lambda _: (-LR, MU),
        _np_nesterov,
        ("SGD", {"momentum": MU, "nesterov": True}),
        True,
    ),
    "Adagrad": Rule(
        fastps.Adagrad(lr=LR), 1, "adagrad", lambda _: (-LR, 1e-10), _np_adagrad, ("Adagrad", {}), True
    ),
    "RMSprop": Rule(
        fastps.RMSprop(lr=LR),
        1,
        "rmsprop",
        lambda _: (-LR, EPS, ALPHA, 1 - ALPHA),
        _np_rmsprop,
        ("RMSprop", {}),
        False,
    ),
    "Adadelta": Rule(
        fastps.Adadelta(lr=LR),
        2,
        "adadelta",
        lambda _: (-LR, 1e-6, RHO, 1 - RHO),
        _np_adadelta,
        ("Adadelta", {}),
        False,
    ),
    "Adam": Rule(fastps.Adam(lr=LR), 2, "adam", _adam, _np_adam, ("Adam", {}), True),
    "AdamW": Rule(fastps.AdamW(lr=LR, weight_decay=DECAY), 2, "adamw", _adam, _np_adamw, ("AdamW", {}), True),
}


def torch_module() -> Any:
    """torch, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def torch_step(
    torch: Any, rule: Rule, gradients: list[Floats], threads: int, **how: bool
) -> Callable[[], None]:
    """A step of torch.optim on its own parameters."""
    parameters = [torch.zeros(gradient.shape, requires_grad=True) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # A copy: torch's foreach version of Nesterov changes it.
        parameter.grad = torch.tensor(gradient)
    name, arguments = rule.torch
    optimizer = getattr(torch.optim, name)(parameters, lr=LR, **arguments, **how)

    def step() -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        optimizer.step()

    return step


def torchao_step(torch: Any, gradient: Floats) -> Callable[[], None] | None:
    """A step of torchao's AdamW on bfloat16 values, rounded stochastically; None without torchao."""
    try:
        from torchao.optim import _AdamW
    except ImportError:
        return None
    parameter = torch.zeros(gradient.shape, dtype=torch.bfloat16, requires_grad=True)
    parameter.grad = torch.tensor(gradient).bfloat16()
    optimizer = _AdamW([parameter], lr=LR, weight_decay=DECAY, bf16_stochastic_round=True)

    def step() -> None:
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        optimizer.step()

    step()  # compiles it
    return step
