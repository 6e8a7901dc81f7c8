"""The base of the modes: what `Worker` needs to know of each."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["Binding", "Mode"]

#: The mode of a group, as the extension module takes it: kind, numbers, flags.
Binding = tuple[str, list[int], list[bool]]


class Mode:
    """Mode in which a worker keeps pace with the other workers; a value.

    Attributes:
        push_every: Steps between pushes.
        pull_every: Steps between fetches.
        overlap: Fetched values are installed `pull_every` steps later, while the worker computes.
    """

    push_every: int = 1
    pull_every: int = 1
    overlap: bool = False

    #: Learning rate of local steps; None if steps are not local.
    _local_lr: float | None = None
    #: Workers or their pushes wait for each other; a fetch follows that wait.
    _together: ClassVar[bool] = False

    def _correction(self) -> tuple[bool, int | None, bool, bool] | None:
        """Treatment of stale gradients by a server: see `Async`."""
        return None

    def _binding(self) -> Binding:
        """The mode that all workers of its groups must use."""
        return "free", [], []
