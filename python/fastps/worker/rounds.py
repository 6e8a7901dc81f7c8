"""The local steps of a worker between two contributions: `fastps.DiLoCo`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastps._fastps import Listener, PullFlight, Versions
from fastps._shared.text import counted, quoted
from fastps._shared.types import Array, Rates
from fastps.errors import ConfigError
from fastps.modes import Mode
from fastps.worker.arguments import as_samples
from fastps.worker.gradients import check, whole

__all__ = ["Exchange", "Fragment", "Rounds"]


def _split(params: Mapping[str, Array], fragments: int) -> list[list[str]]:
    """Shares out tensors among fragments of about equal size, in the same way on every worker.

    >>> _split({"a": np.zeros(3), "b": np.zeros(5), "c": np.zeros(2)}, 2)
    [['b'], ['a', 'c']]
    """
    sizes, place = [0] * fragments, {}
    for name in sorted(params, key=lambda name: (-params[name].size, name)):
        place[name] = k = sizes.index(min(sizes))
        sizes[k] += max(1, params[name].size)
    return [[name for name in params if place[name] == k] for k in range(fragments)]


@dataclass(eq=False)
class Fragment:
    """Tensors that are exchanged together.

    Attributes:
        names: Their names.
        steps: Local steps since their last exchange.
        samples: Samples of those steps; 0 if none were given.
    """

    names: list[str]
    steps: int = 0
    samples: float = 0.0


@dataclass(eq=False)
class Exchange:
    """A difference that is sent, until its version is installed.

    Attributes:
        fragment: Its tensors.
        differences: *Begin minus now* by name.
        steps: Local steps behind it.
        samples: Samples of those steps.
        early: A quorum has cut them short.
        rejected: Pushes that were rejected before it.
        lr: The rate of its push.
        base: Versions that it is based on.
        started: It is on its way.
        flight: The fetch of its version, once that has begun.
        fetched: The values of its version, or of a later one, are there.
        lost: It is not part of that version.
        landed: Nothing of it is on its way any more.
    """

    fragment: Fragment
    differences: dict[str, Array]
    steps: int
    samples: float
    early: bool
    rejected: int = 0
    lr: Rates = None
    base: Versions | None = None
    started: bool = False
    flight: PullFlight | None = field(default=None, repr=False)
    fetched: bool = False
    lost: bool = False
    landed: bool = False


class Rounds:
    """What a worker has reached, the values that it began from, and whose turn it is to be exchanged.

    Each fragment has its turn once in `every` steps; the turns are evenly spread. Turn j of k ends
    ``(j + 1) * every // k - j * every // k`` steps after the one before.

    Args:
        params: Names to the worker's arrays; more may come before `begin`.
        mode: `fastps.DiLoCo`.
        check_finite: Refuse differences that are not finite.

    Attributes:
        begun: Names to the values that the present differences are from: those of the servers.
        fragments: All fragments.
        turn: The number of the one that is sent next.
        since: Local steps since the last one was sent.
        under_way: What is sent and not installed.
        pending: A step has begun and not ended.
        ends: It is the last one of the turn.
        early: The turn ends with it since a quorum is in.
        installed: No local step was taken since values were installed.
        listener: Hears that a quorum is in; None before the first step, and where the mode does not ask.
    """

    def __init__(self, params: Mapping[str, Array], mode: Mode, check_finite: bool) -> None:
        self._params, self._mode, self._check_finite = params, mode, check_finite
        self._differences: dict[str, Array] = {}
        self.every = mode.push_every
        self.begun: dict[str, Array] = {}
        self.fragments: list[Fragment] = []
        self.listener: Listener | None
        self.under_way: Exchange | None
        self.turn = 0
        self.begin()

    def begin(self) -> float:
        """Begins all fragments at the worker's present values; returns the samples that are dropped."""
        dropped = sum(fragment.samples for fragment in self.fragments)
        for name, values in self._params.items():
            if name not in self.begun:
                self.begun[name] = np.empty_like(values)
                self._differences[name] = np.empty_like(values)
            self.begun[name][...] = values
        self.fragments = [Fragment(names) for names in _split(self._params, self._mode.fragments)]
        self.turn = min(self.turn, len(self.fragments) - 1)
        self.since, self.under_way, self.listener = 0, None, None
        self.pending = self.ends = self.early = False
        self.installed = True
        return dropped

    def begin_again(self, fragment: Fragment) -> float:
        """Begins a fragment at the worker's present values; returns the samples that are dropped."""
        for name in fragment.names:
            self.begun[name][...] = self._params[name]
        dropped, fragment.steps, fragment.samples = fragment.samples, 0, 0.0
        self.installed, self.listener = True, None
        return dropped

    def take_turn(self, at: Versions) -> None:
        """Finds out whose turn it is from the versions of all tensors, as every worker does.

        Each exchange makes one version of its fragment, whatever the versions were when the run began.
        """
        made = (max(max(at.slices(n), default=0) for n in fragment.names) for fragment in self.fragments)
        self.turn = sum(made) % len(self.fragments)

    @property
    def next(self) -> Fragment:
        """The fragment whose turn it is."""
        return self.fragments[self.turn]

    @property
    def holds(self) -> bool:
        """True if there are local steps that no version has, or something is under way."""
        return self.under_way is not None or any(fragment.steps for fragment in self.fragments)

    @property
    def due(self) -> bool:
        """True if the version of what is under way is to be installed at the end of this step."""
        sent = self.under_way
        return sent is not None and (not sent.started or self.since >= self._mode.overlap)

    @property
    def _length(self) -> int:
        """Steps of the present turn."""
        count = len(self.fragments)
        return (self.turn + 1) * self.every // count - self.turn * self.every // count

    def step(self, values: Any, samples: Any, called: bool) -> None:
        """Takes a local step to these values; if one is invalid, nothing has changed.

        Args:
            values: Names to arrays.
            samples: Those behind the step, or None.
            called: The step is the last one of its turn, since a quorum is in.
        """
        if not isinstance(values, Mapping):
            expected, got = "a mapping of names to arrays", type(values).__name__
            raise ConfigError("invalid values", expected=expected, got=got)
        if values.keys() != self._params.keys():
            raise ConfigError(
                "the values are not those of the worker's tensors",
                expected=quoted(self._params),
                got=quoted(values),
                advice="give all of them, also those that no step changes",
            )
        added = 0.0 if samples is None else as_samples(samples)
        for name, array in values.items():
            check(name, array, self._params[name], False)
        ends = self.under_way is None and (called or self.since + 1 >= self._length)
        if ends:
            self.check(values)
        for name, array in values.items():
            if array is not self._params[name]:
                self._params[name][...] = whole(array)
        for fragment in self.fragments:
            fragment.steps, fragment.samples = fragment.steps + 1, fragment.samples + added
        self.since += 1
        self.ends, self.early = ends, ends and self.since < self._length
        self.pending, self.installed = True, False

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises `NonFiniteError` if a difference of the fragment whose turn it is is not finite."""
        for name in self.next.names:
            with np.errstate(all="ignore"):
                now = whole(values[name])
                difference = np.subtract(self.begun[name], now, out=self._differences[name])
            check(name, difference, difference, self._check_finite)

    def send(self) -> Exchange:
        """Takes the difference of the fragment whose turn it is; the next one's begins."""
        fragment = self.next
        for name in fragment.names:
            np.subtract(self.begun[name], self._params[name], out=self._differences[name])
        differences = {name: self._differences[name] for name in fragment.names}
        sent = Exchange(fragment, differences, fragment.steps, fragment.samples, self.early)
        fragment.steps, fragment.samples = 0, 0.0
        self.turn = (self.turn + 1) % len(self.fragments)
        self.since, self.under_way, self.listener, self.early = 0, sent, None, False
        return sent

    def weight(self, sent: Exchange) -> float | None:
        """The weight of a contribution: its samples, or else its share of the steps of a round."""
        return sent.samples or (sent.steps / self.every if sent.steps < self.every else None)

    def install(self) -> float:
        """Installs the version of what was under way, if it was fetched; returns the samples that it drops.

        Local steps that were taken since it was sent stay in part: a value becomes
        ``alpha * local + (1 - alpha) * received``. Where the difference is lost, the received one.
        """
        sent, self.under_way, dropped = self.under_way, None, 0.0
        if sent is None or not sent.fetched:
            return dropped
        fragment, alpha = sent.fragment, self._mode.alpha
        if sent.lost:
            dropped, fragment.steps, fragment.samples = fragment.samples, 0, 0.0
        for name in fragment.names:
            local, received = self._params[name], self.begun[name]
            if fragment.steps:
                np.multiply(local, np.float32(alpha), out=local)
                local += np.float32(1 - alpha) * received
            elif self._mode.overlap:  # else it was fetched to there
                local[...] = received
        self.installed = True
        return dropped

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The unfinished round, for `Worker.state_dict`; nothing is on its way."""
        begun = {name: values.copy() for name, values in self.begun.items()}
        state = {"begun": begun, "round": self.since, "samples": sum(f.samples for f in self.fragments)}
        if len(self.fragments) > 1 or self._mode.overlap:
            state["fragments"] = [[f.steps, f.samples] for f in self.fragments]
            if self.under_way is not None:
                sent = self.under_way
                state["mixing"] = [self.fragments.index(sent.fragment), int(sent.lost)]
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises `ConfigError` unless the numbers of a saved round fit."""
        count, each, mixing = len(self.fragments), _fragments_of(state), state.get("mixing", (0, 0))
        valid = fits = False
        with contextlib.suppress(TypeError, ValueError):  # of a file that something else has written
            numbers = [
                state.get("round", 0),
                *(number for steps, samples in each for number in (steps, samples)),
            ]
            valid = all(np.isfinite(number) and number >= 0 for number in numbers)
            fragment, lost = mixing
            fits = fragment in range(count) and lost in (0, 1)
        if valid and len(each) != count:
            expected, got = f"fragments={count}", f"fragments={len(each)}"
            raise ConfigError("the saved round is of another mode", expected=expected, got=got)
        if not (valid and fits):
            expected = f"steps and samples >= 0 of {counted(count, 'fragment')}"
            raise ConfigError("the saved round is invalid", expected=expected, got="something else")

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[int, float]:
        """Continues a saved round where it began from the present values, fragment by fragment.

        Returns:
            The steps and the samples that are dropped.
        """
        dropped, kept = 0.0, False
        for fragment, (steps, samples) in zip(self.fragments, _fragments_of(state), strict=True):
            if not all(np.array_equal(state["begun"][n], self._params[n]) for n in fragment.names):
                dropped += float(samples)
                continue
            kept = True
            for name in fragment.names:
                self._params[name][...] = np.reshape(state["params"][name], self._params[name].shape)
            fragment.steps, fragment.samples = int(steps), float(samples)
        if not kept:
            return int(state["round"]), dropped
        self.since = int(state["round"])
        self.installed = not any(fragment.steps for fragment in self.fragments)
        if (mixing := state.get("mixing")) is not None:
            fragment = self.fragments[int(mixing[0])]
            if fragment.steps or not all(
                np.array_equal(self._params[n], self.begun[n]) for n in fragment.names
            ):
                steps, samples = fragment.steps, fragment.samples
                sent = Exchange(fragment, {}, steps, samples, False, started=True, fetched=True, landed=True)
                sent.lost = bool(mixing[1])
                self.under_way = sent
        return 0, dropped


def _fragments_of(state: Mapping[str, Any]) -> Any:
    """Steps and samples of each fragment of a saved round; of one that has no others, its own."""
    return state.get("fragments") or [[state.get("round", 0), state.get("samples", 0.0)]]
