"""One worker process of ``fastps-lab live``: ``python -m fastps_lab.live.worker``.

Standard input: JSON objects, one a line, see `Inbox`; its end means that the parent is gone. Standard output:
one JSON object for each step, and for each thing that happened.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import fastps
from fastps.commands.kit import hold_on_to, watch_stdin
from fastps_lab.live.problems import Problem, problem
from fastps_lab.live.settings import Settings

__all__ = ["Orders"]

#: Timeout of a call in seconds; a server restarts in less.
TIMEOUT = 10.0
#: Seconds between two checks for the other workers.
LOOK_EVERY = 0.001


@dataclass(frozen=True)
class Orders:
    """Orders of a worker.

    Attributes:
        addresses: Of the shards.
        index: The worker's number.
        course: Number of the course; its tensors are of this course, too.
        pace: Mean seconds of a gradient.
        settings: The visitor's settings.
    """

    addresses: str
    index: int
    course: int
    pace: float
    settings: Settings

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"train": {**self.__dict__, "settings": self.settings.to_dict()}})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Orders:
        """Reads the result of `to_json`."""
        return cls(**{**values, "settings": Settings.from_mapping(values["settings"])})


def tensor(course: int, name: str) -> str:
    """The name of a course's tensor on the servers."""
    return f"course-{course}/{name}"


class Inbox:
    """Received lines: ``{"train": orders}``, also with new settings for the present course;
    ``{"nan": true}``; ``{"stop": true}``.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.orders: Orders | None = None
        self.nan = False
        watch_stdin(lambda line: self._lines.put(json.loads(line)), lambda: os._exit(1))

    def wait(self, seconds: float) -> None:
        """Waits for a line, and takes in all that have come."""
        with contextlib.suppress(queue.Empty):
            self._take(self._lines.get(timeout=seconds) if seconds > 0 else self._lines.get_nowait())
            while True:
                self._take(self._lines.get_nowait())

    def _take(self, message: dict[str, Any]) -> None:
        if "train" in message:
            self.orders = Orders.from_mapping(message["train"])
        elif "nan" in message:
            self.nan = True
        elif "stop" in message:
            sys.exit()


def tell(**values: Any) -> None:
    """Writes one line for the parent."""
    os.write(1, (json.dumps(values) + "\n").encode())


class Course:
    """The steps of one course.

    Args:
        ps: The servers.
        orders: What to train.
        task: The problem.
        inbox: Receives changed orders.
    """

    def __init__(self, ps: Any, orders: Orders, task: Problem, inbox: Inbox) -> None:
        self._orders, self._task, self._inbox = orders, task, inbox
        settings = orders.settings
        start = task.start((0.0, 0.0))
        self._names = {name: tensor(orders.course, name) for name in start}
        self._worker = fastps.Worker(
            ps,
            {self._names[name]: values for name, values in start.items()},
            settings.fastps_mode(),
            settings.fastps_codec(),
            on_step=self._note,
            rank=orders.index,
            name=f"worker {orders.index}",
            wait=False,
        )
        self._together = settings.mode in ("sync", "bounded")
        self._rng = np.random.default_rng([settings.seed, orders.index])
        self._last_step: fastps.Step | None = None
        self._fetched = 0.0  # when the last fetch began
        self._lost = 0
        self._rejected = 0

    def run(self) -> None:
        """Takes steps until other orders come."""
        try:
            while not self._worker.ready():
                if not self._continues(LOOK_EVERY):
                    return
            while self._continues() and self._step():
                pass
        finally:
            # As if an error had ended it: what waits belongs to a course that is over, and is not pushed.
            with contextlib.suppress(fastps.FastpsError):
                self._worker.__exit__(InterruptedError, InterruptedError(), None)

    def _continues(self, seconds: float = 0.0) -> bool:
        """Waits, and takes on new settings; False as soon as another course is to be trained."""
        end = time.monotonic() + seconds
        while True:
            self._inbox.wait(end - time.monotonic())
            if self._inbox.orders is None or self._inbox.orders.course != self._orders.course:
                return False
            self._orders = self._inbox.orders
            if time.monotonic() >= end:
                return True

    def _step(self) -> bool:
        """Takes one step; returns whether the course continues."""
        began = time.monotonic()
        params = self._params()
        at = self._task.position(params)
        grads, loss = self._task.gradient(params, self._rng)
        poisoned, self._inbox.nan = self._inbox.nan, False
        if poisoned:
            grads = {name: np.full_like(grad, np.nan) for name, grad in grads.items()}
        if not self._continues(self._duration() - (time.monotonic() - began)):
            return False
        computed = time.monotonic()
        try:
            times = self._push({self._names[name]: grad for name, grad in grads.items()}, loss)
        except fastps.FastpsError as error:
            tell(error=type(error).__name__, text=str(error))
            if isinstance(error, fastps.NonFiniteError) and not poisoned:
                return self._diverged()
            return not isinstance(error, fastps.UnknownTensorError)
        if times is not None:
            self._report(at, loss, (self._fetched or began, began, computed, *times))
            self._fetched = times[1]
        return times is not None

    def _params(self) -> dict[str, Any]:
        return {name: self._worker.params[whole] for name, whole in self._names.items()}

    def _duration(self) -> float:
        """Seconds that the gradient takes, its way to the servers and back included."""
        settings = self._orders.settings
        gradient = settings.mean(self._orders.index) * settings.duration().draw(self._rng)
        return self._orders.pace * (gradient + 2 * settings.delay)

    def _push(self, grads: dict[str, Any], loss: float) -> tuple[float, float] | None:
        """Pushes and fetches; when the push had been sent, and when the wait for other workers was over. None
        if the course ended meanwhile.
        """
        lr = self._orders.settings.lr
        if not self._together:
            self._worker.step(grads, lr=lr, loss=loss)
            return (now := time.monotonic()), now
        self._worker.begin(grads, lr=lr)
        pushed = time.monotonic()
        while not self._worker.ready():
            if not self._continues(LOOK_EVERY):
                return None
        waited = time.monotonic()
        self._worker.step({}, loss=loss)
        return pushed, waited

    def _diverged(self) -> bool:
        """Waits for another course."""
        tell(diverged=self._orders.course)
        while self._continues(1.0):
            pass
        return False

    def _note(self, step: fastps.Step) -> None:
        self._last_step = step

    def _report(self, at: tuple[float, float], loss: float, times: tuple[float, ...]) -> None:
        assert self._last_step is not None
        assert self._worker.versions is not None
        last, stats = self._last_step, self._worker.stats()
        lost, rejected = max(stats["lost"].values(), default=0), stats["rejected"]
        tell(
            course=self._orders.course,
            step=last.step,
            updates=max(self._worker.versions[name] for name in self._names.values()) - 1,
            times=times,
            at=at,
            to=self._task.position(self._params()),
            fetched=self._fetched_now(last.step),
            residual=self._residual(),
            staleness=last.staleness,
            momentum=last.momentum,
            scale=last.scale,
            bytes=last.bytes,
            loss=loss,
            lost=lost - self._lost,
            rejected=rejected - self._rejected,
        )
        self._lost, self._rejected = lost, rejected

    def _fetched_now(self, step: int) -> bool:
        """Returns whether the parameters are the servers', not those of local steps."""
        settings = self._orders.settings
        return settings.mode != "local" or step % settings.pull_every == 0

    def _residual(self) -> float | None:
        """The norm of what the codec still owes; None if it owes nothing."""
        if self._orders.settings.codec == "float32":
            return None
        residuals = self._worker.state_dict()["residuals"].values()
        return math.sqrt(sum(float(np.square(one, dtype=np.float64).sum()) for one in residuals))


def main() -> int:
    """Entry point of the worker process."""
    hold_on_to(os.getppid())
    warnings.simplefilter("ignore", RuntimeWarning)  # losses are counted
    inbox = Inbox()
    while inbox.orders is None:
        inbox.wait(60.0)
    tasks: dict[str, Problem] = {}
    with fastps.connect(inbox.orders.addresses, timeout=TIMEOUT) as ps:
        tell(ready=os.getpid())
        while True:
            orders = inbox.orders
            name = orders.settings.problem
            if name not in tasks:
                tasks[name] = problem(name)
            try:
                Course(ps, orders, tasks[name], inbox).run()
            except fastps.FastpsError as error:
                tell(error=type(error).__name__, text=str(error))
                inbox.wait(1.0)


if __name__ == "__main__":
    sys.exit(main())
