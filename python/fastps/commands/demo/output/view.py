"""Progress as a person would like it: a live table in a terminal (with rich), plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import math
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from fastps._shared.stats import percentile
from fastps.commands.demo.state import Run, WorkerState

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Seconds between two plain lines.
PLAIN_EVERY = 2.0

EXTRA = "pip install rich matplotlib"


class View(Protocol):
    """Display of a run. A context manager: the live table is up inside."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None:
        """One line that stays."""

    def update(self, run: Run) -> None:
        """The run has gone on; called many times a second."""


def human_bytes(count: float) -> str:
    """A number of bytes as a person reads it: ``"1.2 MB"`` (powers of 1000)."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def headline(run: Run) -> str:
    """Loss, accuracy and progress in one line."""
    if not run.points:
        return "starting"
    point = run.points[-1]
    return (
        f"{run.seconds:5.1f} s  {point.updates:>7,} updates  loss {point.loss:.4f}  "
        f"accuracy {100 * point.accuracy:5.2f} %"
    )


def worker_cells(worker: WorkerState) -> tuple[str, ...]:
    """The row of one worker, in the order of `COLUMNS`."""
    p50, p99 = percentile(worker.staleness, 0.50), percentile(worker.staleness, 0.99)
    rate = f"{worker.steps_per_second:,.0f}" if worker.state == "training" else "-"
    return (
        str(worker.name),
        f"{worker.state} ({worker.note})" if worker.note else worker.state,
        f"{worker.steps:,}",
        rate,
        "-" if math.isnan(worker.loss) else f"{worker.loss:.3f}",
        "-" if p50 is None else f"{p50} / {p99}",
        human_bytes(worker.bytes_pushed),
    )


#: Staleness is its median and 99th percentile.
COLUMNS = ("worker", "state", "steps", "steps/s", "loss", "staleness", "sent")


class PlainView:
    """A line of at most 80 columns every two seconds, and one for each event."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        """Print it."""
        print(text, file=self._stream, flush=True)

    def update(self, run: Run) -> None:
        """Print a line if the last one is old enough."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PLAIN_EVERY
        training = [w for w in run.workers if w.state == "training"]
        rate = f"{sum(w.steps_per_second for w in training):,.0f} steps/s" if training else ""
        self.say("  ".join(part for part in (headline(run), rate) if part))


class LiveView:
    """A table that is redrawn in place, by rich."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False)
        self._next = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print it above the table."""
        self._console.print(text, highlight=False)

    def update(self, run: Run) -> None:
        """Redraw, at most five times a second."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 0.2
            self._live.update(_table(run), refresh=True)


def _table(run: Run) -> RenderableType:
    from rich.table import Table

    styles = {"training": "green", "killed": "bold red", "done": "cyan", "starting": "yellow"}
    config = run.config
    table = Table(
        title=f"{config.data}: {config.mode}, {config.optimizer}, {config.shards} shards, {config.codec}",
        caption=headline(run),
        title_justify="left",
        caption_justify="left",
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "state" else "right")
    for worker in run.workers:
        cells: list[Any] = list(worker_cells(worker))
        cells[1] = f"[{styles[worker.state]}]{cells[1]}[/]"
        table.add_row(*cells)
    return table


def has_rich() -> bool:
    """Returns whether the live table can be drawn."""
    return importlib.util.find_spec("rich") is not None


def make_view(stream: TextIO) -> View:
    """The live table if ``stream`` is a terminal and rich is installed, plain lines otherwise."""
    if stream.isatty() and has_rich():
        return LiveView(stream)
    if stream.isatty():
        print(f"plain progress; for the live table and the picture: {EXTRA}", file=stream)
    return PlainView(stream)
