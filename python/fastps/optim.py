"""Optimizers that a tensor's shards run: frozen settings with torch's argument names and defaults.

A tensor is registered with one of them; every push is one step of it. The arithmetic is that of torch's CPU
kernels with an IEEE square root (formulas in ``rust/core/src/kernel/optim``). All numbers are float64 until a
step rounds its scalars once to float32.

Sparse pushes (`fastps.Sparse`) step only the rows that they name. `Ftrl` supports them, and so do, without
weight decay, `Adagrad`, `SGD` without momentum, and `Adam` without amsgrad (which then is torch's
``SparseAdam``). The others raise `fastps.ConfigError` with the reason. Each slice counts the pushes that
touch it as its steps; a tensor of one slice (up to 258,048 elements) thus counts as torch does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from fastps import _fastps
from fastps._shared.checks import choice, given, plain

__all__ = [
    "EMA",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Average",
    "Ftrl",
    "Lion",
    "Optimizer",
    "RMSprop",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
]

EpsMode = Literal["outside", "inside", "both"]


@dataclass(frozen=True)
class Optimizer:
    """Base of all optimizers; use a subclass. Invalid settings raise `fastps.ConfigError`."""

    _kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        _fastps.check_optimizer(self)
        for name, value in vars(self).items():
            given(self, name, plain(value))

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names that `named` accepts, which are those on the wire.

        >>> fastps.optim.Optimizer.names()[:6]
        ('sgd', 'adagrad', 'rmsprop', 'adadelta', 'adam', 'adamw')
        """
        return tuple(each._kind for each in Optimizer.__subclasses__())

    @staticmethod
    def named(name: str, **settings: Any) -> Optimizer:
        """The optimizer of a name, in lower case, with default settings except those given.

        Raises:
            ConfigError: No optimizer has this name, or a setting is invalid.

        >>> fastps.optim.Optimizer.named("adagrad", lr=0.1).lr
        0.1
        """
        kinds = {each._kind: each for each in Optimizer.__subclasses__()}
        return choice("optimizer", name, kinds)(**settings)

    def _is_but_for_lr(self, other: Optimizer) -> bool:
        """Returns whether two optimizers differ at most in ``lr``, which each push may set."""
        lr: dict[str, Any] = {"lr": vars(other)["lr"]}
        return type(self) is type(other) and replace(self, **lr) == other

    def _apart(self, other: Optimizer) -> tuple[str, str]:
        """Describes both by their differences, except ``lr``; of other kinds, by non-defaults."""

        def text(one: Optimizer, than: Optimizer) -> str:
            of = {name: value for name, value in vars(one).items() if vars(than)[name] != value}
            settings = (f"{name}={value!r}" for name, value in of.items() if name != "lr")
            return f"{type(one).__name__}({', '.join(settings)})"

        if type(self) is type(other):
            return text(self, other), text(other, self)
        return text(self, type(self)()), text(other, type(other)())


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent (Robbins and Monro 1951), with Polyak's or Nesterov's momentum.

    Args:
        lr: Learning rate, >= 0.
        momentum: Factor on the velocity, >= 0; 0 keeps no state.
        dampening: Share of the gradient that does not enter the velocity, from the second step on.
        weight_decay: L2 penalty, >= 0, added to the gradient.
        nesterov: Nesterov's form; needs ``momentum > 0`` and ``dampening == 0``.
        maximize: Ascend instead of descend.

    State: ``momentum_buffer`` if momentum is not 0.

    >>> fastps.SGD(lr=0.1, momentum=0.9).lr
    0.1
    """

    _kind = "sgd"
    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan and Singer, JMLR 2011): the optimizer of DistBelief's shards.

    Args:
        lr: Learning rate, >= 0.
        lr_decay: The rate of step t (from 0) is ``lr / (1 + t * lr_decay)``.
        weight_decay: L2 penalty, >= 0, added to the gradient.
        initial_accumulator_value: Initial value of the sum of squares, >= 0.
        eps: Added for numerical stability, >= 0.
        eps_mode: ``"outside"``: ``sqrt(s) + eps`` (the paper, torch); ``"inside"``: ``sqrt(s + eps)`` (neon,
            optax); ``"both"``: ``sqrt(s + eps) + eps``.
        maximize: Ascend instead of descend.

    State: ``sum``.

    >>> fastps.Adagrad(lr=0.1).eps
    1e-10
    """

    _kind = "adagrad"
    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    eps_mode: EpsMode = "outside"
    maximize: bool = False


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton 2012), optionally centered as by Graves (arXiv:1308.0850).

    Args:
        lr: Learning rate, >= 0.
        alpha: Decay of the mean of squares, in [0, 1).
        eps: Added for numerical stability, >= 0.
        weight_decay: L2 penalty, >= 0, added to the gradient.
        momentum: Factor on the velocity, >= 0; 0 keeps none.
        centered: Divide by the standard deviation instead of the root mean square.
        eps_mode: As in `Adagrad`; neon's form is ``"both"``, optax's ``"inside"``.
        maximize: Ascend instead of descend.

    State: ``square_avg``; ``momentum_buffer`` with momentum; ``grad_avg`` if centered.

    >>> fastps.RMSprop().alpha
    0.99
    """

    _kind = "rmsprop"
    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    eps_mode: EpsMode = "outside"
    maximize: bool = False


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Adadelta (Zeiler, arXiv:1212.5701).

    Args:
        lr: Factor on the paper's step, >= 0.
        rho: Decay of both running means, in [0, 1].
        eps: Added under both roots, >= 0.
        weight_decay: L2 penalty, >= 0, added to the gradient.
        maximize: Ascend instead of descend.

    State: ``square_avg``, ``acc_delta``.

    >>> fastps.Adadelta().rho
    0.9
    """

    _kind = "adadelta"
    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, ICLR 2015).

    Args:
        lr: Learning rate, >= 0.
        betas: Decays of the running means of the gradient and of its square, each in [0, 1).
        eps: Added outside the root, >= 0.
        weight_decay: L2 penalty, >= 0, added to the gradient.
        amsgrad: Divide by the largest mean of squares so far (Reddi, Kale and Kumar, ICLR 2018): the largest
            before the correction of the bias, as torch; optax takes the largest corrected one.
        maximize: Ascend instead of descend.

    State: ``exp_avg``, ``exp_avg_sq``; ``max_exp_avg_sq`` with amsgrad.

    >>> fastps.Adam().betas
    (0.9, 0.999)
    """

    _kind = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019).

    Args:
        lr: Learning rate, >= 0.
        betas: Decays of the running means of the gradient and of its square, each in [0, 1).
        eps: Added outside the root, >= 0.
        weight_decay: Every step first shrinks the parameters by ``1 - lr * weight_decay``; >= 0.
        amsgrad: As in `Adam`.
        maximize: Ascend instead of descend.

    State: as `Adam`.

    >>> fastps.AdamW().weight_decay
    0.01
    """

    _kind = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion: sign descent along two running means of the gradient (Chen et al., NeurIPS 2023, algorithm 2).

    Every step moves every element by the rate, or not at all. The authors advise a rate 3 to 10 times smaller
    than that of `AdamW`, and a weight decay as many times larger. It keeps half as much state.

    Args:
        lr: Learning rate, >= 0.
        betas: Share of the running mean in the direction of a step, and its decay, each in [0, 1).
        weight_decay: Every step first shrinks the parameters by ``1 - lr * weight_decay``; >= 0.
        maximize: Ascend instead of descend.

    State: ``exp_avg``.

    >>> fastps.Lion().betas
    (0.9, 0.99)
    """

    _kind = "lion"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass(frozen=True)
class Ftrl(Optimizer):
    """FTRL-proximal (McMahan et al., KDD 2013), for sparse linear models.

    The values follow from the state. A value from the registration (or from `assign`) is only the point at
    which the element's next gradient was computed, and is then replaced; so begin with zeros.

    Args:
        lr: The paper's alpha, > 0. A push with ``lr=0`` changes no value.
        beta: Added to the root of the sum of squares, >= 0. With a larger one the rate falls more slowly at
            first.
        l1: L1 penalty, >= 0; makes small weights exactly 0.
        l2: L2 penalty, >= 0.
        maximize: Ascend instead of descend.

    State: ``z``, ``n``.

    >>> fastps.Ftrl(lr=0.1, l1=1.0).beta
    1.0
    """

    _kind = "ftrl"
    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    maximize: bool = False


@dataclass(frozen=True)
class Average(Optimizer):
    """A running average of pushed values: ``W += lr * scale * (x - W)`` for pushed *values* x.

    For statistics of a model, such as BatchNorm's: they are pushed exactly once, logged, saved and moved like
    gradients. Push them with a client, not with a `Worker`, which sums what it pushes. Sparse pushes are
    refused.

    Args:
        lr: Weight of the pushed value, from 0 to 1; 1 keeps the latest value.

    State: none.

    >>> store = fastps.Store()
    >>> store.register("mean", np.zeros(1, np.float32), optimizer=fastps.Average(lr=0.25))
    >>> receipt = store.push("mean", np.full(1, 8, np.float32))
    >>> store.pull("mean")
    array([2.], dtype=float32)
    """

    _kind = "average"
    lr: float = 1e-1


@dataclass(frozen=True)
class ScheduleFreeSGD(Optimizer):
    """Schedule-Free SGD (Defazio et al., NeurIPS 2024): an average in place of a decreasing rate.

    The tensor's values are the point where gradients are taken. The average, from which the model is to be
    evaluated, follows from them and ``z``: `fastps.ParameterServer.pull` reads it with ``view="average"``.
    Assigned values replace all three. Its weights are the squared rates of the warm-up, then equal, so a push
    takes no rate of its own; and each step moves all rows, so sparse pushes and ``"hogwild"`` tensors are
    refused.

    Args:
        lr: Learning rate after the warm-up, >= 0.
        momentum: Place of the values between ``z`` (0) and the average (1), above 0 and below 1.
        weight_decay: L2 penalty, >= 0, added to the gradient.
        warmup: Steps in which the rate grows linearly to `lr`.

    State: ``z``, the point that plain steps move.

    >>> store = fastps.Store()
    >>> store.register("w", np.zeros(1, np.float32), optimizer=fastps.ScheduleFreeSGD(lr=1.0, momentum=0.5))
    >>> for _ in range(2):
    ...     receipt = store.push("w", np.full(1, -8, np.float32))
    >>> store.pull("w"), store.pull("w", view="average"), store.state("w")["z"]
    (array([14.], dtype=float32), array([12.], dtype=float32), array([16.], dtype=float32))
    """

    _kind = "schedule_free_sgd"
    lr: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    warmup: float = 0.0


@dataclass(frozen=True)
class ScheduleFreeAdamW(Optimizer):
    """Schedule-Free AdamW (Defazio et al., NeurIPS 2024): as `ScheduleFreeSGD`, with Adam's scale of steps.

    Args:
        lr: Learning rate after the warm-up, >= 0. Rates some 2 to 10 times AdamW's are usual.
        betas: Place of the values between ``z`` (0) and the average (1), above 0 and below 1; and share of
            the old mean of squares that each step keeps, >= 0 and < 1.
        eps: Added to the root, >= 0.
        weight_decay: Decoupled decay of the values, >= 0.
        warmup: Steps in which the rate grows linearly to `lr`.

    State: ``z``, ``exp_avg_sq``.

    >>> fastps.ScheduleFreeAdamW(warmup=100).lr
    0.0025
    """

    _kind = "schedule_free_adamw"
    lr: float = 2.5e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: float = 0.0


@dataclass(frozen=True)
class EMA:
    """An exponential moving average of a tensor's values, which its shards keep beside the optimizer's state.

    Each step updates it in the same pass over memory: ``A = lerp(A, W, 1 - decay)`` in float32. It costs 4
    bytes per element and no traffic; it is logged, saved, restored and moved with the tensor, and a step that
    is repeated after a failure counts once. `fastps.ParameterServer.pull` reads it with ``view="average"``.
    Assigned values replace it, too. The tensor is a float32 ``"exact"`` one and takes no sparse pushes.

    Args:
        decay: Share of the old average that an update keeps, above 0 and below 1.
        every: Steps from one update to the next, >= 1. Each slice counts its own steps.
        start: Steps during which the average equals the values, >= 0.

    State: ``average``.

    >>> store = fastps.Store()
    >>> average = fastps.EMA(decay=0.75)
    >>> store.register("w", np.zeros(1, np.float32), optimizer=fastps.SGD(lr=1.0), average=average)
    >>> for _ in range(2):
    ...     receipt = store.push("w", np.full(1, -8, np.float32))
    >>> store.pull("w"), store.pull("w", view="average")
    (array([16.], dtype=float32), array([5.5], dtype=float32))
    """

    _kind: ClassVar[str] = "ema"
    decay: float
    every: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        _fastps.check_average(self)
        for name, value in vars(self).items():
            given(self, name, plain(value))
