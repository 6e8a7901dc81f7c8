"""Every kind of push."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import fastps
from fastps_lab.torture import tensors
from fastps_lab.torture.client.calls import Call, Calls, all_of

__all__ = ["Pushes"]


IN_FLIGHT = 8


class Pushes(Calls):
    """Calls that add units to this client's column."""

    #: True while all pushes of pairs were acknowledged.
    _paired = True

    def _dense(self, order: Mapping[str, Any]) -> str:
        return tensors.BIG if order["big"] else tensors.DENSE[order["place"]]

    def push(self, order: Mapping[str, Any]) -> None:
        name, limit = self._dense(order), order["timeout"]
        grad = self._grads[name]
        self._try("push", all_of(name), limit, lambda: self.ps.push(name, grad, timeout=limit))

    def push_wide(self, order: Mapping[str, Any]) -> None:
        limit, grad = order["timeout"], self._grads[tensors.WIDE]
        self._try(
            "push_wide", all_of(tensors.WIDE), limit, lambda: self.ps.push(tensors.WIDE, grad, timeout=limit)
        )

    def push_pair(self, order: Mapping[str, Any]) -> None:
        """Pushes two tensors in turn; a consistent cut never has the second push without the first."""
        limit = order["timeout"]
        for name in tensors.PAIR if self._paired else ():
            grad = self._grads[name]
            call = functools.partial(self.ps.push, name, grad, timeout=limit)
            self._paired = self._try("push_pair", all_of(name), limit, call) is not None
            if not self._paired:
                break

    def push_list(self, order: Mapping[str, Any]) -> None:
        # Small slices of one shard share a message.
        many = tensors.MANY if self.number < tensors.FEW else ()
        names = [*tensors.DENSE, *many, *([tensors.BIG] if order["big"] else [])]
        grads: dict[str, Any] = {name: self._grads[name] for name in names}
        grads[tensors.TABLES[0]] = self._row
        limit = order["timeout"]
        self._try("push_list", all_of(*grads), limit, lambda: self.ps.push(grads, timeout=limit))

    def push_async(self, order: Mapping[str, Any]) -> Iterator[None]:
        """Keeps several pushes under way at a time."""
        name, limit = self._dense(order), order["timeout"]
        under_way: deque[tuple[Call, Any]] = deque()
        for _ in range(order["count"]):
            if len(under_way) >= IN_FLIGHT:
                self._take(*under_way.popleft())
            call = self._begin("push_async", all_of(name), limit)
            try:
                under_way.append((call, self.ps.push_async(name, self._grads[name], timeout=limit)))
            except fastps.PartialPush as error:
                # Raised for an earlier push, whose handle reports it again: this one was not sent.
                self._end(call, fastps.UnavailableError(f"an earlier push failed: {error}"))
            except Exception as error:
                self._end(call, error)
            yield
        while under_way:
            self._take(*under_way.popleft())

    def _take(self, call: Call, handle: Any) -> None:
        call.is_waited_for()
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
            self._try("push_bound", all_of(*tensors.BOUND), limit, lambda: self.ps.push(bound, timeout=limit))

    def push_int8(self, order: Mapping[str, Any]) -> None:
        """Pushes with a residual: it holds the refused part, which joins the next push."""
        limit = order["timeout"]
        if self._int8 is None:
            grads = {name: self._grads[name] for name in tensors.INT8}
            codec = fastps.Int8()
            self._int8 = self._try("bind", {}, 10.0, lambda: self.ps.bind(grads, codec=codec))
        # A push of the list resolves its doubts itself, and includes fenced parts.
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
        done = self._try("push_pull", all_of(name), limit, lambda: self.ps.push_pull(grads, timeout=limit))
        if done is not None:
            self._saw(done.values, done.versions)

    def push_sparse(self, order: Mapping[str, Any]) -> None:
        name, limit = tensors.TABLES[order["place"]], order["timeout"]
        self._try("push_sparse", all_of(name), limit, lambda: self.ps.push(name, self._row, timeout=limit))

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
