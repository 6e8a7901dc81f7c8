"""One client of the servers: every verb by every surface, and a record of what it was told."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fastps
from fastps.torture import tensors
from fastps.torture.lag import Lag

__all__ = ["Life"]

Part = tuple[str, int]
Parts = dict[Part, float]
"""Slices and the units that a push adds to each."""

IN_FLIGHT = 8


class Call:
    """A call under way."""

    def __init__(self, n: int, verb: str, parts: Parts, limit: float, lag: float) -> None:
        self.n, self.verb, self.parts, self.limit, self.lag = n, verb, parts, limit, lag
        self.began = time.monotonic()


def _all(*names: str, units: float = 1.0) -> Parts:
    return {(name, k): units for name in names for k in range(tensors.slices(name))}


class Life:
    """A client with an identity of its own, and a column.

    Args:
        number: Its column.
        reach: Makes the connection.
        tell: Records an event.
        lag: What the machine takes.
        folder: For files of its own.
    """

    def __init__(
        self, number: int, reach: Callable[[], fastps.ParameterServer], tell: Callable[..., None], lag: Lag,
        folder: Path,
    ) -> None:  # fmt: skip
        self.number, self._tell, self._lag, self._folder = number, tell, lag, folder
        self._calls = self._doubts = 0
        self._open: list[tuple[int, Any, Part]] = []
        self._assigned = 0
        self._worker: fastps.Worker | None = None
        self._refusals = 0
        self._uncertain = False
        #: Its session is over, so it cannot go on.
        self.ended = False
        self.ps = reach()
        self._grads = {name: tensors.gradient(name, number) for name in tensors.SHAPES}
        self._row = fastps.Sparse([number], np.full((1, 2), -1.0, np.float32))
        self._bound: fastps.Bound | None = None
        self._int8: fastps.Bound | None = None
        self._out: dict[str, Any] = {name: np.empty_like(self._grads[name]) for name in tensors.COUNTED}

    # -- what a call says ------------------------------------------------------------------------------------

    def _begin(self, verb: str, parts: Parts, limit: float) -> Call:
        self._calls += 1
        changes = [[*part, units] for part, units in parts.items()]
        self._tell("ask", life=self.number, n=self._calls, verb=verb, parts=changes, limit=limit)
        return Call(self._calls, verb, parts, limit, self._lag.seconds())

    def _end(self, call: Call, error: Exception | None, *, counts: bool = True) -> None:
        took, lag = time.monotonic() - call.began, self._lag.seconds() - call.lag
        fields: dict[str, Any] = {"applied": [], "refused": [], "doubts": [], "lost": []}
        if error is None:
            fields["applied"] = list(call.parts)
        elif isinstance(error, fastps.PartialPush):
            fields |= self._in_part(call, error)
        else:
            fields["refused"] = list(call.parts)
        if isinstance(error, fastps.VersionsLost):
            fields["lost"] = [list(lost) for lost in error.lost]
        cause = error.error if isinstance(error, fastps.PartialPush) else error
        self.ended |= isinstance(cause, fastps.LeaseError)
        name = None if error is None else type(error).__name__
        text = "" if error is None else f"{type(cause).__name__}: {cause}"[:300]
        limit = call.limit if counts else None
        self._tell(
            "done", life=self.number, n=call.n, verb=call.verb, took=round(took, 4), limit=limit,
            lag=round(lag, 4), error=name, text=text, **fields,
        )  # fmt: skip

    def _in_part(self, call: Call, error: fastps.PartialPush) -> dict[str, Any]:
        applied = {(name, e.start // tensors.SLICE) for name, e, _ in error.applied}
        applied |= {(name, k) for name in error.receipts for n, k in call.parts if n == name}
        refused = {(name, e.start // tensors.SLICE) for name, e, _ in error.refused}
        doubts = []
        for doubt in error.in_doubt:
            self._doubts += 1
            part = (doubt.tensor, doubt.elements.start // tensors.SLICE)
            self._open.append((self._doubts, doubt, part))
            doubts.append([self._doubts, *part])
        return {"applied": sorted(applied), "refused": sorted(refused), "doubts": doubts}

    def _try(
        self, verb: str, parts: Parts, limit: float, call: Callable[[], Any], counts: bool = True
    ) -> Any:
        """Makes a call and records what became of it; None if it failed."""
        record = self._begin(verb, parts, limit)
        try:
            result = call()
        except Exception as error:
            self._end(record, error, counts=counts)
            return None
        self._end(record, None, counts=counts)
        return result

    def resolve(self, timeout: float) -> None:
        """Asks what became of everything in doubt; keeps what nobody has told yet."""
        asked, self._open = self._open, []
        for number, doubt, part in asked:
            # The second question gets the same answer.
            for _ in range(2):
                try:
                    fate = doubt.result(timeout)
                except fastps.UnknownOutcomeError:
                    fate = "unknown"
                except fastps.FastpsError:
                    self._open.append((number, doubt, part))
                    break
                self._tell(
                    "fate", life=self.number, doubt=number, tensor=part[0], slice=part[1], fate=fate
                )  # fmt: skip

    # -- pushes ----------------------------------------------------------------------------------------------

    def _dense(self, order: Mapping[str, Any]) -> str:
        return tensors.BIG if order["big"] else tensors.DENSE[order["place"]]

    def push(self, order: Mapping[str, Any]) -> None:
        name, limit = self._dense(order), order["timeout"]
        grad = self._grads[name]
        self._try("push", _all(name), limit, lambda: self.ps.push(name, grad, timeout=limit))

    def push_list(self, order: Mapping[str, Any]) -> None:
        names = [*tensors.DENSE, *([tensors.BIG] if order["big"] else [])]
        grads: dict[str, Any] = {name: self._grads[name] for name in names}
        grads[tensors.TABLES[0]] = self._row
        limit = order["timeout"]
        self._try("push_list", _all(*grads), limit, lambda: self.ps.push(grads, timeout=limit))

    def push_async(self, order: Mapping[str, Any]) -> Iterator[None]:
        """Some under way at a time."""
        name, limit = self._dense(order), order["timeout"]
        under_way: deque[tuple[Call, Any]] = deque()
        for _ in range(order["count"]):
            if len(under_way) >= IN_FLIGHT:
                self._take(*under_way.popleft())
            call = self._begin("push_async", _all(name), limit)
            try:
                under_way.append((call, self.ps.push_async(name, self._grads[name], timeout=limit)))
            except Exception as error:
                self._end(call, error)
            yield
        while under_way:
            self._take(*under_way.popleft())

    def _take(self, call: Call, handle: Any) -> None:
        try:
            handle.result()
        except Exception as error:
            self._end(call, error)
        else:
            self._end(call, None)

    def push_bound(self, order: Mapping[str, Any]) -> None:
        limit = order["timeout"]
        if self._bound is None:
            grads = {name: self._grads[name] for name in tensors.BOUND}
            self._bound = self._try("bind", {}, 10.0, lambda: self.ps.bind(grads))
        if bound := self._bound:
            self._try("push_bound", _all(*tensors.BOUND), limit, lambda: self.ps.push(bound, timeout=limit))

    def push_int8(self, order: Mapping[str, Any]) -> None:
        """What was refused goes with the next one: its residual says how much."""
        limit = order["timeout"]
        if self._int8 is None:
            grads = {name: self._grads[name] for name in tensors.INT8}
            codec = fastps.Int8()
            self._int8 = self._try("bind", {}, 10.0, lambda: self.ps.bind(grads, codec=codec))
        # A push of the list finds out itself what is in doubt, and takes along what was fenced.
        self.resolve(limit)
        if (bound := self._int8) and not any(part[0] in tensors.INT8 for _, _, part in self._open):
            assert bound.feedback is not None
            owed = bound.feedback.state_dict()
            held = {n: float(np.ravel(owed[n])[self.number]) if n in owed else 0.0 for n in tensors.INT8}
            parts = {(name, 0): 1.0 - held[name] for name in tensors.INT8}
            self._try("push_int8", parts, limit, lambda: self.ps.push(bound, timeout=limit))

    def push_pull(self, order: Mapping[str, Any]) -> None:
        name, limit = self._dense(order), order["timeout"]
        grads = {name: self._grads[name]}
        done = self._try("push_pull", _all(name), limit, lambda: self.ps.push_pull(grads, timeout=limit))
        if done is not None:
            self._saw(done.values, done.versions)

    def push_sparse(self, order: Mapping[str, Any]) -> None:
        name, limit = tensors.TABLES[order["place"]], order["timeout"]
        self._try("push_sparse", _all(name), limit, lambda: self.ps.push(name, self._row, timeout=limit))

    def assign(self, order: Mapping[str, Any]) -> None:
        name, limit = f"assign/{self.number}", order["timeout"]
        zeros = np.zeros(3, np.float32)
        if not self._assigned:
            sgd = fastps.SGD(lr=1.0)
            self._try(
                "register", {}, 10.0, lambda: self.ps.register(name, zeros, optimizer=sgd, timeout=10.0)
            )
        self._assigned += 1
        value = np.full(3, self._assigned, np.float32)
        change = {(name, 0): float(self._assigned)}
        self._try("assign", change, limit, lambda: self.ps.assign(name, value, timeout=limit))
        self._check_assigned(limit)

    def _check_assigned(self, limit: float) -> None:
        name = f"assign/{self.number}"
        found = self._try("pull_assigned", {}, limit, lambda: self.ps.pull(name, timeout=limit))
        if found is not None:
            whole = bool((found == found[0]).all())
            self._tell("assigned", life=self.number, tensor=name, value=float(found[0]) if whole else -1.0)

    # -- the worker ------------------------------------------------------------------------------------------

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

    # -- pulls and questions ---------------------------------------------------------------------------------

    def _saw(self, values: Mapping[str, Any], versions: fastps.Versions | None = None) -> None:
        """Records this life's own column, and versions."""
        parts = []
        for name, value in values.items():
            for k, found in enumerate(tensors.columns(name, value)):
                version = None if versions is None else versions.slices(name)[k]
                own = {c: v for c, v in found.items() if c in (-1, self.number)}
                parts.append([name, k, version, {self.number: 0.0} | own])
        self._tell("seen", life=self.number, parts=parts)

    def pull(self, order: Mapping[str, Any]) -> None:
        name, limit = tensors.DENSE[order["place"]], order["timeout"]
        values = self._try("pull", {}, limit, lambda: self.ps.pull(name, timeout=limit))
        if values is not None:
            self._saw({name: values})

    def pull_list(self, order: Mapping[str, Any]) -> None:
        limit = order["timeout"]
        values = self._try("pull_list", {}, limit, lambda: self.ps.pull(list(tensors.COUNTED), timeout=limit))
        if values is not None:
            self._saw(values)

    def pull_rows(self, order: Mapping[str, Any]) -> None:
        name, limit, row = tensors.TABLES[order["place"]], order["timeout"], [self.number]
        values = self._try("pull_rows", {}, limit, lambda: self.ps.pull(name, indices=row, timeout=limit))
        if values is not None:
            whole = values[0, 0] == values[0, 1]
            own = {self.number: float(values[0, 0])} | ({} if whole else {-1: 1.0})
            self._tell("seen", life=self.number, parts=[[name, 0, None, own]])

    def pull_out(self, order: Mapping[str, Any]) -> None:
        name, limit, out = tensors.BIG, order["timeout"], self._out[tensors.BIG]
        values = self._try("pull_out", {}, limit, lambda: self.ps.pull(name, out=out, timeout=limit))
        if values is not None:
            self._saw({name: values})

    def pull_versions(self, order: Mapping[str, Any]) -> None:
        limit, names = order["timeout"], list(tensors.COUNTED)
        pulled = self._try(
            "pull_versions", {}, limit, lambda: self.ps.pull(names, versions=True, timeout=limit)
        )
        if pulled is not None:
            self._saw(*pulled)

    def names(self, order: Mapping[str, Any]) -> None:
        limit = order["timeout"]
        self._try("names", {}, limit, lambda: self.ps.names(timeout=limit))

    def versions(self, order: Mapping[str, Any]) -> None:
        limit, names = order["timeout"], list(tensors.COUNTED)
        self._try("versions", {}, limit, lambda: self.ps.versions(names, timeout=limit))

    def spec(self, order: Mapping[str, Any]) -> None:
        limit = order["timeout"]
        self._try("spec", {}, limit, lambda: self.ps.spec(tensors.BIG, timeout=limit))

    def state(self, order: Mapping[str, Any]) -> None:
        name, limit = tensors.DENSE[order["place"]], order["timeout"]
        self._try("state", {}, limit, lambda: self.ps.state(name, timeout=limit))

    def save(self, order: Mapping[str, Any]) -> None:
        try:
            from fastps import checkpoint

            path = self._folder / f"life-{self.number}.safetensors"
            names = [tensors.DENSE[order["place"]]]
            # It makes several calls, each with the connection's timeout.
            self._try("save", {}, 60.0, lambda: checkpoint.save(self.ps, path, names), counts=False)
        except ImportError:
            return

    def register(self, order: Mapping[str, Any]) -> None:
        """Makes a tensor, reads it, and removes every second one."""
        name, limit = f"temporary/{self.number}/{self._calls}", order["timeout"]
        sgd, zeros = fastps.SGD(lr=1.0), np.zeros(order["size"], np.float32)
        self._try("register", {}, limit, lambda: self.ps.register(name, zeros, optimizer=sgd, timeout=limit))
        self._try("pull_new", {}, limit, lambda: self.ps.pull(name, timeout=limit))
        if self._calls % 2:
            self._try("unregister", {}, limit, lambda: self.ps.unregister(name, timeout=limit))

    # -- life ------------------------------------------------------------------------------------------------

    def do(self, order: Mapping[str, Any]) -> None:
        """Carries out an order: so many calls of one verb."""
        self.resolve(1.0)
        if order["kind"] == "push_async":
            for _ in self.push_async(order):
                time.sleep(order["pause"])
        else:
            verb = getattr(self, order["kind"])
            for _ in range(order["count"]):
                verb(order)
                time.sleep(order.get("pause", 0.0))
                if self.ended:
                    break
        self.resolve(1.0)

    def settle(self, patience: float) -> bool:
        """Waits until nothing is under way or in doubt and every loss was told; whether that came in time."""
        late = time.monotonic() + patience
        while self._open and not self.ended and time.monotonic() < late:
            self.resolve(5.0)
        pulled, names = None, [*tensors.COUNTED, *tensors.INT8]
        while pulled is None and not self.ended and time.monotonic() < late:
            pulled = self._try(
                "pull_list", {}, 10.0, lambda: self.ps.pull(names, versions=True, timeout=10.0)
            )
        if pulled is not None:
            self._saw(*pulled)
        if self._assigned and not self.ended:
            self._check_assigned(10.0)
        if (worker := self._worker) is not None:
            while not self._work("flush", worker.flush) and not self._uncertain and time.monotonic() < late:
                time.sleep(0.1)
            self._tell_worker(worker)
        stats = self._try("stats", {}, 10.0, lambda: self.ps.stats(timeout=10.0))
        if stats is not None:
            self._tell("told", life=self.number, own=stats["client"]["pushes_lost"])
        settled = pulled is not None and stats is not None and not self._open and not self.ended
        if settled:
            self._tell("settled", life=self.number)
        return settled

    def close(self, how: str = "closed") -> None:
        """Ends it."""
        if (worker := self._worker) is not None:
            self._work("close_worker", worker.close)
        with contextlib.suppress(fastps.FastpsError):
            self._try("close", {}, 60.0, self.ps.close, counts=False)
        self._tell("ended", life=self.number, how=how)
