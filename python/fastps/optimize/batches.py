"""`Batches`: what a coordinator has replicas compute. They meet in a table on shard 0."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from types import TracebackType
from typing import Self

from fastps.errors import DeadlineError
from fastps.optimize.objective import Objective
from fastps.optimize.replica import Replica
from fastps.optimize.vectors import BatchReport, Vectors
from fastps.parameter_server import ParameterServer

__all__ = ["Batches", "LocalReplica"]

#: Maximum delay of a server's answer, in seconds.
_WAIT = 0.25
_WAIT_LOCAL = 0.02
#: Seconds without enough replicas after which a warning says how to start one; and after all have left.
_PATIENCE, _PATIENCE_LEFT = 30.0, 5.0


class LocalReplica:
    """A replica on a thread of this process, while the context is entered."""

    def __init__(self, ps: ParameterServer, objective: Objective, space: str) -> None:
        self._replica = Replica(ps, objective, space=space)
        self._replica.wait = _WAIT_LOCAL
        self._thread = threading.Thread(target=self._run, name="fastps-replica", daemon=True)
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raises what has ended the replica."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._replica.run()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replica.stop()
        if not isinstance(error, DeadlineError):  # else the objective may never return
            self._thread.join()


class Batches:
    """Asks for one batch after the other.

    Args:
        v: The vectors; replicas pull ``t``.
        samples: Number of samples.
        portions: Number of portions that they are cut into.
        min_replicas: How many replicas must be present before a batch begins.
        timeout: Seconds to wait for them, and for each portion; None: no limit.
        local: A replica of this process, if there is one.

    Attributes:
        issued: Copies of portions that were given to idle replicas.
        won: Copies that were finished before the original.
        shares: Portions that each replica has finished first, by name.
    """

    def __init__(
        self,
        v: Vectors,
        samples: int,
        portions: int,
        min_replicas: int = 1,
        timeout: float | None = None,
        local: LocalReplica | None = None,
    ) -> None:
        self._v, self._samples, self._portions = v, samples, portions
        self._min_replicas, self._timeout, self._local = min_replicas, timeout, local
        self.issued = 0
        self.won = 0
        self.shares: Counter[str] = Counter()
        self._had_replicas = False

    def compute(self, batch: int, asked: int) -> BatchReport:
        """Returns when portions 0 to `asked` of a batch are added to its sum, or one cannot be."""
        report = self._wait(batch, asked)
        self.issued += report.backups_issued
        self.won += report.backups_won
        self.shares.update(done[1] for done in report.finished if done is not None)
        return report

    def _wait(self, batch: int, asked: int) -> BatchReport:
        done, since, warned = -1, 0.0, False
        enough = time.monotonic()  # when enough replicas were last present
        while True:
            report = self._v.batch(
                batch,
                asked,
                vector="t",
                portions=self._portions,
                samples=self._samples,
                min_replicas=self._min_replicas,
                wait=_WAIT,
            )
            if report.over:
                return report
            if self._local is not None:
                self._local.check()
            now = time.monotonic()
            finished = sum(portion is not None for portion in report.finished)
            if finished != done:
                done, since = finished, now
            if self._timeout is not None and now - since > self._timeout:
                raise self._late(report)
            self._had_replicas |= report.replicas > 0
            if report.replicas >= self._min_replicas:
                enough = now
            all_left = self._had_replicas and report.replicas == 0
            if now - enough > (_PATIENCE_LEFT if all_left else _PATIENCE) and not warned:
                warnings.warn(str(self._late(report)), RuntimeWarning, stacklevel=2)
                warned = True

    def _late(self, report: BatchReport) -> DeadlineError:
        if report.replicas >= self._min_replicas:
            left = sum(portion is None for portion in report.finished)
            return DeadlineError(
                f"no portion of the batch was finished for {self._timeout} s: {left} are left, "
                f"{report.replicas} replicas are present"
            )
        space = self._v.space
        all_left = self._had_replicas and report.replicas == 0
        return DeadlineError(
            f'space "{space}" waits for replicas{", and all that were there have left" if all_left else ""}',
            expected=f"{self._min_replicas} or more",
            got=str(report.replicas),
            advice="see why they ended, and "
            * all_left
            + "give minimize an objective, or start a thread with "
            f'fastps.optimize.Replica(ps, objective, space="{space}").run()',
        )
