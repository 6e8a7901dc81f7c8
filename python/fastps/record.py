"""Deprecated: the former spelling of `fastps.loggers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from fastps._shared.checks import at_least, invalid
from fastps._shared.idioms.deprecated import warn_renamed
from fastps.loggers import JSONL, Collection, Console, Logger, TensorBoard, WandB

__all__ = ["live", "to"]

_KINDS: dict[str, Callable[..., Logger]] = {"jsonl": JSONL, "tensorboard": TensorBoard, "wandb": WandB}
_CLASSES: dict[str, type] = {"Live": Console, "Recorder": Collection}


def to(*targets: str, every: int = 1) -> Collection:
    """Deprecated: ``loggers.JSONL(FILE)`` for ``"jsonl:FILE"``, and so on."""
    warn_renamed("fastps.record.to", "fastps.loggers.JSONL, TensorBoard or WandB")
    every = at_least(1, "every", every)
    chosen = []
    for target in targets:
        kind, _, where = target.partition(":") if isinstance(target, str) else ("", "", "")
        if kind not in _KINDS or not where:
            raise invalid("target", "'jsonl:FILE', 'tensorboard:DIR' or 'wandb:PROJECT'", target)
        chosen.append((_KINDS[kind], where))
    opened: list[Logger] = []
    try:
        for kind_of_logger, where in chosen:
            opened.append(kind_of_logger(where, every=every))
    except BaseException:
        Collection(*opened).close()
        raise
    return Collection(*opened)


def live(file: TextIO | None = None) -> Console:
    """Deprecated: `loggers.Console`."""
    warn_renamed("fastps.record.live", "fastps.loggers.Console")
    return Console(file)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _CLASSES:
            raise AttributeError(f"module 'fastps.record' has no attribute {name!r}", name=name)
        warn_renamed(f"fastps.record.{name}", f"fastps.loggers.{_CLASSES[name].__name__}")
        return _CLASSES[name]
