"""A worker's steps, in every mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import fastps
from fastps_lab.torture import tensors
from fastps_lab.torture.client import signals
from fastps_lab.torture.client.calls import Calls

__all__ = ["Steps"]

#: Modes of the lives in turn. The last two bind their group, so they train separate tensors.
_MODES: tuple[Callable[[], fastps.modes.Mode], ...] = (
    lambda: fastps.Async(delay_adaptive=False),  # scaled gradients would not count
    lambda: fastps.Local(push_every=3, pull_every=2, lr=1.0),
    lambda: fastps.Async(delay_adaptive=False, overlap=True),
    lambda: fastps.Bounded(staleness=1),
    lambda: fastps.Sync(workers=1),
)


class Steps(Calls):
    """Steps of the client's worker, which is a separate client with the same column."""

    #: Steps that an exception of a signal's handler interrupted.
    _torn = 0
    #: Torn steps that the worker's count of steps lacks.
    _uncounted = 0
    #: Maximum number of gradients in one push.
    _carried = 1
    _trained: Sequence[str] = tensors.WORKERS

    def step(self, order: Mapping[str, Any]) -> None:
        """A step of the life's worker. Push and fetch each have the connection's timeout."""
        if self._worker is None:
            self._worker = self._try("worker", {}, 60.0, self._make_worker, counts=False)
        if worker := self._worker:
            grads = {name: self._worker_gradient(name) for name in self._trained}
            before = self._steps_of(worker)
            self._tell_worker(worker, ahead=1)
            torn = self._torn
            self._work("step", lambda: worker.step(grads))
            if self._torn > torn and self._steps_of(worker) == before:
                self._uncounted += 1
            self._tell_worker(worker)
            _ = order

    def _make_worker(self) -> fastps.Worker:
        mode = _MODES[self.number % len(_MODES)]()
        if mode.waits_for_others:
            self._trained = [f"own/{self.number}"]
            name, sgd = self._trained[0], fastps.SGD(lr=1.0)
            self.ps.register(name, np.zeros(4, np.float32), sgd, group=name)
        self._carried = mode.push_every
        params = {name: self._worker_gradient(name) for name in self._trained}
        return fastps.Worker(self.ps, params, mode=mode)

    def _worker_gradient(self, name: str) -> Any:
        return self._grads[name] if name in self._grads else np.full(4, -1.0, np.float32)

    def _work(self, verb: str, call: Callable[[], Any]) -> bool:
        """Makes a worker's call, which a signal may interrupt; whether it succeeded."""
        record = self._begin(verb, {}, 60.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                with signals.may_interrupt():
                    call()
            except signals.Interrupted:
                self._torn += 1
                self._end(record, None, counts=False)
                return False
            except Exception as error:
                self._refusals += 1
                cause = error.error if isinstance(error, fastps.PartialPush) else error
                self._uncertain |= isinstance(cause, fastps.UnknownOutcomeError | fastps.LeaseError)
                # With Sync, a refused gradient is of an old version, and dropped.
                self._uncertain |= self._worker is not None and self._worker.mode.shares_versions
                # A worker resolves its doubts itself.
                self._end(record, cause, counts=False)
                return False
        self._end(record, None, counts=False)
        return True

    def _steps_of(self, worker: fastps.Worker) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return int(worker.stats()["steps"])

    def _tell_worker(self, worker: fastps.Worker, ahead: int = 0) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            stats = worker.stats()
        self._tell(
            "worker", life=self.number, steps=stats["steps"] + self._uncounted + ahead, torn=self._torn,
            carried=self._carried * (1 + self._refusals + self._torn), uncertain=self._uncertain,
            lost=dict(stats["lost"]), tensors=list(self._trained),
        )  # fmt: skip

    def tell_own_tensor(self) -> None:
        """Records the value of the worker's own tensor, after `flush`."""
        name = self._trained[0]
        if self._worker is not None and name not in tensors.SHAPES:
            found = self._try("pull_own", {}, 10.0, lambda: self.ps.pull(name, timeout=10.0))
            if found is not None:
                whole = bool((found == found[0]).all())
                self._tell("worked", life=self.number, tensor=name, value=float(found[0]) if whole else -1.0)
