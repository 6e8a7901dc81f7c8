"""The processes of one machine: sums of their gradients, and the values of each for all."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fastps.errors import ConfigError, ConnectionLostError, FastpsError
from fastps.worker.run.parts import from_row, raise_first, texts_of, to_row

__all__ = ["Node"]

#: Seconds until a process whose connections are closed has surely ended.
_ENDS = 5.0
_PERIOD = 0.01


class _Process(NamedTuple):
    """A process, as others on its machine find it: number, start time, and the namespace of its number."""

    pid: int
    started: str
    namespace: str

    @classmethod
    def own(cls) -> _Process:
        return cls(os.getpid(), _status(os.getpid())[1], _namespace())

    @property
    def texts(self) -> tuple[str, str, str]:
        """Its fields as text."""
        return str(self.pid), self.started, self.namespace

    @property
    def has_ended(self) -> bool:
        """True if the process has surely ended."""
        return self.namespace == _namespace() and (
            _status(self.pid)[1] != self.started or _status(self.pid)[0] in "ZX"
        )


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, str]:
    """The state of a process and its start time."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]


class Node:
    """The processes that average their gradients before they push them.

    Args:
        group: Their process group; None: the ranks of the default group on this machine.

    Attributes:
        size: Number of processes.
        rank: Number of this process among them, from 0: its local rank.
        ranks: Their ranks in the default group.
        spans_all: True if they are all of the default group's processes.

    Raises:
        ConfigError: There is no default group, or this process is not in `group`.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "the processes of this machine have no group",
                expected="torch.distributed.init_process_group, as under torchrun",
                got="no default group",
            )
        self.group = _of_this_machine() if group is None else group
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        if self.rank < 0:
            raise ConfigError("invalid node", expected="a group with this process", got="another group")
        self.ranks = dist.get_process_group_ranks(self.group)
        self.spans_all = self.size == dist.get_world_size()
        #: Where tensors of collectives must be.
        self.device = torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        self._processes: list[_Process] = []
        with self._named():
            rows = _gathered(self.group, self.device, *_Process.own().texts)
        self._processes = [_Process(int(pid), started, namespace) for pid, started, namespace in rows]

    @property
    def first(self) -> int:
        """The default group's rank of local rank 0."""
        return self.ranks[0]

    def exchange(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Exchanges parts: every process gives each of them a vector, and gets all that are for it.

        Args:
            parts: A float32 vector for each process, of which the one for process k has the same length
                everywhere.

        Returns:
            The vectors for this process, in the order of the processes, of shape (size, length).
        """
        own = parts[self.rank]
        got = torch.empty(self.size * own.numel(), dtype=own.dtype, device=self.device)
        sent = torch.cat([part.to(self.device) for part in parts])
        with self._named():
            dist.all_to_all_single(
                got, sent, [own.numel()] * self.size, [part.numel() for part in parts], group=self.group
            )
        return got.reshape(self.size, own.numel())

    def share(self, vectors: Sequence[torch.Tensor]) -> None:
        """Gives vector k of process k to all others, in place."""
        with self._named():
            under_way = [
                dist.broadcast(vector, src=rank, group=self.group, async_op=True)
                for rank, vector in zip(self.ranks, vectors, strict=True)
            ]
            for one in under_way:
                if one is not None:
                    one.wait()

    def raise_of(self, own: FastpsError | None) -> None:
        """Raises the error of this process, or that of another one; every process calls it."""
        with self._named():
            errors = _gathered(self.group, self.device, *texts_of(own))
        raise_first(own, errors)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turns an error of the group into one that names the processes that have ended."""
        try:
            yield
        except RuntimeError as error:
            ended = self._ended()
            names = " and ".join(
                f"local rank {k} (rank {self.ranks[k]}, pid {self._processes[k].pid})" for k in ended
            )
            silent = "a process of this node does not answer: it hangs, or takes other steps"
            what = f"{names} of this node has ended" if ended else silent
            raise ConnectionLostError(
                what, advice="start the processes of this node again; other nodes continue"
            ) from error

    def _ended(self) -> list[int]:
        """The processes that have ended; waits for one, whose connections may close before it ends."""
        late = time.monotonic() + _ENDS
        while True:
            others = [k for k in range(len(self._processes)) if k != self.rank]
            ended = [k for k in others if self._processes[k].has_ended]
            if ended or time.monotonic() >= late:
                return ended
            time.sleep(_PERIOD)


def _gathered(group: dist.ProcessGroup | None, device: torch.device, *texts: str) -> list[list[str]]:
    """The texts of every process of a group, in the order of their ranks."""
    own = torch.from_numpy(to_row(*texts)).to(device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    return [from_row(row.cpu().numpy()) for row in rows]


def _of_this_machine() -> dist.ProcessGroup:
    """The group of the default group's ranks on this machine; every rank calls it."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    machines = [machine for (machine,) in _gathered(None, device, os.uname().nodename)]
    own: Any = None
    for machine in dict.fromkeys(machines):
        ranks = [rank for rank, name in enumerate(machines) if name == machine]
        group = dist.group.WORLD if len(ranks) == len(machines) else dist.new_group(ranks)
        if machine == os.uname().nodename:
            own = group
    return own  # type: ignore[no-any-return]
