"""The gloo group of a replica's processes."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fastps.errors import ConfigError, DeadlineError

__all__ = ["leave_group", "number_of_replica", "open_group", "size_of"]

#: Groups of this process's open replicas, and of failed ones that may still get messages.
_in_use: list[dist.ProcessGroup] = []
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def size_of(group: dist.ProcessGroup | None) -> int:
    """Number of parts of a replica in this group; None is the default group, or the one torchrun has set."""
    if group is not None or dist.is_initialized():
        return dist.get_world_size(group)
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            "the environment is not complete",
            expected=f"{', '.join(missing)}, as torchrun sets them",
            got="none",
            advice="Replica.local(graph) runs all parts in this process",
        )
    return int(os.environ["WORLD_SIZE"])


def open_group(group: dist.ProcessGroup | None, timeout: float) -> tuple[dist.ProcessGroup, bool]:
    """The group, and whether it was made here.

    Raises:
        ConfigError: It is not a gloo group, or another replica of this process has it.
        DeadlineError: The other processes did not come in time.
    """
    made = group is None and not dist.is_initialized()
    if made:
        try:
            limit = datetime.timedelta(seconds=timeout)
            store, rank, size = next(rendezvous("env://", timeout=limit))
            # torchrun keeps its store when it starts processes again, with the former ones' addresses in it.
            life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"fastps/{life}", store)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", timeout=limit, store=store, rank=rank, world_size=size)
        except (dist.DistError, RuntimeError) as error:
            raise DeadlineError(
                f"the {os.environ['WORLD_SIZE']} parts of the replica did not meet at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {timeout} s: {error}"
            ) from error
    group = group or dist.group.WORLD
    assert group is not None
    backends = dist.get_backend_config(group)
    if "cpu:gloo" not in backends:
        raise ConfigError(
            "invalid group",
            expected="a gloo group",
            got=backends,
            advice="values of a GPU cross through CPU memory and gloo; NCCL is not supported because it has "
            "not been tested",
        )
    if any(group is other for other in _in_use):
        raise ConfigError(
            "the group has another replica, and messages of both would mix",
            expected="a group of its own",
            got="one in use",
            advice="close the other replica first, or make a group (torch.distributed.new_group)",
        )
    _in_use.append(group)
    return group, made


def leave_group(group: dist.ProcessGroup, made: bool, broken: bool) -> None:
    """Gives the group back, unless messages for a replica that has failed may still come."""
    if not broken:
        _in_use[:] = [other for other in _in_use if other is not group]
    if made:
        dist.destroy_process_group()


def number_of_replica(number: int | None) -> int:
    """The replica's number: the argument, else the environment's ``REPLICA``, else 0."""
    if number is None:
        given = os.environ.get("REPLICA", "0")
        number = int(given) if given.isdecimal() else -1
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**32:
        got = repr(number) if number != -1 else repr(os.environ.get("REPLICA"))
        raise ConfigError(
            "invalid number of the replica", expected="an integer >= 0 (argument or REPLICA)", got=got
        )
    return number
