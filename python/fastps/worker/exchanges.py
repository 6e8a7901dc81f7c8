"""Exchanges of a worker's rounds: sends what local steps have reached, and installs what comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from fastps._shared.types import Array, Rates
from fastps.errors import FastpsError, LeaseError
from fastps.modes import Mode
from fastps.parameter_server import ParameterServer
from fastps.store import Store
from fastps.worker.fetches import Fetches
from fastps.worker.pushes import Pushes
from fastps.worker.rounds import Exchange, Rounds
from fastps.worker.run.together import Together
from fastps.worker.tally import Tally

__all__ = ["Exchanges"]


class Exchanges:
    """Executes `fastps.DiLoCo`, one fragment after the other.

    A fragment's difference is sent, its version is awaited and fetched while the worker computes, and
    installed `overlap` local steps later. One is under way at a time.

    Args:
        ps: The worker's own client.
        params: Names to the worker's arrays.
        mode: The mode.
        rounds, pushes, fetches, together, tally: Those of the worker.

    Attributes:
        rounds: As passed.
    """

    def __init__(
        self,
        ps: ParameterServer,
        params: Mapping[str, Array],
        mode: Mode,
        rounds: Rounds,
        pushes: Pushes,
        fetches: Fetches,
        together: Together,
        tally: Tally,
    ) -> None:
        self._native, self._params, self._mode, self.rounds = ps.native, params, mode, rounds
        #: A store's values are copied when they are installed; servers' may travel before.
        self._is_far = not isinstance(ps, Store)
        self._pushes, self._fetches, self._together, self._tally = pushes, fetches, together, tally
        self.take_up()

    def step(self, values: Any, samples: Any) -> None:
        """Takes a local step, the last one of a turn if a quorum is in without this worker."""
        rounds, at = self.rounds, self._fetches.installed
        listens = rounds.listener is None and rounds.under_way is None and self._mode.sends_parts
        if listens and at is not None:
            rounds.listener = self._native.listen(rounds.next.names[0], at)
        rounds.step(values, samples, rounds.listener is not None and rounds.listener.heard())

    def send(self, lr: Rates) -> None:
        """Starts to push the difference of the fragment whose turn it is."""
        rounds, pushes = self.rounds, self._pushes
        sent = rounds.send()
        sent.rejected, sent.lr, sent.base = self._tally.rejected, lr, self._fetches.installed
        pushes.weight = rounds.weight(sent) if self._mode.weighs else None
        pushes.start(sent.differences, lr, sent.base)
        sent.started = True

    def look(self) -> None:
        """Begins to fetch the version of what is under way if it is made, while the worker computes."""
        sent = self.rounds.under_way
        if sent is None or sent.landed or sent.flight is not None or not self._is_far:
            return
        if self._pushes.under_way_done:
            sent.flight = self._native.pull_async(sent.fragment.names, None, None)

    def end(self) -> None:
        """Waits for the version of what is under way, and installs it."""
        try:
            self.land()
        except BaseException as error:
            self._install()
            if isinstance(error, FastpsError):
                with contextlib.suppress(FastpsError):  # the error is the one to see
                    self.take_up()
            raise
        self._install()
        self.take_up()

    def rest(self, wait: bool) -> bool | None:
        """Contributes all that no version has yet, each fragment in its turn.

        Returns:
            Whether a version is awaited still, for which `wait` waits; None: there was nothing.
        """
        rounds = self.rounds
        if rounds.under_way is None and not rounds.next.steps:
            return None
        while rounds.under_way is not None or rounds.next.steps:
            if rounds.under_way is None:
                self._pushes.resume()
                rounds.check(self._params)
                self.send(None)
            if not wait and not self._together.ready(self._mode):
                return True
            self.end()
        return False

    def land(self) -> None:
        """Waits for the version of what is under way, and fetches it; it is not installed."""
        sent, tally = self.rounds.under_way, self._tally
        if sent is None or sent.landed:
            return
        counts = sent.started
        try:
            try:
                self._pushes.turn()
                self._together.end(self._mode, lambda: self._fetch(sent))
            except LeaseError as error:
                if not (counts and self._together.is_known(error)):
                    raise
                self._send_again(sent)
        except BaseException:
            counts = False
            raise
        finally:
            sent.landed, sent.lost = True, not counts or tally.rejected > sent.rejected
            tally.samples[sent.lost] += sent.samples
            if sent.early and not sent.lost:
                tally.samples_partial += sent.samples

    def take_up(self) -> None:
        """Finds out whose turn it is, and fetches what others have changed without this worker.

        What it has of that is of an old version, and dropped.
        """
        rounds = self.rounds
        if len(rounds.fragments) == 1:
            return
        for _ in range(len(rounds.fragments) + 1):  # others go on meanwhile
            now, own = self._native.versions(list(self._params), None), self._fetches.installed
            stale = [
                fragment
                for fragment in rounds.fragments
                if own is None or any(now.slices(n) != own.slices(n) for n in fragment.names)
            ]
            for fragment in stale:
                self._fetches.some(fragment.names)
                self._tally.samples[1] += rounds.begin_again(fragment)
            if not stale:
                break
        rounds.take_turn(now)

    def begin(self) -> None:
        """Begins all fragments at the values that were fetched; unfinished rounds are dropped."""
        self._tally.samples[1] += self.rounds.begin()
        self.take_up()

    def _send_again(self, sent: Exchange) -> None:
        """Pushes a difference once more, with the place that the worker has again.

        Slices that have made their version without it refuse it as late.
        """
        sent.rejected, sent.flight = self._tally.rejected, None
        self._pushes.resume()
        self._pushes.start(sent.differences, sent.lr, sent.base)
        self._pushes.turn()
        self._together.end(self._mode, lambda: self._fetch(sent))

    def _fetch(self, sent: Exchange) -> None:
        """Fetches the present version of a fragment."""
        names, begun = sent.fragment.names, self.rounds.begun
        if not self._mode.overlap:  # nothing was computed since it was sent
            self._fetches.some(names)
            for name in names:
                begun[name][...] = self._params[name]
        else:
            flight, sent.flight = sent.flight or self._native.pull_async(names, None, None), None
            installed = flight.install({name: begun[name] for name in names}, None)
            assert installed is not None
            self._fetches.note(installed[1])
        sent.fetched = True

    def _install(self) -> None:
        self._tally.samples[1] += self.rounds.install()
