"""Portions of the data for a replica: part 0 leases them, all parts get the indices."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from fastps.data import Indices, Portions
from fastps.errors import DeadlineError
from fastps.torch.parallel.engine import Engine
from fastps.torch.parallel.links.messages import Kind, Message
from fastps.worker.run.own import Own

__all__ = ["ReplicaPortions"]

#: Stands for the run of these portions, which only part 0 knows: a group has one part of each replica.
_RUN = 0


class ReplicaPortions:
    """One epoch's portions when iterated, the same on every part of a replica; see `fastps.data.Portions`.

    A portion is finished when part 0 asks for the next one. All parts iterate in step.

    Args:
        portions: Part 0's.
        engine: Of a part that is a process.
        epoch: The first one.
        timeout: Seconds that part 0 waits for a portion.
        number: Of these portions among all of the replica, so that messages of others are not taken.

    Attributes:
        epoch: The current epoch, or the next one.
    """

    def __init__(
        self,
        portions: Portions | None,
        engine: Engine | None,
        epoch: int,
        timeout: float | None,
        number: int,
    ) -> None:
        self.epoch = epoch
        self._portions, self._engine, self._timeout = portions, engine, timeout
        self._number = number
        self._count = 0

    def __iter__(self) -> Iterator[Indices]:
        """One epoch, or what is left of it."""
        found = self._received() if self._portions is None else self._leased()
        yield from found

    def close(self) -> None:
        """Returns the current portion to the server if it is not finished."""
        if self._portions is not None:
            self._portions.close()

    def _leased(self) -> Iterator[Indices]:
        """The portions that part 0 takes from the server."""
        assert self._portions is not None
        portions = iter(self._portions)
        begun = time.monotonic()
        while True:
            try:
                indices = next(portions, None)
            except DeadlineError:
                if self._timeout is not None and time.monotonic() - begun >= self._timeout:
                    raise
                self._tell(None, waits=True)
                portions = iter(self._portions)
                continue
            self.epoch = self._portions.epoch
            self._tell(indices)
            if indices is None:
                return
            yield indices
            begun = time.monotonic()

    def _tell(self, indices: Indices | None, waits: bool = False) -> None:
        if self._engine is not None:
            tensor = None if indices is None else torch.from_numpy(indices)
            self._count += 1
            self._engine.tell(
                Message(
                    Kind.PORTION,
                    self._count,
                    step=self.epoch,
                    micro_batch=self._number,
                    requires_grad=waits,
                    tensor=tensor,
                )
            )

    def _received(self) -> Iterator[Indices]:
        """Yields the portions that part 0 sends."""
        assert self._engine is not None
        while True:
            self._count += 1
            message = self._engine.wait_for(
                Kind.PORTION, self._count, 0, "the next portion", index=self._number
            )
            workers = Own.of_this_thread()
            if message.requires_grad:  # part 0 waits for the server: no other replica waits for this part
                for worker in workers:
                    worker.idle(_RUN, self.epoch)
                continue
            self.epoch = message.step
            for worker in workers:
                if message.tensor is None:
                    worker.turn(_RUN, self.epoch, fetch=len(workers) == 1)
                else:
                    worker.back()
            if message.tensor is None:
                return
            yield np.array(message.tensor.numpy())
