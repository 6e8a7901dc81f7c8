"""A worker's steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import fastps
from fastps.torture import tensors
from fastps.torture.client.calls import Calls

__all__ = ["Steps"]


class Steps(Calls):
    """By a worker of the client's, which is a client of its own with the same column."""

    def step(self, order: Mapping[str, Any]) -> None:
        """A step of the life's worker. Push and fetch each have the connection's timeout."""
        if self._worker is None:
            params = {name: self._grads[name] for name in tensors.WORKERS}
            mode = fastps.Async(delay_adaptive=False)  # scaled gradients would not count
            self._worker = self._try(
                "worker", {}, 60.0, lambda: fastps.Worker(self.ps, params, mode=mode), counts=False
            )
        if worker := self._worker:
            grads = {name: self._grads[name] for name in tensors.WORKERS}
            # Its own count of steps says what it took.
            self._tell_worker(worker, ahead=1)
            self._work("step", lambda: worker.step(grads))
            self._tell_worker(worker)
            _ = order

    def _work(self, verb: str, call: Callable[[], Any]) -> bool:
        record = self._begin(verb, {}, 60.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                call()
            except Exception as error:
                self._refusals += 1
                cause = error.error if isinstance(error, fastps.PartialPush) else error
                self._uncertain |= isinstance(cause, fastps.UnknownOutcomeError | fastps.LeaseError)
                # A worker keeps its own doubts.
                self._end(record, cause, counts=False)
                return False
        self._end(record, None, counts=False)
        return True

    def _tell_worker(self, worker: fastps.Worker, ahead: int = 0) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            stats = worker.stats()
        self._tell(
            "worker", life=self.number, steps=stats["steps"] + ahead, carried=1 + self._refusals,
            uncertain=self._uncertain, lost=dict(stats["lost"]),
        )  # fmt: skip
