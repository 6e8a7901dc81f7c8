"""A visitor's settings, checked once on arrival."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import fastps
from fastps.codecs import Codec
from fastps.modes import Mode
from fastps.optim import Optimizer
from fastps.simulate import Constant, Duration, Exponential, Pareto
from fastps_lab.live.errors import RefusedError
from fastps_lab.live.problems import DIGITS, PLANES

__all__ = ["MOST_WORKERS", "Settings", "pace"]

MOST_WORKERS = 64
#: Workers at full speed; more of them compute at a tenth of it.
FAST_WORKERS = 16
#: Milliseconds that a gradient takes.
FAST_PACE, SLOW_PACE = 20.0, 200.0

#: Those whose tensors may race; `average` takes values.
_OPTIMIZERS = tuple(
    name for name in Optimizer.names() if name != "average" and not name.startswith("schedule_free")
)
_CODECS: dict[str, Codec] = {
    **{name: Codec.named(name) for name in Codec.names()},
    "stochastic": fastps.Int8(stochastic=True),
}
_DURATIONS: dict[str, Duration] = {
    "constant": Constant(1.0),
    "exponential": Exponential(1.0),
    "pareto": Pareto(1.0),
}
_WORDS = {
    "problem": (*PLANES, DIGITS),
    "durations": tuple(_DURATIONS),
    "mode": ("async", "local", "bounded", "sync", "warm"),
    "on_stale": ("scale", "reject"),
    "codec": tuple(_CODECS),
    "optimizer": _OPTIMIZERS,
}
_RANGES = {
    "x": (-100.0, 100.0),
    "y": (-100.0, 100.0),
    "workers": (1, MOST_WORKERS),
    "spread": (1.0, 20.0),
    "straggler": (1.0, 20.0),
    "delay": (0.0, 10.0),
    "push_every": (1, 100),
    "pull_every": (1, 100),
    "local_lr": (0.0, 100.0),
    "bound": (0, 64),
    "backup": (0, 63),
    "warm_steps": (1, 1000),
    "max_staleness": (-1, 1000),
    "seed": (0, 2**32 - 1),
    "lr": (0.0, 100.0),
    "momentum": (0.0, 0.999),
}
#: Settings that running workers adopt, or that change only their number.
_WHILE_RUNNING = ("workers", "durations", "spread", "straggler", "delay", "lr")


@dataclass(frozen=True)
class Settings:
    """The controls of the page that mean something to real workers.

    Attributes:
        problem: The trained problem.
        x, y: Where a function of two numbers starts.
        workers: Worker processes.
        durations: Distribution of the time of a gradient.
        spread: How many times slower the last worker is than the first, with equal ratios in between.
        straggler: How many times slower the last worker is, besides.
        delay: Time between worker and servers, each way, in units of a gradient's mean time.
        mode: ``"async"``, ``"local"``, ``"bounded"``, ``"sync"`` or ``"warm"``.
        push_every, pull_every, local_lr: Of `fastps.Local`.
        bound: ``staleness`` of `fastps.Bounded`.
        backup: How many of the workers are backups in `fastps.Sync`.
        warm_steps: ``steps`` of `fastps.WarmStart`.
        max_staleness: Of `fastps.Async`; -1: no bound.
        on_stale, delay_adaptive, momentum_matching: Of `fastps.Async`; the page matches no beta1 of Adam.
        codec: How gradients travel.
        seed: Of the times.
        optimizer, lr, momentum, nesterov: The servers' optimizer.
    """

    problem: str = "beale"
    x: float = 1.0
    y: float = 1.0
    workers: int = 8
    durations: str = "exponential"
    spread: float = 1.0
    straggler: float = 1.0
    delay: float = 0.0
    mode: str = "async"
    push_every: int = 5
    pull_every: int = 5
    local_lr: float = 0.001
    bound: int = 3
    backup: int = 1
    warm_steps: int = 20
    max_staleness: int = -1
    on_stale: str = "scale"
    delay_adaptive: bool = True
    momentum_matching: bool = False
    codec: str = "float32"
    seed: int = 1
    optimizer: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Settings:
        """Settings from JSON; `RefusedError` names the first one that is unknown or out of range."""
        known: dict[str, Any] = {field.name: field.default for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise RefusedError(400, f"unknown setting: expected one of {', '.join(known)}, got {name!r}")
            _check(name, value, type(known[name]))
        settings = cls(**{name: type(known[name])(value) for name, value in given.items()})
        try:
            settings.fastps_mode()
            settings.fastps_optimizer()
        except fastps.ConfigError as error:
            raise RefusedError(400, str(error)) from error
        return settings

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings for JSON."""
        return asdict(self)

    def restarts(self, new: Settings) -> bool:
        """Returns whether workers have to restart to adopt the new settings."""
        same = {name: getattr(self, name) for name in _WHILE_RUNNING}
        return replace(new, **same) != self or (self.mode == "sync" and self.workers != new.workers)

    def starts_over(self, new: Settings) -> bool:
        """Returns whether the new settings begin at their start instead of the present point."""
        return (self.problem, self.x, self.y) != (new.problem, new.x, new.y)

    def mean(self, worker: int) -> float:
        """Mean time of a worker's gradients, in units of the first one's, which late ones have, too."""
        last = self.workers - 1
        slow = self.straggler if worker == last else 1.0
        return slow * math.pow(self.spread, worker / last if 0 < worker <= last else 0.0)

    def duration(self) -> Duration:
        """The distribution of times, in units of their mean."""
        return _DURATIONS[self.durations]

    def fastps_mode(self) -> Mode:
        """The workers' mode."""
        match self.mode:
            case "local":
                return fastps.Local(self.push_every, self.pull_every, lr=self.local_lr, overlap=False)
            case "bounded":
                return fastps.Bounded(self.bound)
            case "sync":
                backup = min(self.backup, self.workers - 1)
                return fastps.Sync(self.workers - backup, backup)
        free = fastps.Async(
            None if self.max_staleness < 0 else self.max_staleness,
            "reject" if self.on_stale == "reject" and self.max_staleness >= 0 else "scale",
            self.delay_adaptive,
            self.momentum_matching and self.optimizer not in ("adam", "adamw"),
        )
        return fastps.WarmStart(self.warm_steps, free) if self.mode == "warm" else free

    def fastps_optimizer(self) -> Optimizer:
        """The servers' optimizer."""
        options: dict[str, Any] = {"lr": self.lr}
        if self.optimizer in ("sgd", "rmsprop"):
            options["momentum"] = self.momentum
        if self.optimizer == "sgd" and self.momentum:
            options["nesterov"] = self.nesterov
        return Optimizer.named(self.optimizer, **options)

    def fastps_codec(self) -> Codec:
        """The codec of pushes."""
        return _CODECS[self.codec]


def pace(workers: int) -> float:
    """Mean seconds that a gradient takes."""
    return (FAST_PACE if workers <= FAST_WORKERS else SLOW_PACE) / 1000


def _check(name: str, value: Any, kind: type) -> None:
    if name in _WORDS:
        good, expected = value in _WORDS[name] if isinstance(value, str) else False, " or ".join(_WORDS[name])
    elif kind is bool:
        good, expected = isinstance(value, bool), "true or false"
    else:
        least, most = _RANGES[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        good = number and least <= value <= most and (kind is float or value == int(value))
        expected = f"{'an integer' if kind is int else 'a number'} from {least:g} to {most:g}"
    if not good:
        raise RefusedError(400, f"invalid {name}: expected {expected}, got {str(value)[:80]!r}")
