"""Every action of a run, as a pure function of the seed and the step.

Steps are dealt to lanes in turn: one for each client, for each shard's process and proxy, for hostile peers
and for the auditor. A lane takes its steps in order and waits for no other lane. Its actions come from a deck
that has every kind of action and is shuffled again when it is used up, so even a short run has them all.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CLIENTS", "PROFILES", "SHARDS", "SLOTS", "Action", "Plan"]

CLIENTS = 4
SHARDS = 2
#: Number of clients and witnesses; a life's number modulo this is its place.
SLOTS = CLIENTS + SHARDS

PROFILES = ("crash", "net", "hostile", "all", "take-over")


@dataclass(frozen=True)
class Action:
    """Action of a lane at a step."""

    step: int
    lane: str
    kind: str
    args: Mapping[str, Any]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self))


_Chance = random.Random
_Deck = Mapping[str, Callable[[_Chance], dict[str, Any]]]


def _between(least: float, most: float, chance: _Chance) -> float:
    return round(chance.uniform(least, most), 3)


def _push(chance: _Chance) -> dict[str, Any]:
    return {
        "count": chance.randint(3, 30),
        "timeout": chance.choice([0.3, 2.0, 10.0, 10.0]),
        "place": chance.randrange(SHARDS),
        "big": chance.random() < 0.3,
        "pause": chance.choice([0.0, 0.0, 0.001, 0.01]),
    }


def _ask(chance: _Chance) -> dict[str, Any]:
    return {
        "count": chance.randint(1, 4),
        "timeout": chance.choice([2.0, 10.0]),
        "place": chance.randrange(SHARDS),
    }


def _once(_chance: _Chance) -> dict[str, Any]:
    return {"count": 1, "timeout": 10.0}


def _register(chance: _Chance) -> dict[str, Any]:
    return {"count": chance.randint(1, 3), "timeout": 10.0, "size": chance.choice([0, 1, 1000])}


def _killed(chance: _Chance) -> dict[str, Any]:
    return {**_push(chance), "after": _between(0.02, 0.5, chance), "count": 500, "timeout": 10.0}


def _stopped(chance: _Chance) -> dict[str, Any]:
    return {**_push(chance), "after": _between(0.02, 0.3, chance), "stopped": _between(0.1, 1.5, chance)}


def _interrupted(chance: _Chance) -> dict[str, Any]:
    return {"count": 200, "after": _between(0.2, 1.0, chance), "every": _between(0.001, 0.02, chance)}


def _pause(chance: _Chance) -> dict[str, Any]:
    return {"pause": _between(0.3, 2.0, chance)}


def _kill(chance: _Chance) -> dict[str, Any]:
    first = chance.choice(sorted(_VERBS))
    return {**_pause(chance), "pushes": chance.choice([0, 1, 20, 20, 20]), "first": first}


def _terminate(chance: _Chance) -> dict[str, Any]:
    return {**_kill(chance), "signal": chance.choice(["SIGTERM", "SIGINT"])}


def _for_a_while(chance: _Chance) -> dict[str, Any]:
    return {**_pause(chance), "seconds": _between(0.1, 1.5, chance)}


def _bytes(chance: _Chance) -> dict[str, Any]:
    return {**_pause(chance), "bytes": int(10 ** chance.uniform(0.0, 6.3))}


def _delay(chance: _Chance) -> dict[str, Any]:
    return {**_for_a_while(chance), "delay": _between(0.001, 0.1, chance)}


def _hostile(chance: _Chance) -> dict[str, Any]:
    return {"pause": _between(0.1, 1.0, chance), "shard": chance.randrange(SHARDS)}


def _stranger(chance: _Chance) -> dict[str, Any]:
    return {**_hostile(chance), "seed": chance.randrange(2**32)}


def _crowd(chance: _Chance) -> dict[str, Any]:
    return {**_hostile(chance), "count": chance.randint(50, 200), "seconds": _between(0.2, 1.5, chance)}


def _garbage(chance: _Chance) -> dict[str, Any]:
    return {**_hostile(chance), "seed": chance.randrange(2**32), "bytes": chance.randint(1, 100_000)}


def _flood(chance: _Chance) -> dict[str, Any]:
    return {**_hostile(chance), "count": chance.choice([500, 2000, 20_000])}


def _registrations(chance: _Chance) -> dict[str, Any]:
    return {**_hostile(chance), "count": 200, "slices": 60_000}


def _look(chance: _Chance) -> dict[str, Any]:
    return {"pause": _between(0.1, 0.5, chance), "timeout": 10.0, "catalogue": chance.random() < 0.2}


_VERBS: _Deck = {
    "push": _push,
    "push_list": _push,
    "push_async": _push,
    "push_bound": _push,
    "push_int8": _push,
    "push_pull": _push,
    "push_sparse": _push,
    "step": _push,
    "assign": _push,
    "pull": _ask,
    "pull_list": _ask,
    "pull_rows": _ask,
    "pull_out": _ask,
    "pull_versions": _ask,
    "names": _ask,
    "versions": _ask,
    "spec": _ask,
    "state": _ask,
    "save": _ask,
    "register": _register,
    "push_wide": _push,
    "push_pair": _push,
    "portions": _ask,
    "vectors": _ask,
    "minimize": _once,
}
_DEATHS: _Deck = {"killed": _killed, "stopped": _stopped, "interrupted": _interrupted}
_CRASHES: _Deck = {
    "kill": _kill,
    "kill_twice": _kill,
    "terminate": _terminate,
    "stop": _for_a_while,
    "second": _pause,
    "remove_folder": _for_a_while,
}
_NET: _Deck = {
    "cut": _pause,
    "cut_after": _bytes,
    "truncate": _bytes,
    "delay": _delay,
    "half_open": _for_a_while,
    "reset": _pause,
    "stall": _for_a_while,
}
_HOSTILE: _Deck = {
    "silent": _crowd,
    "garbage": _garbage,
    "ping": _flood,
    "settings": _flood,
    "window_update": _flood,
    "priority": _flood,
    "unknown_frame": _flood,
    "reset_stream": _flood,
    "empty_data": _flood,
    "hello": _flood,
    "registrations": _registrations,
}


_STRANGERS: _Deck = {
    "seat": _stranger,
    "program": _stranger,
    "join": _stranger,
    "hold": _stranger,
    "workers": _stranger,
    "states": _stranger,
    "replay": _stranger,
}


#: Machines are lost for good, and servers on others take their shards over.
_LOSSES: _Deck = {"lose": _kill, "kill": _kill, "terminate": _terminate}


def _lanes(profile: str) -> dict[str, _Deck]:
    if profile == "take-over":
        clients: dict[str, _Deck] = {f"client {k}": _VERBS for k in range(CLIENTS)}
        return clients | {f"shard {k}": _LOSSES for k in range(SHARDS)} | {"auditor": {"look": _look}}
    crash, net, hostile = (profile in (own, "all") for own in PROFILES[:3])
    verbs = {**_VERBS, **(_DEATHS if crash else {})}
    lanes: dict[str, _Deck] = {f"client {k}": verbs for k in range(CLIENTS)}
    lanes |= {f"shard {k}": _CRASHES for k in range(SHARDS) if crash}
    lanes |= {f"net {k}": _NET for k in range(SHARDS) if net}
    if hostile:
        lanes |= {"hostile": _HOSTILE, "stranger": _STRANGERS}
    lanes |= {"cuts": {"cut": _pause}}
    return lanes | {"auditor": {"look": _look}}


class Plan:
    """The actions of a run.

    Args:
        seed: Any integer.
        profile: One of `PROFILES`.
    """

    def __init__(self, seed: int, profile: str) -> None:
        self._seed = seed
        self._decks = _lanes(profile)
        self.lanes = tuple(self._decks)

    def action(self, step: int) -> Action:
        """Returns the action of a step, equal for every call, machine and run."""
        turn, place = divmod(step, len(self.lanes))
        lane = self.lanes[place]
        deck = self._decks[lane]
        kinds = sorted(deck)
        random.Random(f"{self._seed} {lane} {turn // len(deck)}").shuffle(kinds)
        kind = kinds[turn % len(deck)]
        return Action(step, lane, kind, deck[kind](random.Random(f"{self._seed} {step}")))

    def step(self, lane: str, turn: int) -> int:
        """The step at which a lane has its turn of this number."""
        return turn * len(self.lanes) + self.lanes.index(lane)
