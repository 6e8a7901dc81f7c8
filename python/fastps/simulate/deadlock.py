"""Describes which workers wait for which, when no other event is planned."""

from __future__ import annotations

from collections.abc import Sequence

from fastps.simulate.errors import DeadlockError
from fastps.simulate.member import Member

__all__ = ["deadlock"]


def deadlock(now: float, members: Sequence[Member], waits: Sequence[Member]) -> DeadlockError:
    """Returns the error that lists which workers wait for which."""
    waiting: dict[int, list[int]] = {}
    lines = []
    for member in waits:
        others = [m for m in members if m is not member and m.worker is not None]
        busy = [m for m in others if m not in waits] or others
        waiting[member.index] = [m.index for m in busy]
        whom = ", ".join(f"worker {m.index}{' (killed)' if m.dead else ''}" for m in busy) or "no worker"
        lines.append(
            f"worker {member.index} has waited in step {member.step} since {member.since:.6g} for {whom}"
        )
    return DeadlockError(f"no worker can continue (virtual time {now:.6g}): {'; '.join(lines)}", waiting, now)
