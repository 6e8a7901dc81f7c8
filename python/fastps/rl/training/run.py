"""Record of a run: the result of `train`, and the source of the live line, the picture and the files."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from fastps._shared.stats import percentile
from fastps.rl.policy import Policy

__all__ = ["JUDGED", "Point", "Run"]

#: Episodes whose mean return decides whether an environment is solved.
JUDGED = 100


class Point(NamedTuple):
    """One evaluation of the model during a run.

    Attributes:
        frames: Frames of all workers at that time.
        updates: Updates of the model.
        seconds: Since the workers were started.
        mean_return: Mean undiscounted return of the most probable actions.
        episodes: How many episodes that is the mean of.
    """

    frames: int
    updates: int
    seconds: float
    mean_return: float
    episodes: int


@dataclass
class Run:
    """A run of `train`.

    Attributes:
        model: The trained model; during the run, an earlier one.
        policy: The trained model with what normalizes its observations; None before the end of the run.
        threshold: The mean return at which the environment counts as solved; None if it defines none.
        curve: The evaluations, in order.
        messages: What happened to processes: errors, deaths and restarts. Discarded episodes are logged.
        frames: Frames of all workers; of a resumed run, also those of the runs before it.
        updates: Updates of the model, counted likewise.
        earlier: The frames of the runs before it.
        solved_at: Frames when the mean return of the last 100 training episodes, of all workers and with
            drawn actions, first reached the threshold; None: never.
    """

    model: nn.Module
    threshold: float | None = None
    policy: Policy | None = None
    curve: list[Point] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    frames: int = 0
    earlier: int = 0
    updates: int = 0
    seconds: float = 0.0
    restarts: int = 0
    solved_at: int | None = None
    #: Counters of each worker process, by its number.
    _workers: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)
    _returns: deque[float] = field(default_factory=lambda: deque(maxlen=JUDGED), repr=False)
    _rates: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=25), repr=False)

    @property
    def solved_greedily_at(self) -> int | None:
        """Frames at the first evaluation whose mean over 100 episodes reached the threshold; None: none."""
        if self.threshold is None:
            return None
        solved = (p for p in self.curve if p.episodes >= JUDGED and p.mean_return >= self.threshold)
        return next((point.frames for point in solved), None)

    @property
    def best_return(self) -> float | None:
        """The largest mean return of an evaluation; None before the first."""
        return max((point.mean_return for point in self.curve), default=None)

    @property
    def training_return(self) -> float | None:
        """Mean return of the last 100 training episodes, whose actions are drawn; None before the first."""
        return sum(self._returns) / len(self._returns) if self._returns else None

    @property
    def frames_per_second(self) -> float:
        """Over the last seconds."""
        if len(self._rates) < 2:
            return 0.0
        (then, before), (now, after) = self._rates[0], self._rates[-1]
        return (after - before) / max(now - then, 1e-9)

    @property
    def staleness(self) -> dict[int, int]:
        """Histogram over all workers: pushes by others in between, to pushes."""
        total: Counter[int] = Counter()
        for stats in self._workers.values():
            total.update(stats["staleness"])
        return dict(sorted(total.items()))

    @property
    def stats(self) -> dict[str, Any]:
        """Counters of the whole run, as JSON can hold them.

        ``frames``, ``updates``, ``seconds``, ``frames_per_second`` (of the whole run), ``training_return``,
        ``staleness`` (histogram), ``staleness_p50``, ``staleness_p99``, ``restarts``, and ``workers``: the
        counters of each worker process, as `run_worker` returns them, in the order of their starts.
        """
        staleness = self.staleness
        return {
            "frames": self.frames,
            "updates": self.updates,
            "seconds": self.seconds,
            "frames_per_second": (self.frames - self.earlier) / self.seconds if self.seconds else 0.0,
            "training_return": self.training_return,
            "staleness": staleness,
            "staleness_p50": percentile(staleness, 0.5),
            "staleness_p99": percentile(staleness, 0.99),
            "restarts": self.restarts,
            "workers": [stats for _, stats in sorted(self._workers.items())],
        }

    def take(self, worker: int, report: dict[str, Any]) -> None:
        """Takes in a worker's report."""
        self._workers[worker] = report["stats"]
        for frames, total in report["returns"]:
            self._returns.append(total)
            if self.solved_at is None and self._solved():
                self.solved_at = frames
        self.frames = max(self.frames, report["frames"])
        self.updates = max(self.updates, report["updates"])

    def _solved(self) -> bool:
        mean = self.training_return
        if self.threshold is None or mean is None or len(self._returns) < JUDGED:
            return False
        return mean >= self.threshold

    def tick(self, seconds: float) -> None:
        """Notes the time."""
        self.seconds = seconds
        self._rates.append((seconds, self.frames))

    def as_json(self) -> dict[str, Any]:
        """The result as one object of JSON."""
        return {
            "best_return": self.best_return,
            "solved_at": self.solved_at,
            "solved_greedily_at": self.solved_greedily_at,
            **self.stats,
            "curve": [point._asdict() for point in self.curve],
            "messages": self.messages,
        }
