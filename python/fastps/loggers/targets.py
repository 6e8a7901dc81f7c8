"""Loggers that write files, TensorBoard's curves and runs of Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any

from fastps._shared.checks import as_path, words
from fastps._shared.idioms.missing import missing
from fastps._shared.types import File
from fastps.loggers.logger import Logger

__all__ = ["JSONL", "TensorBoard", "WandB"]


class JSONL(Logger):
    """Appends one JSON object per step to a file, each at once, so that a killed process loses none.

    Args:
        path: The file; ``~`` is the home folder. A number that is not finite is written as null.
        every: Steps between two records.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: File, *, every: int = 1) -> None:
        super().__init__(every)
        file = os.path.expanduser(as_path("path", path))
        self._file = open(file, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 closed by `close`

    def write(self, step: int, values: dict[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")

    def finish(self) -> None:
        self._file.close()


class TensorBoard(Logger):
    """Writes TensorBoard's curves over the worker's own steps. Needs the package tensorboard.

    Args:
        folder: The folder of this worker's curves; ``~`` is the home folder.
        every: Steps between two points.

    Raises:
        ImportError: The package tensorboard is not installed.
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: File, *, every: int = 1) -> None:
        super().__init__(every)
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise missing("fastps.loggers.TensorBoard", error, "tensorboard", "tensorboard") from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer: Any = EventFileWriter(os.path.expanduser(as_path("folder", folder)))

    def write(self, step: int, values: dict[str, float]) -> None:
        each = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(
            self._event(step=step, wall_time=time.time(), summary=self._summary(value=each))
        )

    def finish(self) -> None:
        self._writer.close()


class WandB(Logger):
    """Writes a run of Weights & Biases. Needs the package wandb.

    Args:
        project: The run's project.
        every: Steps between two records.

    Raises:
        ImportError: The package wandb is not installed.
    """

    def __init__(self, project: str, *, every: int = 1) -> None:
        super().__init__(every)
        words("project", project)
        try:
            import wandb
        except ImportError as error:
            raise missing("fastps.loggers.WandB", error, None, "wandb") from error
        self._run = wandb.init(project=project)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def finish(self) -> None:
        self._run.finish()
