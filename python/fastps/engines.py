"""The place of this process among those that an engine (torchrun, Slurm, MPI, Kubernetes, Ray) has started.

`detect` reads what the engine says, so that no script does. A `fastps.Worker`, `fastps.worker_seed` and the
PyTorch optimizer use its rank where none is given.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from fastps._shared.checks import at_least
from fastps.errors import ConfigError

__all__ = ["Place", "detect"]

#: The engine of a process that no engine has started.
_NONE = "none"
_FIELDS = ("rank", "world_size", "local_rank", "node", "nodes")
#: Each index, and the number that it is below.
_BELOW = (("rank", "world_size"), ("local_rank", "local_size"), ("node", "nodes"))


@dataclass(frozen=True)
class Place:
    """The place of a process. A field that the engine does not define is None.

    Attributes:
        rank: Number of the process, from 0.
        world_size: Number of processes. None where it may change or is unknown, as in Kubernetes.
        local_rank: Number of the process on its machine, from 0.
        node: Number of the machine, from 0.
        nodes: Number of machines.
        engine: ``"fastps run"``, ``"torchrun"`` (or another program that sets ``RANK``), ``"Open MPI"``,
            ``"Slurm"``, ``"PMI"``, ``"Kubernetes"``, ``"Ray"``, or ``"none"`` for a single process.
        sources: For each field that the engine defines, where it comes from: the environment variable, or
            ``"argument"``.
    """

    rank: int
    world_size: int | None
    local_rank: int | None
    node: int | None
    nodes: int | None
    engine: str
    sources: Mapping[str, str]

    @property
    def launched(self) -> bool:
        """True if an engine has started this process, or an argument gives its rank."""
        return "rank" in self.sources


class _Variables(NamedTuple):
    """The environment variables of an engine; the first one that is set counts."""

    engine: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


#: In the order in which they count. mpirun in a Slurm job starts a daemon on each machine with srun, whose
#: variables all processes of MPI inherit: so Open MPI comes first.
_ENGINES = (
    _Variables("fastps run", ("FASTPS_RANK",), ("FASTPS_WORKERS",), ("LOCAL_RANK",)),
    _Variables(
        "torchrun",
        ("RANK",),
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        ("GROUP_RANK", "NODE_RANK"),
        ("GROUP_WORLD_SIZE",),
    ),
    _Variables(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Variables(
        "Slurm",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_LOCALID",),
        (),
        ("SLURM_NODEID",),
        ("SLURM_STEP_NUM_NODES",),
    ),
    _Variables("PMI", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    _Variables("Kubernetes", ("JOB_COMPLETION_INDEX",)),
)
#: Engines whose rank counts only together with the number of processes. A batch script of Slurm has
#: SLURM_PROCID=0 whatever the job's number of tasks is; only tasks of srun have SLURM_STEP_NUM_TASKS.
_NEED_SIZE = ("Slurm", "PMI")
#: Engines whose variables people also set by hand.
_BY_HAND = ("fastps run", "torchrun")


@dataclass(frozen=True)
class _Found:
    """Values of one engine and their variables, by field."""

    engine: str
    values: dict[str, int]
    sources: dict[str, str]

    def said(self, field: str) -> str:
        """A field as an error shows it, such as ``RANK=3``."""
        source = self.sources[field]
        return f"{field if source == 'argument' else source}={self.values[field]}"


def detect(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    node: int | None = None,
    nodes: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Place:
    """Returns the place of this process.

    The first of these that gives a rank counts: the arguments; ``FASTPS_RANK`` (`fastps run`); ``RANK``
    (torchrun); Open MPI's mpirun; a task of Slurm's srun; PMI (MPICH, Intel MPI); the index of a Kubernetes
    Job, or the ordinal of a StatefulSet's pod; Ray Train, if this process has imported it. Without any of
    them the process is the only one.

    An engine that starts another one, such as srun that starts a torchrun on each machine, counts its own
    processes; the inner engine's count is used. Two engines that count equally many processes must agree.

    Args:
        rank: Rank of the process to use instead of the engine's; None: the engine's.
        world_size: Number of processes, likewise.
        local_rank: Rank among the processes of this machine, likewise.
        node: Number of this machine, likewise.
        nodes: Number of machines, likewise.
        environment: The environment variables.

    Raises:
        ConfigError: A value is no integer in its range, or two values contradict each other; the error names
            both with their variables.

    >>> import fastps.engines
    >>> torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    >>> place = fastps.engines.detect(environment=torchrun)
    >>> place.rank, place.world_size, place.local_rank, place.engine, place.sources["rank"]
    (3, 4, 1, 'torchrun', 'RANK')
    >>> fastps.engines.detect(environment={}).launched
    False
    """
    arguments = zip(_FIELDS, (rank, world_size, local_rank, node, nodes), strict=True)
    given = {
        field: at_least(1 if field in ("world_size", "nodes") else 0, field, value)
        for field, value in arguments
        if value is not None
    }
    found = list(_engines(environment))
    for other in found[1:]:
        if "rank" not in given:
            _check_agree(found[0], other, environment)
    single = dict.fromkeys(_FIELDS, 0) | {"world_size": 1, "nodes": 1}
    engine = found[0] if found else _Found(_NONE, {} if given else single, {})
    chosen = _Found(engine.engine, engine.values | given, engine.sources | dict.fromkeys(given, "argument"))
    _check_range(chosen)
    values = dict.fromkeys(_FIELDS) | _on_one_machine(chosen.values)
    return Place(
        rank=values["rank"] or 0,
        world_size=values["world_size"],
        local_rank=values["local_rank"],
        node=values["node"],
        nodes=values["nodes"],
        engine=chosen.engine,
        sources=MappingProxyType(
            {field: chosen.sources[field] for field in _FIELDS if field in chosen.sources}
        ),
    )


def own_rank(rank: int | None) -> int | None:
    """Internal: a rank that is given, else that of this process; None in one that no engine has started."""
    if rank is not None:
        return rank
    place = detect()
    return place.rank if place.launched else None


def _engines(environment: Mapping[str, str]) -> Iterator[_Found]:
    """The values of each engine that has started this process, directly or not."""
    for variables in _ENGINES:
        found = _Found(variables.engine, {}, {})
        for field, names in zip(variables._fields[1:], variables[1:], strict=True):
            for name in names:
                if environment.get(name, "").strip():
                    found.values[field], found.sources[field] = _number(name, environment[name]), name
                    break
        if "rank" in found.values and (found.engine not in _NEED_SIZE or "world_size" in found.values):
            yield found
    ordinal = re.fullmatch(r".+-(0|[1-9]\d{0,3})", environment.get("HOSTNAME", ""))
    if ordinal and "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" not in environment:
        yield _Found("Kubernetes", {"rank": int(ordinal[1])}, {"rank": "HOSTNAME"})
    yield from _ray()


def _ray() -> Iterator[_Found]:
    """The values of Ray Train, if this process has imported it and is one of its workers."""
    train = sys.modules.get("ray.train")
    if train is None:
        return
    try:
        context = train.get_context()
        values = {
            "rank": context.get_world_rank(),
            "world_size": context.get_world_size(),
            "local_rank": context.get_local_rank(),
            "node": context.get_node_rank(),
        }
    except Exception:  # outside of a worker, of which kind depends on Ray's version
        return
    if values["rank"] is not None:
        yield _Found("Ray", values, dict.fromkeys(values, "ray.train.get_context()"))


def _number(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ConfigError(f"invalid environment variable {name}", expected="an integer >= 0", got=repr(text))
    return int(text)


def _check_agree(chosen: _Found, other: _Found, environment: Mapping[str, str]) -> None:
    """Raises if two engines give one process different ranks among equally many."""
    if chosen.engine == "torchrun" and "TORCHELASTIC_RUN_ID" in environment:
        return  # torchrun orders its processes itself
    if chosen.values["rank"] == other.values["rank"]:
        return
    sizes = [found.values.get("world_size") for found in (chosen, other)]
    by_hand = any(
        size is None and found.engine in _BY_HAND for size, found in zip(sizes, (chosen, other), strict=True)
    )
    if sizes[0] == sizes[1] or by_hand:
        raise ConfigError(
            f"two ranks of this process, of {chosen.engine} and of {other.engine}",
            expected=chosen.said("rank"),
            got=other.said("rank"),
            advice=f"unset the one that does not belong to this launch, or give rank= (here "
            f"{chosen.sources['rank']} counts)",
        )


def _check_range(found: _Found) -> None:
    for index, number in _BELOW:
        if index not in found.values or found.values[index] < found.values.get(number, math.inf):
            continue
        name = found.said(index).partition("=")[0]
        raise ConfigError(
            f"{index} is out of range",
            expected=f"{name} < {found.values[number]} ({found.said(number)})",
            got=found.said(index),
            advice="both must come from one launch",
        )


def _on_one_machine(values: dict[str, int]) -> dict[str, int]:
    """Adds the machine's number where all processes are on one."""
    if "world_size" in values and values.get("local_size") == values["world_size"]:
        return {"node": 0, "nodes": 1} | values
    return values
