"""`to`: writes each step to files, TensorBoard or Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from fastps._shared.checks import at_least, invalid
from fastps.errors import ConfigError
from fastps.worker import Step

__all__ = ["Recorder", "to"]


class _Target(Protocol):
    def write(self, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class _Lines:
    """One JSON object per line, each written at once, so that a killed process loses none."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 closed by `close`

    def write(self, step: int, values: dict[str, float]) -> None:
        # JSON has no NaN: it is null.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")

    def close(self) -> None:
        self._file.close()


class _Board:
    """Curves of TensorBoard, drawn over the worker's own steps."""

    def __init__(self, folder: str) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ImportError("tensorboard: needs its package: pip install tensorboard") from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer: Any = EventFileWriter(folder)

    def write(self, step: int, values: dict[str, float]) -> None:
        each = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(
            self._event(step=step, wall_time=time.time(), summary=self._summary(value=each))
        )

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases, in this project."""

    def __init__(self, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("wandb: needs the package wandb: pip install wandb") from error
        self._run = wandb.init(project=project)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


_KINDS: dict[str, Callable[[str], _Target]] = {"jsonl": _Lines, "tensorboard": _Board, "wandb": _Wandb}


class Recorder:
    """Writes steps to its targets; made by `to`. Call it with each `fastps.Step`, and `close` it after the
    last one. A call after `close` raises `ConfigError`.
    """

    def __init__(self, targets: list[_Target], every: int) -> None:
        self._targets = targets
        self._every = every
        self._closed = False

    def __call__(self, step: Step) -> None:
        if self._closed:
            raise ConfigError("the recorder is closed", expected="an open recorder", got="a closed one")
        if step.step % self._every:
            return
        values = {name: float(v) for name, v in step._asdict().items() if name != "step" and v is not None}
        for target in self._targets:
            target.write(step.step, values)

    def close(self) -> None:
        """Completes and closes all targets."""
        self._closed = True
        targets, self._targets = self._targets, []
        for target in targets:
            target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def to(*targets: str, every: int = 1) -> Recorder:
    """Makes an ``on_step`` that records loss, staleness, bytes, scale, global step and learning rate.

    Args:
        targets: ``"jsonl:FILE"`` appends one JSON object per step; ``"tensorboard:DIR"`` (package
            tensorboard); ``"wandb:PROJECT"`` (package wandb). Unknown values of a step are left out.
        every: Steps between two records.

    Raises:
        ConfigError: A target has another form; nothing was opened.
        ImportError: A package is not installed.
        OSError: A file cannot be written.

    >>> import tempfile
    >>> path, store = tempfile.mkdtemp() + "/steps.jsonl", fastps.Store()
    >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=0.5))
    >>> params, ones = {"w": np.zeros(2, np.float32)}, np.ones(2, np.float32)
    >>> with fastps.record.to(f"jsonl:{path}") as record:
    ...     with fastps.Worker(store, params, fastps.Async(), on_step=record) as worker:
    ...         worker.step({"w": ones}, lr=0.25, loss=3.0)
    >>> print(open(path).read().strip())
    {"step": 1, "loss": 3.0, "staleness": 0.0, "bytes": 8.0, "scale": 1.0, "global_step": 1.0, "lr": 0.25}
    """
    every = at_least(1, "every", every)
    chosen = []
    for target in targets:
        kind, _, where = target.partition(":") if isinstance(target, str) else ("", "", "")
        if kind not in _KINDS or not where:
            raise invalid("target", "'jsonl:FILE', 'tensorboard:DIR' or 'wandb:PROJECT'", target)
        chosen.append((_KINDS[kind], os.path.expanduser(where)))
    opened: list[_Target] = []
    try:
        for make, where in chosen:
            opened.append(make(where))
    except BaseException:
        for one in opened:
            one.close()
        raise
    return Recorder(opened, every)
