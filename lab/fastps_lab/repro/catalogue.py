"""All claims."""

from __future__ import annotations

from fastps_lab.repro.allreduce import claim as servers_and_allreduce
from fastps_lab.repro.claim import Claim
from fastps_lab.repro.claims import (
    cifar10,
    codecs,
    downpour,
    hogwild,
    momentum,
    optimizers,
    processes,
    reinforcement,
    sandblaster,
    stragglers,
    synthetic,
    toys,
    training,
    warm_start,
)
from fastps_lab.repro.uneven import claim as uneven

__all__ = ["CLAIMS", "find"]

FAMILIES = (
    momentum,
    uneven,
    downpour,
    codecs,
    stragglers,
    optimizers,
    toys,
    training,
    warm_start,
    sandblaster,
    hogwild,
    processes,
    servers_and_allreduce,
    reinforcement,
    synthetic,
    cifar10,
)

CLAIMS: dict[str, Claim] = {claim.name: claim for family in FAMILIES for claim in family.CLAIMS}


def find(names: list[str], quick: bool) -> list[Claim]:
    """The claims of these names, or for ``["all"]`` those of a form, without those apart.

    Raises:
        KeyError: There is no claim of a name.
    """
    form = "quick" if quick else "full"
    if names == ["all"]:
        return [claim for claim in CLAIMS.values() if claim.forms in ("both", form)]
    return [CLAIMS[name] for name in dict.fromkeys(names)]
