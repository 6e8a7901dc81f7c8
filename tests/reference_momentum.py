"""The rule by which `fastps.Async` matches momentum, as `docs/concepts/modes.md` states it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Gradient = tuple[Hashable, int]


def added(gradients: Sequence[Gradient]) -> float:
    """Updates that asynchrony adds to the mean age of the gradients in a step.

    Args:
        gradients: Sender and staleness of all gradients of a slice, that of the step last.
    """
    last = gradients[-64:]
    senders = {sender for sender, _ in last}
    count = {one: sum(sender == one for sender, _ in last) for one in senders}
    staleness = {one: sum(min(tau, 64) for sender, tau in last if sender == one) for one in senders}
    if not any(staleness.values()):
        return 0.0
    pairs = sum(c * (c - 1) for c in count.values())
    others = len(senders) - 1.0
    return min(others, sum(count[one] * staleness[one] for one in senders) / pairs) if pairs else others


def matched(momentum: float, gradients: Sequence[Gradient]) -> float:
    """The momentum of a step: the gradients in it have the same mean age as with one worker."""
    s = added(gradients)
    if s == 0:
        return momentum
    age = momentum / (1 - momentum) - s
    return age / (1 + age) if age > 0 else 0.0


def stale(order: Sequence[int]) -> list[Gradient]:
    """The gradients of workers that push in this order, and fetch after each push and at the start."""
    fetched = dict.fromkeys(order, 0)
    found: list[Gradient] = []
    for now, worker in enumerate(order):
        found.append((worker, now - fetched[worker]))
        fetched[worker] = now + 1
    return found
