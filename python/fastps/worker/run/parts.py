"""A model's tensors, divided among the processes of one machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fastps._shared.types import Array
from fastps.errors import (
    ConfigError,
    ConnectionLostError,
    DeadlineError,
    DTypeError,
    FastpsError,
    ForeignWriteError,
    LeaseError,
    NonFiniteError,
    ShapeError,
    UnavailableError,
)
from fastps.modes import Mode
from fastps.optim import Optimizer
from fastps.parameter_server import ParameterServer

__all__ = [
    "divide",
    "from_row",
    "group_of",
    "raise_first",
    "register",
    "shard_name",
    "shards_of",
    "texts_of",
    "to_row",
    "turns",
]

#: Length of the rows that carry texts between processes.
_ROW_BYTES = 2048
_SEPARATOR = "\x1f"

_KINDS: dict[str, type[FastpsError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        ConnectionLostError,
        DTypeError,
        DeadlineError,
        ForeignWriteError,
        LeaseError,
        NonFiniteError,
        ShapeError,
    )
}


def divide(sizes: Sequence[int], processes: int) -> list[int]:
    """Returns the process of each tensor: the largest tensors first, each to the one with the least so far.

    Args:
        sizes: Number of elements of each tensor.
        processes: Number of processes.

    >>> divide([10, 90, 80, 20], 2)
    [0, 0, 1, 1]
    """
    load, owners = [0] * processes, [0] * len(sizes)
    for tensor in sorted(range(len(sizes)), key=lambda k: (-sizes[k], k)):
        owner = min(range(processes), key=lambda process: (load[process], process))
        owners[tensor] = owner
        load[owner] += sizes[tensor]
    return owners


def turns(mode: Mode, processes: int) -> list[range]:
    """Returns the processes of a machine that join at the same time, the first ones first.

    Two machines that have joined the groups of their processes in different orders would wait for each other,
    where a worker may wait before it begins: so only the first process of each machine does.

    >>> import fastps
    >>> turns(fastps.Async(join_every=50), 4), turns(fastps.Async(), 4)
    ([range(0, 1), range(1, 4)], [range(0, 4)])
    """
    every = range(processes)
    return [every[:1], every[1:]] if mode.joins_in_turn else [every]


def group_of(group: str, process: int) -> str:
    """The group of the tensors that the processes of this number push, one on each machine."""
    return f"{group}/{process}"


def register(
    ps: ParameterServer, arrays: Mapping[str, Array], new: Iterable[str], optimizer: Optimizer, group: str
) -> None:
    """Registers the tensors of a process that the servers lack.

    Args:
        ps: The servers.
        arrays: Values by name.
        new: The names that the servers lack.
        optimizer: Of new tensors.
        group: The tensors' group.

    Raises:
        ConfigError: A tensor that the servers have belongs to another group; the error names both.
    """
    for name in sorted(arrays.keys() - set(new)):
        there = ps.spec(name).group
        if there != group:
            raise ConfigError(
                "other workers have divided the model in another way",
                tensor=name,
                expected=f"group {there}",
                got=f"group {group}",
                advice="all machines of a run need the same model and the same number of processes",
            )
    ps.register({name: arrays[name] for name in new}, optimizer=optimizer, group=group)


def to_row(*texts: str) -> NDArray[np.uint8]:
    """Texts as a row of bytes that collectives gather without pickle; cut off where they are too long."""
    row = np.zeros(_ROW_BYTES, np.uint8)
    encoded = _SEPARATOR.join(texts).encode()[:_ROW_BYTES]
    row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return row


def from_row(row: NDArray[np.uint8]) -> list[str]:
    """The texts of a row."""
    return row.tobytes().rstrip(b"\0").decode(errors="ignore").split(_SEPARATOR)


def texts_of(error: FastpsError | None) -> tuple[str, ...]:
    """The texts by which the other processes of a machine learn of an error, or that there is none."""
    return ("",) if error is None else (type(error).__name__, str(error))


def raise_first(own: FastpsError | None, texts: Iterable[list[str]]) -> None:
    """Raises this process's error, or else the first one of another process of its machine.

    Args:
        own: This process's error.
        texts: The `texts_of` each process, in the order of their numbers.
    """
    if own is not None:
        raise own
    for process, (kind, *text) in enumerate(texts):
        if kind:
            raise _KINDS.get(kind, UnavailableError)(f"local rank {process} of this node: {''.join(text)}")


def shard_name(name: str, shard: int, shards: int) -> str:
    """The name of the tensor that has one shard of a parameter."""
    return f"{name}@{shard}/{shards}"


def shards_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The parameters whose shards are all among some tensors: the names of these, in order.

    >>> shards_of(["b", "w@1/2", "w@0/2", "v@0/2"])
    {'w': ['w@0/2', 'w@1/2']}
    """
    there = set(names)
    firsts = (re.fullmatch(r"(.+)@0/([1-9]\d*)", name) for name in sorted(there))
    found = {m[1]: [shard_name(m[1], k, int(m[2])) for k in range(int(m[2]))] for m in firsts if m}
    return {name: shards for name, shards in found.items() if there.issuperset(shards)}
