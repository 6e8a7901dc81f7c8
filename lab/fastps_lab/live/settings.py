"""A visitor's settings, checked once on arrival."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import fastps
from fastps.codecs import Codec
from fastps.modes import Mode
from fastps.optim import Optimizer
from fastps.simulate import Constant, Duration, Exponential, Pareto
from fastps_lab.live.errors import RefusedError
from fastps_lab.live.problems import DIGITS, PLANES

__all__ = ["MOST_WORKERS", "Settings", "pace"]

#: Workers at full speed; more of them compute at a tenth of it.
FAST_WORKERS = 16
#: Milliseconds that a gradient takes.
FAST_PACE, SLOW_PACE = 20.0, 200.0


def _table() -> dict[str, dict[str, Any]]:
    """The page's table of settings by their names, with the words that depend on the product."""
    text = (Path(__file__).parent / "page" / "table.js").read_text(encoding="utf-8")
    table = json.loads(text[text.index("[") : text.rindex("]") + 1])
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in table if "page" not in row}
    rows["problem"]["words"] = [*PLANES, DIGITS]
    # Those whose tensors may race; `average` takes values.
    free = (name for name in Optimizer.names() if not name.startswith("schedule_free"))
    rows["optimizer"]["words"] = [name for name in free if name != "average"]
    return rows


_ROWS = _table()
_KINDS: dict[str, type] = {"word": str, "flag": bool, "whole": int, "number": float}
MOST_WORKERS: int = _ROWS["workers"]["most"]

_DURATIONS: dict[str, Duration] = {
    "constant": Constant(1.0),
    "exponential": Exponential(1.0),
    "pareto": Pareto(1.0),
}
#: Settings that running workers adopt, or that change only their number.
_WHILE_RUNNING = ("workers", "durations", "spread", "straggler", "delay", "lr")


def _usual(name: str) -> Any:
    return _KINDS[_ROWS[name]["kind"]](_ROWS[name]["usual"])


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

    problem: str = _usual("problem")
    x: float = _usual("x")
    y: float = _usual("y")
    workers: int = _usual("workers")
    durations: str = _usual("durations")
    spread: float = _usual("spread")
    straggler: float = _usual("straggler")
    delay: float = _usual("delay")
    mode: str = _usual("mode")
    push_every: int = _usual("push_every")
    pull_every: int = _usual("pull_every")
    local_lr: float = _usual("local_lr")
    bound: int = _usual("bound")
    backup: int = _usual("backup")
    warm_steps: int = _usual("warm_steps")
    max_staleness: int = _usual("max_staleness")
    on_stale: str = _usual("on_stale")
    delay_adaptive: bool = _usual("delay_adaptive")
    momentum_matching: bool = _usual("momentum_matching")
    codec: str = _usual("codec")
    seed: int = _usual("seed")
    optimizer: str = _usual("optimizer")
    lr: float = _usual("lr")
    momentum: float = _usual("momentum")
    nesterov: bool = _usual("nesterov")

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Settings:
        """Settings from JSON; `RefusedError` names the first one that is unknown or out of range."""
        for name, value in given.items():
            if name not in _ROWS:
                raise RefusedError(400, f"unknown setting: expected one of {', '.join(_ROWS)}, got {name!r}")
            _check(value, **_ROWS[name])
        settings = cls(**{name: _KINDS[_ROWS[name]["kind"]](value) for name, value in given.items()})
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
        return fastps.Int8(stochastic=True) if self.codec == "stochastic" else Codec.named(self.codec)


def pace(workers: int) -> float:
    """Mean seconds that a gradient takes."""
    return (FAST_PACE if workers <= FAST_WORKERS else SLOW_PACE) / 1000


def _check(
    value: Any,
    name: str,
    kind: str,
    words: Sequence[str] = (),
    least: float = 0,
    most: float = 0,
    **_: Any,
) -> None:
    """Raises `RefusedError` unless a value is one that its row of the table has."""
    if kind == "word":
        good, expected = value in words if isinstance(value, str) else False, " or ".join(words)
    elif kind == "flag":
        good, expected = isinstance(value, bool), "true or false"
    else:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        good = number and least <= value <= most and (kind == "number" or value == int(value))
        expected = f"{'an integer' if kind == 'whole' else 'a number'} from {least:g} to {most:g}"
    if not good:
        raise RefusedError(400, f"invalid {name}: expected {expected}, got {str(value)[:80]!r}")
