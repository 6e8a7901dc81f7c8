"""Detects writes to tensors that share memory with a worker, by their version counters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from fastps._shared.text import some
from fastps.errors import ForeignWriteError

__all__ = ["Watched"]


class Watched:
    """Tensors with the version counters that they had after the worker's last write.

    torch counts the writes to a tensor in ``_version``, except those through ``.data``, a NumPy view or the
    memory itself, as a worker's own. Arrays without a counter are not watched.

    >>> class Counting:
    ...     _version = 0
    >>> tensor = Counting()
    >>> watched = Watched([("w", tensor), ("array", np.zeros(2))], "worker")
    >>> watched.check()
    >>> tensor._version += 1
    >>> watched.written
    ['w']
    >>> watched.note()
    >>> watched.written
    []
    """

    def __init__(self, tensors: Iterable[tuple[str, Any]], owner: str) -> None:
        """
        Args:
            tensors: Names and tensors.
            owner: The object whose `push_model` and `pull_model` an error names.
        """
        self._owner = owner
        self._names: list[str] = []
        self._tensors: list[Any] = []
        self._seen: list[int] = []
        self.add(tensors)

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def add(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Watches more, from now on."""
        for name, tensor in tensors:
            version = _version(tensor)
            if version is not None:
                self._names.append(name)
                self._tensors.append(tensor)
                self._seen.append(version)

    def note(self) -> None:
        """Accepts all writes until now."""
        self._seen = [tensor._version for tensor in self._tensors]

    @property
    def written(self) -> list[str]:
        """Names of the tensors that something else has written to."""
        now = [tensor._version for tensor in self._tensors]
        if now == self._seen:
            return []
        each = zip(self._names, now, self._seen, strict=True)
        return [name for name, version, seen in each if version != seen]

    def check(self, more: str = "") -> None:
        """Raises if something else has written to a tensor; the error ends with `more`."""
        if not self._tensors or [tensor._version for tensor in self._tensors] == self._seen:
            return
        written = self.written
        others = f", {len(written)} of them" if len(written) > 1 else ""
        raise ForeignWriteError(
            f"something other than the {self._owner} wrote to its parameters{others}",
            tensor=written[0],
            expected=f"the values that the {self._owner} left there",
            got="other values, which the next fetch would overwrite",
            advice=f"{self._owner}.push_model() sends the present values to the servers, "
            f"{self._owner}.pull_model() fetches theirs{more}",
        )

    def warn(self, stacklevel: int, others: Iterable[str] = ()) -> None:
        """Gives a `RuntimeWarning` if something else has written to a tensor, after the last step.

        Args:
            stacklevel: As for `warnings.warn`, seen from the caller.
            others: Tensors of which the caller knows it, if no counter says so.
        """
        written = self.written or list(others)
        if written:
            warnings.warn(
                f"something other than the {self._owner} wrote to its parameters after the last step: "
                f"{some(written)}. The servers do not have these values. Before close(), "
                f"{self._owner}.push_model() sends them, and {self._owner}.pull_model() fetches the servers'",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )


def _version(tensor: Any) -> int | None:
    try:
        version = tensor._version
    except (AttributeError, RuntimeError):  # torch: a tensor made in inference mode
        return None
    return version if isinstance(version, int) else None
