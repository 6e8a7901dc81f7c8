"""torch's optimizers in NumPy, bit for bit: torch's single-tensor CPU sequence with an IEEE square root.

Written from torch 2.15's source (`torch/optim/*.py`, `_single_tensor_*`) and from what its CPU kernels
compute, not from the Rust code. Every array is float32; every float32 operation is one NumPy operation or one
exact `fma`; scalars are Python floats, rounded to float32 once, where they meet an array. `scale` multiplies
the gradient first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

F32 = np.float32
Array = NDArray[np.float32]
Operand = Array | np.float32

# torch's own square root is not IEEE's; put in its place, it makes everything here equal torch bit for bit.
sqrt: Callable[[Array], Array] = np.sqrt


def fma(a: Operand, b: Operand, c: Operand) -> Array:
    """`a * b + c`, rounded once to float32.

    The product of two float32 is exact in float64. Its sum with `c` is made exact by TwoSum and rounded to
    odd in float64: 53 bits are more than 24 + 2, so the second rounding gives what a single one would,
    also for denormals.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, dtype=np.float64)
    total = np.asarray(product + addend)
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0) & ((bits & 1) == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + np.where(inexact, toward, 0)).view(np.float64).astype(np.float32)


def add(x: Operand, y: Operand, alpha: float) -> Array:
    """`x.add(y, alpha=alpha)`."""
    return fma(F32(alpha), y, x)


def addcmul(x: Array, y: Array, z: Array, value: float) -> Array:
    """`x.addcmul(y, z, value=value)`: only the second multiplication is fused."""
    return fma(F32(value) * y, z, x)


def addcdiv(x: Array, y: Array, z: Array, value: float) -> Array:
    """`x.addcdiv(y, z, value=value)`: nothing is fused."""
    return x + (F32(value) * y) / z


def lerp(x: Array, end: Array, weight: float) -> Array:
    """`x.lerp(end, weight)`; the form depends on the weight."""
    w = F32(weight)
    if abs(w) < 0.5:
        return fma(w, end - x, x)
    return fma(w - F32(1), end - x, end)


def root(x: Array, eps: float, mode: str) -> Array:
    """The divisor made of a mean of squares."""
    if mode == "outside":
        return sqrt(x) + F32(eps)
    if mode == "inside":
        return sqrt(x + F32(eps))
    assert mode == "both"
    return sqrt(x + F32(eps)) + F32(eps)


class Reference:
    """Parameters are stepped in place; `state` has torch's names, `steps` counts the steps taken."""

    names: tuple[str, ...] = ()

    def __init__(self, lr: float, weight_decay: float, maximize: bool) -> None:
        self.lr = lr
        self.weight_decay = weight_decay
        self.maximize = maximize
        self.steps = 0
        self.state: dict[str, Array] = {}

    def initial(self, p: Array) -> dict[str, Array]:
        return {name: np.zeros_like(p) for name in self.names}

    def step(self, p: Array, g: Array, lr: float | None = None, scale: float | None = None) -> None:
        assert p.dtype == g.dtype == np.float32
        if not self.state:
            self.state = self.initial(p)
        self.steps += 1
        with np.errstate(all="ignore"):
            if scale is not None:
                g = g * F32(scale)
            if self.maximize:
                g = -g
            p[...] = self.update(p, g, self.lr if lr is None else lr)
        assert all(x.dtype == np.float32 for x in self.state.values())

    def decayed(self, p: Array, g: Array) -> Array:
        return add(g, p, self.weight_decay) if self.weight_decay != 0 else g

    def update(self, p: Array, g: Array, lr: float) -> Array:
        raise NotImplementedError


class SGD(Reference):
    def __init__(
        self,
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(lr, weight_decay, maximize)
        self.momentum = momentum
        self.dampening = dampening
        self.nesterov = nesterov
        self.names = ("momentum_buffer",) if momentum != 0 else ()

    def update(self, p: Array, g: Array, lr: float) -> Array:
        g = self.decayed(p, g)
        if self.momentum != 0:
            if self.steps == 1:
                buffer = g.copy()
            else:
                buffer = add(self.state["momentum_buffer"] * F32(self.momentum), g, 1 - self.dampening)
            self.state["momentum_buffer"] = buffer
            g = add(g, buffer, self.momentum) if self.nesterov else buffer
        return add(p, g, -lr)


class Adagrad(Reference):
    names = ("sum",)

    def __init__(
        self,
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        eps_mode: str = "outside",
        maximize: bool = False,
    ) -> None:
        super().__init__(lr, weight_decay, maximize)
        self.lr_decay = lr_decay
        self.initial_accumulator_value = initial_accumulator_value
        self.eps = eps
        self.eps_mode = eps_mode

    def initial(self, p: Array) -> dict[str, Array]:
        return {"sum": np.full_like(p, self.initial_accumulator_value)}

    def update(self, p: Array, g: Array, lr: float) -> Array:
        g = self.decayed(p, g)
        clr = lr / (1 + (self.steps - 1) * self.lr_decay)
        total = addcmul(self.state["sum"], g, g, 1)
        self.state["sum"] = total
        return addcdiv(p, g, root(total, self.eps, self.eps_mode), -clr)


class RMSprop(Reference):
    def __init__(
        self,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        *,
        eps_mode: str = "outside",
        maximize: bool = False,
    ) -> None:
        super().__init__(lr, weight_decay, maximize)
        self.alpha = alpha
        self.eps = eps
        self.momentum = momentum
        self.centered = centered
        self.eps_mode = eps_mode
        names = ["square_avg"]
        if momentum > 0:
            names.append("momentum_buffer")
        if centered:
            names.append("grad_avg")
        self.names = tuple(names)

    def update(self, p: Array, g: Array, lr: float) -> Array:
        g = self.decayed(p, g)
        square = addcmul(self.state["square_avg"] * F32(self.alpha), g, g, 1 - self.alpha)
        self.state["square_avg"] = square
        variance = square
        if self.centered:
            mean = lerp(self.state["grad_avg"], g, 1 - self.alpha)
            self.state["grad_avg"] = mean
            variance = addcmul(square, mean, mean, -1)
        divisor = root(variance, self.eps, self.eps_mode)
        if self.momentum > 0:
            buffer = addcdiv(self.state["momentum_buffer"] * F32(self.momentum), g, divisor, 1)
            self.state["momentum_buffer"] = buffer
            return add(p, buffer, -lr)
        return addcdiv(p, g, divisor, -lr)


class Adadelta(Reference):
    names = ("square_avg", "acc_delta")

    def __init__(
        self,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(lr, weight_decay, maximize)
        self.rho = rho
        self.eps = eps

    def update(self, p: Array, g: Array, lr: float) -> Array:
        g = self.decayed(p, g)
        square = addcmul(self.state["square_avg"] * F32(self.rho), g, g, 1 - self.rho)
        self.state["square_avg"] = square
        acc = self.state["acc_delta"]
        delta = (sqrt(acc + F32(self.eps)) / sqrt(square + F32(self.eps))) * g
        self.state["acc_delta"] = addcmul(acc * F32(self.rho), delta, delta, 1 - self.rho)
        return add(p, delta, -lr)


class Adam(Reference):
    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(lr, weight_decay, maximize)
        self.betas = betas
        self.eps = eps
        self.amsgrad = amsgrad
        #: beta1 of the next steps, lowered by momentum matching; None: `betas[0]`. torch lacks this.
        self.matched: float | None = None
        self.names = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if amsgrad else ())

    def update(self, p: Array, g: Array, lr: float) -> Array:
        beta1, beta2 = self.betas
        if self.decoupled:
            if self.weight_decay != 0:
                p = p * F32(1 - lr * self.weight_decay)
        else:
            g = self.decayed(p, g)
        old, weight = self.weights(beta1)
        mean = lerp(self.state["exp_avg"] * F32(old), g, weight)
        self.state["exp_avg"] = mean
        square = addcmul(self.state["exp_avg_sq"] * F32(beta2), g, g, 1 - beta2)
        self.state["exp_avg_sq"] = square
        step_size = lr / (1 - beta1**self.steps)
        correction = math.pow(1 - beta2**self.steps, 0.5)
        if self.amsgrad:
            square = np.maximum(self.state["max_exp_avg_sq"], square)
            self.state["max_exp_avg_sq"] = square
        return addcdiv(p, mean, sqrt(square) / F32(correction) + F32(self.eps), -step_size)

    def weights(self, beta1: float) -> tuple[float, float]:
        """Factor on the old mean, and weight of the gradient.

        With a matched beta1, the corrected mean moves to the gradient as it does in step t of Adam with that
        beta1; the mean that is stored is the corrected one times ``1 - beta1**t``.
        """
        t, matched = self.steps, self.matched
        if matched is None or matched == beta1 or t == 1:
            return 1.0, 1 - beta1
        now, before = 1 - beta1**t, 1 - beta1 ** (t - 1)
        weight = now * (1 - matched) / (1 - matched**t)
        kept = matched * (1 - matched ** (t - 1)) / (1 - matched**t) * now / before
        return (kept / (1 - weight) if weight < 1 else 0.0), weight


class AdamW(Adam):
    decoupled = True

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay, amsgrad, maximize=maximize)


class Lion(Reference):
    """torch has none: written from `lion_pytorch.py` of google/automl, the code of Chen et al., 2023."""

    names = ("exp_avg",)

    def __init__(
        self,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(lr, weight_decay, maximize)
        self.betas = betas

    def update(self, p: Array, g: Array, lr: float) -> Array:
        beta1, beta2 = self.betas
        if self.weight_decay != 0:
            p = p * F32(1 - lr * self.weight_decay)
        mean = self.state["exp_avg"]
        self.state["exp_avg"] = add(mean * F32(beta2), g, 1 - beta2)
        return add(p, np.sign(mean * F32(beta1) + g * F32(1 - beta1)), -lr)


class Ftrl(Reference):
    """torch has none: written from algorithm 1 of McMahan et al., KDD 2013, in the order that
    `rust/core/src/kernel/optim/ftrl.rs` states."""

    names = ("z", "n")

    def __init__(
        self, lr: float = 0.1, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0, *, maximize: bool = False
    ) -> None:
        super().__init__(lr, 0, maximize)
        self.beta = beta
        self.l1 = l1
        self.l2 = l2

    def update(self, p: Array, g: Array, lr: float) -> Array:
        z, n = self.state["z"], self.state["n"]
        rate = F32(1 / lr)
        total = fma(g, g, n)
        sigma = (sqrt(total) - sqrt(n)) * rate
        z = fma(-sigma, p, z + g)
        self.state = {"z": z, "n": total}
        divisor = fma(F32(self.beta) + sqrt(total), rate, F32(self.l2))
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = (z - np.copysign(F32(self.l1), z)) / -divisor
        return np.where((np.abs(z) <= F32(self.l1)) | (divisor == 0), F32(0), moved)


class Average(Reference):
    """Of values, not of gradients; the scale is a factor on the rate."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr, 0, False)

    def step(self, p: Array, g: Array, lr: float | None = None, scale: float | None = None) -> None:
        rate = (self.lr if lr is None else lr) * float(F32(1 if scale is None else scale))
        self.steps += 1
        with np.errstate(all="ignore"):
            p[...] = lerp(p, g, rate)


class ScheduleFree(Reference):
    """torch has none: written from algorithm 1 of Defazio et al., NeurIPS 2024, in the form of its authors'
    package, whose running sum of squared rates is here a sum over all steps so far."""

    #: Place of the parameters between z and the average.
    beta: float
    warmup: float

    def initial(self, p: Array) -> dict[str, Array]:
        return {name: p.copy() if name == "z" else np.zeros_like(p) for name in self.names}

    def rate(self, step: int) -> float:
        """The rate of a step, counted from 1, in shares of the full one."""
        return min(1.0, step / max(1.0, self.warmup))

    def move(self, p: Array, direction: Array, lr: float) -> Array:
        share = self.rate(self.steps)
        weight = share**2 / math.fsum(self.rate(step) ** 2 for step in range(1, self.steps + 1))
        z, rate = self.state["z"], lr * share
        self.state["z"] = add(z, direction, -rate)
        return add(lerp(p, z, weight), direction, rate * (self.beta * (1 - weight) - 1))

    def average(self, p: Array) -> Array:
        return lerp(p, self.state["z"], 1 - 1 / self.beta)


class ScheduleFreeSGD(ScheduleFree):
    names = ("z",)

    def __init__(
        self, lr: float = 1.0, momentum: float = 0.9, weight_decay: float = 0, warmup: float = 0
    ) -> None:
        super().__init__(lr, weight_decay, False)
        self.beta, self.warmup = momentum, warmup

    def update(self, p: Array, g: Array, lr: float) -> Array:
        return self.move(p, self.decayed(p, g), lr)


class ScheduleFreeAdamW(ScheduleFree):
    names = ("z", "exp_avg_sq")

    def __init__(
        self,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        warmup: float = 0,
    ) -> None:
        super().__init__(lr, weight_decay, False)
        (self.beta, self.beta2), self.eps, self.warmup = betas, eps, warmup

    def update(self, p: Array, g: Array, lr: float) -> Array:
        square = addcmul(self.state["exp_avg_sq"] * F32(self.beta2), g, g, 1 - self.beta2)
        self.state["exp_avg_sq"] = square
        divisor = sqrt(square / F32(1 - self.beta2**self.steps)) + F32(self.eps)
        return self.move(p, self.decayed(p, g / divisor), lr)


OPTIMIZERS: dict[str, type[Reference]] = {
    "SGD": SGD,
    "Adagrad": Adagrad,
    "RMSprop": RMSprop,
    "Adadelta": Adadelta,
    "Adam": Adam,
    "AdamW": AdamW,
    "Lion": Lion,
    "Ftrl": Ftrl,
    "Average": Average,
    "ScheduleFreeSGD": ScheduleFreeSGD,
    "ScheduleFreeAdamW": ScheduleFreeAdamW,
}
