"""The push ledger: what workers were promised (receipts) against what the servers did.

Each worker keeps three counters in a memory-mapped file of the output folder. They survive a SIGKILL of the
worker, so its part of the account is known to the last receipt: ``acknowledged`` pushes have certainly been
applied, ``issued`` ones possibly. A counting tensor of one element rides along with each push (SGD with lr 1,
its "gradient" is -1 a minibatch), so the *effect* of each push is counted too: a server that bumped versions
without applying anything would be caught as well. The demo keeps its value small (`CARRY_AT`).
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastps._shared.process import CommandError

EXIT_MISMATCH = 3


class LedgerError(CommandError):
    """Acknowledged pushes and the servers' versions do not reconcile. Exit code 3."""

    exit_code = EXIT_MISMATCH


#: The counting tensor: its value is the number of minibatch gradients applied since the last carry.
COUNTER = "minibatches"

#: Value at which the demo carries the count over to a Python int: float32 counts to 2^24.
CARRY_AT = 2**23


@dataclass(frozen=True)
class Account:
    """One worker's account. A push carries all tensors, and is acknowledged when each of them is."""

    steps: int
    issued: int
    acknowledged: int


class Ledger:
    """The account of one worker in shared memory.

    One process writes (the worker), others may read at any time; every counter is one aligned 64-bit word.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(24))
        with path.open("r+b") as file:
            self._words = np.frombuffer(mmap.mmap(file.fileno(), 24), np.int64)

    def will_step(self, steps: int, pushes: int) -> None:
        """Before a step: after it, ``steps`` minibatches and ``pushes`` pushes will have been handed over."""
        self._words[0] = steps
        self._words[1] = pushes

    def acknowledge(self, pushes: int) -> None:
        """After a receipt: pushes acknowledged so far."""
        self._words[2] = pushes

    def read(self) -> Account:
        """The account so far."""
        return Account(*self._words.tolist())


@dataclass(frozen=True)
class Balance:
    """The reconciled books of a run, in pushes."""

    acknowledged: int
    #: Pushes that a killed worker had issued without a receipt: each may or may not have been applied.
    in_flight: int
    #: Per tensor, by the servers' versions.
    applied: dict[str, int]
    minibatches: int


def reconcile(
    finished: Sequence[Account],
    killed: Sequence[Account],
    push_every: int,
    applied: Mapping[str, Sequence[int]],
    minibatches: float,
) -> Balance:
    """Compares the workers' accounts with the servers'; `LedgerError` names the mismatch.

    Args:
        finished: accounts of workers that flushed and ended: everything issued is acknowledged.
        killed: accounts of workers that were killed: acknowledged is a lower bound, issued an upper one.
        push_every: minibatches accumulated in one push.
        applied: per tensor and slice, the servers' version minus the version at registration.
        minibatches: value of the counting tensor.
    """
    complaints = [
        f"finished worker {number}: {account.issued:,} pushes issued, {account.acknowledged:,} acknowledged"
        for number, account in enumerate(finished)
        if account.acknowledged != account.issued
    ]
    low = sum(account.acknowledged for account in (*finished, *killed))
    high = low + sum(account.issued - account.acknowledged for account in killed)
    for name, slices in applied.items():
        if min(slices) < low or max(slices) > high:
            counts = " / ".join(f"{count:,}" for count in sorted(set(slices)))
            complaints.append(
                f"{name}: {_between(low, high)} pushes acknowledged, but versions made: {counts}"
            )
    sent = sum(account.steps for account in finished)
    least = sent + push_every * sum(account.acknowledged for account in killed)
    most = sent + push_every * sum(account.issued for account in killed)
    if not least <= minibatches <= most or minibatches != int(minibatches):
        complaints.append(
            f"{_between(least, most)} minibatch gradients sent, but the model contains {minibatches:,.12g}"
        )
    if complaints:
        raise LedgerError(
            "pushes acknowledged and versions made do not reconcile (a server lost or repeated pushes): "
            + "; ".join(complaints)
        )
    return Balance(low, high - low, {name: min(slices) for name, slices in applied.items()}, int(minibatches))


def _between(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
