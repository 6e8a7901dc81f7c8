"""Steps to values: what they have reached is sent, and what comes back is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from fastps._shared.types import Rates
from fastps.errors import ConfigError, FastpsError, LeaseError
from fastps.modes import Mode
from fastps.worker.common import Common
from fastps.worker.rounds import Exchange, Rounds
from fastps.worker.tally import NOTHING

__all__ = ["Exchanges"]


class Exchanges:
    """Executes `fastps.DiLoCo`, one fragment after the other; `Steps` executes the other modes.

    A fragment's difference is sent, its version is awaited and fetched while the worker computes, and
    installed `overlap` local steps later. One is under way at a time.

    Args:
        common: The parts of the worker.
        mode: Its mode.
        is_far: Values may travel before they are installed; those of a store are copied then.

    Attributes:
        mode: As passed.
        rounds: What the worker has reached, and what of it is under way.
    """

    def __init__(self, common: Common, mode: Mode, is_far: bool) -> None:
        self.mode, self._is_far = mode, is_far
        native, self._params, self._pushes, self._fetches, self._together, self._tally = common
        self._native, self.rounds = native, Rounds(self._params, mode, native.check_finite)
        self._pushes.follow(mode)
        self._tally.fragments = mode.fragments
        self._together.contribute_by(self.rest)

    def start(self) -> None:
        """Begins all fragments at the values that were fetched; unfinished rounds are dropped."""
        self._tally.samples[1] += self.rounds.begin()
        self._take_up()

    def restart(self) -> None:
        """Fetches anew; an unfinished round is dropped."""
        self.land()
        self._fetches.restart()
        self.start()

    added = restart

    def close(self) -> None:
        """It has nothing to let go of."""

    # -- one step --------------------------------------------------------------------------------------------

    def step(self, values: Any, samples: Any, lr: Rates, *_: object) -> None:
        """Takes a local step, or ends the one that `begin` has begun; the last one of a turn contributes."""
        rounds = self.rounds
        self._tally.acknowledged = NOTHING
        try:
            if values is not None or not rounds.pending:
                self.begin(values, samples, lr)
        finally:
            if rounds.pending:
                rounds.pending = False
                self._tally.steps += 1
                if rounds.due:
                    self._end()
                else:
                    self._look()

    def begin(self, values: Any, samples: Any, lr: Rates) -> None:
        """Takes a local step, which is the last one of a turn if a quorum is in without this worker."""
        rounds = self.rounds
        self._together.check_open()
        if rounds.pending:
            raise ConfigError(
                "a local step has begun already", expected="step() to end it", got="more values"
            )
        self._fetches.watched.check()
        self._together.begin()
        self._pushes.resume()
        at = self._fetches.installed
        listens = rounds.listener is None and rounds.under_way is None and self.mode.sends_parts
        if listens and at is not None:
            rounds.listener = self._native.listen(rounds.next.names[0], at)
        rounds.step(values, samples, rounds.listener is not None and rounds.listener.heard())
        if rounds.ends:
            self._pushes.note_lost(stacklevel=5)
            self._pushes.lr = lr
            self._send(lr)

    def ready(self) -> bool:
        """Returns whether the step that has begun ends without a wait. Never waits."""
        return not self.rounds.due or self._together.ready(self.mode)

    def _send(self, lr: Rates) -> None:
        """Starts to push the difference of the fragment whose turn it is."""
        rounds, pushes = self.rounds, self._pushes
        sent = rounds.send()
        sent.rejected, sent.lr, sent.base = self._tally.rejected, lr, self._fetches.installed
        pushes.weight = rounds.weight(sent) if self.mode.weighs else None
        pushes.start(sent.differences, lr, sent.base)
        sent.started = True

    def _look(self) -> None:
        """Begins to fetch the version of what is under way if it is made, while the worker computes."""
        sent = self.rounds.under_way
        if sent is None or sent.landed or sent.flight is not None or not self._is_far:
            return
        if self._pushes.under_way_done:
            sent.flight = self._native.pull_async(sent.fragment.names, None, None)

    def _end(self) -> None:
        """Waits for the version of what is under way, and installs it."""
        try:
            self.land()
        except BaseException as error:
            self._install()
            if isinstance(error, FastpsError):
                with contextlib.suppress(FastpsError):  # the error is the one to see
                    self._take_up()
            raise
        self._install()
        self._take_up()

    def rest(self, wait: bool) -> bool | None:
        """Contributes all that no version has yet, each fragment in its turn.

        Returns:
            Whether a version is awaited still, for which `wait` waits; None: there was nothing.
        """
        self._pushes.note_lost(stacklevel=3)
        rounds = self.rounds
        if rounds.under_way is None and not rounds.next.steps:
            return None
        while rounds.under_way is not None or rounds.next.steps:
            if rounds.under_way is None:
                self._pushes.resume()
                rounds.check(self._params)
                self._send(None)
            if not wait and not self._together.ready(self.mode):
                return True
            self._end()
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
                self._together.end(self.mode, lambda: self._fetch(sent))
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

    def _take_up(self) -> None:
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

    def _send_again(self, sent: Exchange) -> None:
        """Pushes a difference once more, with the place that the worker has again.

        Slices that have made their version without it refuse it as late.
        """
        sent.rejected, sent.flight = self._tally.rejected, None
        self._pushes.resume()
        self._pushes.start(sent.differences, sent.lr, sent.base)
        self._pushes.turn()
        self._together.end(self.mode, lambda: self._fetch(sent))

    def _fetch(self, sent: Exchange) -> None:
        """Fetches the present version of a fragment."""
        names, begun = sent.fragment.names, self.rounds.begun
        if not self.mode.overlap:  # nothing was computed since it was sent
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues a saved round that fits, if the servers have the values that it began from."""
        self._fetches.now()
        self.start()
        steps, samples = self.rounds.load_state_dict(state)
        self._tally.steps -= steps
        self._tally.samples[1] += samples
