"""The tensors of every fault test, two clients with different codecs, and a ledger of acknowledged pushes.

Both clients push to the counter tensors (SGD, a push of -1 adds 1), and each to its own Adam tensors, in
which content and order affect every bit. All values of a slice are equal, so 1-bit encodes them exactly, and
the next push shows to the last bit what was refused or fenced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

import fastps
from fastps.commands.kit.account import Account

SLICE = 63 * 4096
BIG = 2 * SLICE + 5
CODECS = (fastps.Float32(), fastps.OneBit())

Part = tuple[str, int]
"""A slice: its tensor and its index there."""


@dataclass(frozen=True)
class Tensor:
    """`owner` is the only client that pushes to it; None for a counter, to which both push."""

    size: int
    owner: int | None = None

    @property
    def optimizer(self) -> fastps.SGD | fastps.Adam:
        return fastps.SGD(lr=1.0) if self.owner is None else fastps.Adam()

    @property
    def slices(self) -> list[slice]:
        return [slice(k, min(k + SLICE, self.size)) for k in range(0, self.size, SLICE)]


TENSORS = {"big": Tensor(BIG)} | {f"small{k}": Tensor(10) for k in range(100)}
for owner in range(len(CODECS)):
    TENSORS |= {f"adam{owner}/big": Tensor(BIG, owner)}
    TENSORS |= {f"adam{owner}/small{k}": Tensor(10, owner) for k in range(10)}


class Ledger:
    """Registers the tensors, and knows what they must hold."""

    def __init__(self, ps: fastps.ParameterServer) -> None:
        self.counted: defaultdict[Part, Account] = defaultdict(Account)
        # Each slice of an Adam tensor is its own tensor here, so that it can be pushed separately.
        self.mirror = fastps.Store()
        for name, tensor in TENSORS.items():
            ps.register(name, np.zeros(tensor.size, np.float32), optimizer=tensor.optimizer)
            for k, part in enumerate(tensor.slices if tensor.owner is not None else []):
                zeros = np.zeros(part.stop - part.start, np.float32)
                self.mirror.register(f"{name}[{k}]", zeros, optimizer=tensor.optimizer)

    def enter(self, part: Part, value: float) -> None:
        """A push of `value` to this slice was applied."""
        name, k = part
        if TENSORS[name].owner is None:
            self.counted[part].ask(-value)
            self.counted[part].apply(-value)
        else:
            part_of = TENSORS[name].slices[k]
            self.mirror.push(f"{name}[{k}]", np.full(part_of.stop - part_of.start, value, np.float32))

    def check(self, ps: fastps.ParameterServer, names: Iterable[str] = TENSORS) -> None:
        """The servers hold what was acknowledged: counted exactly, Adam's values bit for bit."""
        for name, values in ps.pull(list(names)).items():
            for k, part in enumerate(TENSORS[name].slices):
                if TENSORS[name].owner is None:
                    least, most = self.counted[name, k].bounds
                    assert least == most
                    assert (values[part] == least).all(), f"slice {k} of {name}"
                else:
                    expected = self.mirror.pull(f"{name}[{k}]")
                    assert values[part].tobytes() == expected.tobytes(), f"slice {k} of {name}"


class Author:
    """One of the two clients: the first pushes Float32, the second 1-bit with error feedback."""

    def __init__(self, ps: fastps.ParameterServer, ledger: Ledger, number: int) -> None:
        self.ps = ps
        self.ledger = ledger
        self.tensors = {n: t for n, t in TENSORS.items() if t.owner in (None, number)}
        self.arrays = {n: np.zeros(t.size, np.float32) for n, t in self.tensors.items()}
        self.bound = ps.bind(self.arrays, codec=CODECS[number])
        self.rounds = 0
        self.sent: dict[Part, float] = {}
        self.owed: dict[Part, float] = {}  # what the residuals hold

    def push(self, timeout: float | None = None) -> None:
        """Pushes once; enters it if it is acknowledged whole."""
        self.rounds += 1
        for index, (name, tensor) in enumerate(self.tensors.items()):
            value = -1.0 if tensor.owner is None else -1.0 - (7 * self.rounds + index) % 5
            self.arrays[name][...] = value
            for k in range(len(tensor.slices)):
                self.sent[name, k] = value + self.owed.pop((name, k), 0.0)
        self.ps.push(self.bound, timeout=timeout)
        for part in self.sent:
            self.ledger.enter(part, self.sent[part])

    def enter(self, partial: fastps.PartialPush) -> dict[Part, str]:
        """Enters a push that failed in part, once nothing of it is in doubt. Returns the doubts' fates."""
        fates = {}
        for doubt in partial.in_doubt:
            fates[doubt.tensor, doubt.elements.start // SLICE] = doubt.result(30.0)
        refused = {(tensor, elements.start // SLICE) for tensor, elements, _ in partial.refused}
        applied = {(tensor, elements.start // SLICE) for tensor, elements, _ in partial.applied}
        applied |= {(name, k) for name in partial.receipts for k in range(len(self.tensors[name].slices))}
        outcomes = [*refused, *applied, *fates]
        assert sorted(outcomes) == sorted(self.sent), "each slice is reported exactly once"
        for part, value in self.sent.items():
            fate = fates.get(part, "applied" if part in applied else "refused")
            if fate == "applied":
                self.ledger.enter(part, value)
            elif fate in ("refused", "fenced") and self.bound.feedback is not None:
                self.owed[part] = value
        return fates


def whole(partials: Iterable[fastps.PartialPush]) -> Iterator[str]:
    """The tensors that all of these pushes changed whole, or that are not theirs."""
    receipts: list[Mapping[str, fastps.Receipt]] = [partial.receipts for partial in partials]
    for name, tensor in TENSORS.items():
        if all(name in r for k, r in enumerate(receipts) if tensor.owner in (None, k)):
            yield name
