"""What `Worker` asks of every mode."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["Binding", "Mode"]

#: What binds a group, as the compiled module takes it: kind, numbers, flags.
Binding = tuple[str, list[int], list[bool]]


class Mode:
    """How a worker and the parameter server keep together; a value.

    Attributes:
        push_every: Steps between pushes.
        pull_every: Steps between fetches.
        overlap: Fetched values are installed `pull_every` steps later.
    """

    push_every: int = 1
    pull_every: int = 1
    overlap: bool = False

    #: The rate of local steps; None without them.
    _local_lr: float | None = None
    #: Pushes wait for each other's, or workers for each other: a fetch comes behind that.
    _together: ClassVar[bool] = False

    def _correction(self) -> tuple[bool, int | None, bool, bool] | None:
        """What a push asks its server to do about staleness."""
        return None

    def _binding(self) -> Binding:
        """What it expects the other workers of its groups to be bound by."""
        return "free", [], []
