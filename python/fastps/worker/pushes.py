"""A worker's pushes: sends gradients, waits for their outcome, and keeps what was not applied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fastps import _fastps
from fastps._fastps import Encoded, ErrorFeedback, Sparse, Versions
from fastps._shared.checks import words
from fastps._shared.handles import Receipts
from fastps._shared.lost import warn_of
from fastps._shared.text import hint, quoted
from fastps._shared.types import Array, Rates
from fastps.codecs import Codec, Float32
from fastps.errors import (
    ConfigError,
    DTypeError,
    FastpsError,
    FrameError,
    LeaseError,
    Lost,
    NonFiniteError,
    PartialPush,
    ShapeError,
    StalePush,
)
from fastps.modes import Mode
from fastps.worker.gradients import Gradient, Gradients, check, finite
from fastps.worker.tally import Tally
from fastps.worker.unapplied import Returned, Unapplied, overflowed

__all__ = ["LISTS", "Elsewhere", "Noted", "Pushes", "Refused"]

#: Maximum number of bound lists, one for each set of tensors that was pushed or stepped locally.
LISTS = 32

#: The gradients themselves are invalid: nothing was sent or changed.
Refused = (NonFiniteError, ShapeError, DTypeError, ConfigError, FrameError)


@dataclass(frozen=True, eq=False)
class Noted:
    """A push, and the gradients that it reads.

    It is noted before it begins. An exception may arrive between any two instructions (Ctrl-C, the handler of
    a signal), and only `flight` knows whether the first frame has left by then.
    """

    gradients: dict[str, Any]
    flight: _fastps.PushFlight = field(default_factory=_fastps.PushFlight)

    def has(self, kind: type) -> bool:
        """Returns whether it sends gradients of this kind: rows, which no codec encodes, or encoded ones."""
        return any(isinstance(gradient, kind) for gradient in self.gradients.values())


class Elsewhere(Protocol):
    """Residuals of gradients that an adapter encodes."""

    def taken(self, name: str) -> None:
        """The last gradient of a tensor was sent, or waits in the sum: its residual is that after it."""

    def state_dict(self) -> dict[str, Array]: ...
    def take(self, residuals: dict[str, Array]) -> None: ...


class _Planned(NamedTuple):
    """A push to be made: gradients of one kind and one rate; whole ones are bound."""

    gradients: dict[str, Any]
    settings: _fastps.PushSettings
    bound: _fastps.BoundList | None


class _Batch:
    """The gradients of one step until they are sent: a push commits its own, a refusal rolls the rest back.

    Args:
        grads: The step's, by name. Of a tensor with None only what waits in the sum is pushed.
        waiting: The sum, which some of the gradients join.
        base: The versions that they were computed at.
        taken: Called with each gradient that is sent, dropped for its staleness, or kept in the sum.

    Attributes:
        pushes: The pushes, each noted before it begins.
        refused: Tensors of the push that was refused, whose gradients are invalid.
    """

    def __init__(
        self,
        grads: Mapping[str, Any],
        waiting: Gradients,
        base: Versions | None,
        taken: Callable[[str, Any], None],
    ) -> None:
        self._sum, self._base, self._taken = waiting, base, taken
        self._rest = {name: gradient for name, gradient in grads.items() if gradient is not None}
        #: Contents of the sum, before the gradients joined it, by tensor.
        self._undo: dict[str, Gradient | None] = {}
        self.pushes: list[Noted] = []
        self.refused: set[str] = set()

    def join_sum(self, in_place: Callable[[Any], bool]) -> None:
        """Moves into the sum the gradients that cannot be sent from where they are."""
        for name, gradient in self._rest.items():
            if name in self._sum.waiting or not in_place(gradient):
                self._undo[name] = self._sum.kept(name)
                self._sum.add(name, gradient, self._base)

    @property
    def joined(self) -> list[str]:
        """The tensors whose gradients have joined others that waited."""
        return [name for name, waited in self._undo.items() if waited is not None]

    @property
    def outside(self) -> set[str]:
        """The tensors whose gradients have not joined the sum."""
        return self._rest.keys() - self._undo.keys()

    def commit(self, names: Iterable[str]) -> None:
        """Keeps these gradients out of the sum: they are sent, or dropped for their staleness."""
        for name in names:
            self._undo.pop(name, None)
            if name in self._rest:
                self._taken(name, self._rest.pop(name))

    def commit_begun(self) -> bool:
        """Commits the gradients that were sent; returns whether there are any."""
        begun = [push for push in self.pushes if push.flight.begun]
        for push in begun:
            self.commit(push.gradients)
        return bool(begun)

    def roll_back(self) -> None:
        """Takes the gradients that were not committed out of the sum again."""
        self._sum.undo(self._undo)

    def keep(self) -> None:
        """Adds to the sum what was neither committed nor refused; after `roll_back`."""
        for name, gradient in self._rest.items():
            if name not in self.refused:
                self._sum.add(name, gradient, self._base)
                self._taken(name, gradient)


class Pushes:
    """Sends a worker's gradients, and keeps unapplied ones for the next push.

    Each `base` has the versions that gradients were computed at.

    Args:
        native: The worker's own client.
        params: Names to the worker's arrays; more may come.
        codec: How gradients are encoded.
        accumulate: Steps per push.
        tally: Counts pushes.

    Attributes:
        every: Steps per push in the present mode.
        in_one_call: A step's gradients may be encoded and pushed from the caller's arrays in one call.
        direct: Gradients are read from the caller's arrays.
        refused: The last call of `start` took nothing.
        weight: Weight of the next gradients in the mean of their version; None: 1.
        note: What the next gradients came from; None: nothing.
        lr: The rate of the last step, for what `flush` pushes.
    """

    def __init__(
        self, native: _fastps.Client, params: Mapping[str, Array], codec: Codec, accumulate: int, tally: Tally
    ) -> None:
        self._native = native
        self._params = params
        self._codec = codec
        self._feedback = None if isinstance(codec, Float32) else ErrorFeedback()
        self._accumulate = accumulate
        self._tally = tally
        # One sum is filled while the other is being pushed.
        self._sums = [Gradients(params) for _ in range(2)]
        self._lists: list[dict[tuple[str, ...], _fastps.BoundList]] = [{}, {}]
        self._filling = 0  # which sum
        self._pushed: int | None = None  # which sum pushes were last taken from
        self._begun: set[str] = set()
        self._under_way: list[Noted] = []
        #: The push that failed last and its unapplied gradients, until the sum has them.
        self._returned: tuple[Noted | None, Returned] | None = None
        self._unapplied = Unapplied(params, tally, self._feedback is not None, native.timeout)
        self._doubts = self._unapplied.doubts
        #: Keeps residuals of gradients that arrive encoded; None: no one does.
        self.elsewhere: Elsewhere | None = None
        self.refused = False
        self.weight: float | None = None
        self.note: str | None = None
        self.lr: Rates = None

    def follow(self, mode: Mode) -> None:
        """Continues with a mode."""
        self._mode = mode
        self._unapplied.follow(mode)
        local = mode.local_lr is not None
        self.every = mode.push_every if local else self._accumulate
        stays = not mode.overlap or mode.takes_values  # whose differences have memory of their own
        self.in_one_call = not local and stays and self.every == 1
        self.direct = self._feedback is None and self.in_one_call

    @property
    def sum(self) -> Gradients:
        """The sum that the next push takes."""
        return self._sums[self._filling]

    @property
    def encoding(self) -> tuple[Codec | None, ErrorFeedback | None]:
        """How gradients are encoded; None: not at all."""
        return (None, None) if self._feedback is None else (self._codec, self._feedback)

    @property
    def keeps_residuals(self) -> bool:
        """True if its codec is lossy."""
        return self._feedback is not None

    @property
    def idle(self) -> bool:
        """True if nothing waits, is in progress, interrupted or in doubt."""
        one, other = self._sums
        busy = self._under_way or self._returned or self._doubts or self.has_begun
        return not (busy or one.waiting or other.waiting or one.moving or other.moving)

    @property
    def has_begun(self) -> bool:
        """True if part of the next step was pushed; `turn` ends this with a single assignment."""
        return self._pushed == self._filling

    @property
    def under_way_done(self) -> bool:
        """True if no push is in progress."""
        return all(push.flight.done() for push in self._under_way if push.flight.begun)

    @property
    def names_under_way(self) -> list[str]:
        """The tensors of the pushes in progress."""
        return list({name: None for push in self._under_way for name in push.gradients})

    # -- sending ---------------------------------------------------------------------------------------------

    def check_names(self, grads: Mapping[str, Any]) -> None:
        """Raises if there is a gradient of an unknown tensor."""
        unknown = grads.keys() - self._params.keys()
        if unknown:
            name = words("name", min(unknown, key=str))
            raise ConfigError(
                "the worker has no such tensor",
                tensor=name,
                expected=f"names from {quoted(self._params)}",
                got=f'"{name}"',
                advice=hint(name, self._params),
            )

    def check(self, grads: Mapping[str, Any], lr: Rates) -> None:
        """Raises if a step's gradients are invalid, before one is kept or sent."""
        self.check_names(grads)
        twice = grads.keys() & self._begun
        if twice:
            name = min(twice)
            raise ConfigError(
                "a second gradient in one step",
                tensor=name,
                expected="one gradient",
                got="another one by begin() before",
            )
        # A single push from the caller's arrays checks all of them itself before it sends the first.
        back = self.sum.waiting or self._doubts
        apart = any(isinstance(g, (Encoded, Sparse)) for g in grads.values())
        if back or apart or isinstance(lr, Mapping) or not self.direct:
            for name, gradient in grads.items():
                check(name, gradient, self._params[name], self._native.check_finite)

    def add(self, grads: Mapping[str, Any], base: Versions | None) -> None:
        """Adds a step's gradients to the sum."""
        for name, gradient in grads.items():
            self.sum.add(name, gradient, base)
            self._taken(name, gradient)

    def _taken(self, name: str, gradient: Any) -> None:
        if self.elsewhere is not None and isinstance(gradient, Encoded):
            self.elsewhere.taken(name)

    def begin(self, grads: Mapping[str, Any], lr: Rates, base: Versions | None, pushing: bool) -> None:
        """Starts to push some gradients of the next step, or adds them to the sum if that does not push."""
        self.resume()
        self.check(grads, lr)
        if pushing:
            self.start(grads, lr, base)
        else:
            self.add(grads, base)
        self._begun.update(grads)

    def start(self, grads: Mapping[str, Any], lr: Rates, base: Versions | None) -> None:
        """Starts to push gradients, each with what waits of its tensor; None pushes only what waits.

        Unsent gradients join the next push, unless the error is `Refused`: then the sum is unchanged. A push
        before this one may fail with the same errors, and refuses nothing of it.
        """
        self.refused = own = False
        batch = _Batch(grads, self.sum, base, self._taken)
        try:
            self._end_the_last()
            own = True
            batch.join_sum(self._is_sent_in_place)
            pushes = self._plan(grads, lr, base)
            if len(pushes) > 1:
                self._check_sums(batch.joined)
            for push in pushes:
                self._send(push, batch)
            batch.commit(grads)
        except BaseException as error:
            self._repair()
            begun = batch.commit_begun()
            self._leave_the_sum()
            self.refused = own and not begun and isinstance(error, Refused)
            self._recover(error, batch)
            raise
        self.sum.local_steps = 0

    def about_to_push(self, gradients: dict[str, Any]) -> Noted:
        """Notes a push that is about to be made; the next call of `finish` waits for it if it has begun."""
        push = Noted(dict(gradients))
        self._under_way.append(push)
        return push

    def forget_unsent(self) -> None:
        """Forgets pushes that were noted and have not begun."""
        self._under_way = [push for push in self._under_way if push.flight.begun]

    def acknowledge(
        self, names: tuple[str, ...], native: _fastps.Receipts, push: Noted | None = None
    ) -> None:
        """Counts the receipts of a push of whole gradients, which may have been noted."""
        if push is not None:
            self._under_way.remove(push)
        receipts = Receipts(native)
        self._tally.acknowledge(names, receipts)
        if self._feedback is not None:
            self._tally.bytes_saved += 4 * sum(self._params[n].size for n in names) - receipts.bytes

    def _end_the_last(self) -> None:
        """Waits for the pushes of earlier steps, unless this step has begun already."""
        if not self.has_begun:
            self.finish()
            # While part of a gradient may still join a version, no second one for that version follows.
            self._doubts.settle(self.sum, wait=self._mode.waits_for_others)
            self._pushed = self._filling

    def _is_sent_in_place(self, gradient: Any) -> bool:
        """Returns whether a gradient is sent from its own memory: some kinds always, whatever the codec."""
        return self.direct or (self.every == 1 and isinstance(gradient, (Encoded, Sparse)))

    def _plan(self, grads: Mapping[str, Any], lr: Rates, base: Versions | None) -> list[_Planned]:
        """The pushes of a step: one for each rate, and for rows, encoded and whole gradients."""
        waiting = self.sum
        ready = {n: waiting.waiting.get(n, g) for n, g in grads.items()}
        summed = not self._mode.waits_for_others and ready.keys() & waiting.waiting.keys()
        oldest = waiting.base if summed else base
        scale = None if self._accumulate == 1 else 1.0 / self._accumulate
        pushes: list[_Planned] = []
        for rate, part_of in _by_rate(ready, lr):
            settings = _fastps.PushSettings(
                None, rate, scale, oldest, None, self._mode.correction, self.weight, self.note
            )
            rows = {n: g for n, g in part_of.items() if isinstance(g, Sparse)}
            encoded = {n: g for n, g in part_of.items() if isinstance(g, Encoded)}
            whole = {n: g for n, g in part_of.items() if not isinstance(g, (Encoded, Sparse))}
            if rows:  # first, since not every optimizer takes them
                pushes.insert(0, _Planned(rows, settings, None))
            if encoded:
                pushes.append(_Planned(encoded, settings, self._native.bind(encoded, None, None, None)))
            if whole:
                pushes.append(_Planned(whole, settings, self._bind(whole)))
        return pushes

    def _check_sums(self, names: Iterable[str]) -> None:
        """Raises if a sum would be refused, before any of several pushes is sent."""
        for name in names:
            check(name, self.sum.waiting[name], self._params[name], self._native.check_finite)

    def _send(self, planned: _Planned, batch: _Batch) -> None:
        """Sends gradients of one kind: whole ones, which are bound, or rows. They leave the sum."""
        some, settings, bound = planned
        push = Noted(some)
        batch.pushes.append(push)
        self._under_way.append(push)
        # With `Sync`, the version of each slice waits for the rows of every worker, even if there are none.
        every_slice = bound is None and self._mode.shares_versions
        what = some if bound is None else bound
        try:
            self._native.push_async(what, settings, False, every_slice, push.flight)
        except StalePush as error:  # no slice has taken it
            batch.commit(some)
            self.sum.drop(some)
            self.not_applied(some, error)
        except Refused:
            batch.refused.update(some)
            raise
        self._leave_the_sum()
        if bound is None and push.flight.begun and not every_slice:  # the rows are the caller's
            failed = self._end(push)
            if failed is not None:
                raise failed

    def _leave_the_sum(self) -> None:
        """Takes gradients that were sent from the sum, and forgets pushes that have not begun."""
        waiting = self.sum.waiting
        for push in self._under_way:
            if push.flight.begun:
                for name in [name for name, sent in push.gradients.items() if waiting.get(name) is sent]:
                    del waiting[name]
        self.forget_unsent()

    def _recover(self, error: BaseException, batch: _Batch) -> None:
        """Keeps what was neither sent nor refused; nothing if the whole step was refused."""
        batch.roll_back()
        if isinstance(error, NonFiniteError) and (self.refused or batch.refused):
            self._drop_broken(error, batch.outside)
        if self.refused:
            self.let_go()
        elif self._mode.shares_versions:  # the next gradient is of another version
            self.sum.drop(self.sum.waiting)
        else:
            batch.keep()

    def let_go(self) -> None:
        """After a refused step: stops reading the caller's arrays that `begin` was given."""
        if self.has_begun:
            # The refusal is raised, and what failed returns to the sum.
            with contextlib.suppress(FastpsError):
                self.finish()
            self._pushed = self._filling if self._begun else None

    def _drop_broken(self, error: NonFiniteError, own: set[str]) -> None:
        """Drops sums that no server would accept: not finite, or of which a step overflows.

        Args:
            error: The refusal.
            own: Tensors of the step's gradients that are not in a sum.
        """
        overflowing = overflowed(error)
        given = overflowing - own
        broken = [n for n, gradient in self.sum.waiting.items() if n in given or not finite(gradient)]
        self.sum.drop(broken)
        self._tally.rejected += bool(broken or overflowing)

    def _bind(self, whole: dict[str, Any]) -> _fastps.BoundList:
        if self.direct:  # the arrays differ at every step
            return self._native.bind(whole, None, None, None)
        names, lists = tuple(whole), self._lists[self._filling]
        if names not in lists:
            if len(lists) >= LISTS:
                lists.clear()
            lists[names] = self._native.bind(whole, self._codec, self._feedback, None)
        return lists[names]

    def resume(self) -> None:
        """Ends a step that an exception has left before it turned, before gradients of the next one come."""
        if not self._begun:
            self.turn()

    def turn(self) -> None:
        """Switches to the other sum while this one is being pushed, and completes what was interrupted."""
        self._repair()
        self._begun.clear()
        if self.has_begun:
            self._leave_the_sum()
            self._filling = 1 - self._filling
        self.sum.take_over(self._sums[1 - self._filling])

    # -- outcomes --------------------------------------------------------------------------------------------

    def finish(self, wait: Callable[[_fastps.PushFlight], _fastps.Receipts | None] | None = None) -> None:
        """Waits for the pushes in progress; `wait` waits for one of them, instead of the push itself."""
        self._repair()
        self._leave_the_sum()
        failed: FastpsError | None = None
        while self._under_way:
            raised = self._end(self._under_way[0], wait)
            failed = failed or raised
        if failed is not None:
            raise failed

    def _end(
        self, push: Noted, wait: Callable[[_fastps.PushFlight], _fastps.Receipts | None] | None = None
    ) -> FastpsError | None:
        """Waits for a push; returns its error, unless slices were too stale and nothing else failed."""
        try:
            native = push.flight.wait(None) if wait is None else wait(push.flight)
        except FastpsError as error:
            return self._take_back(push, self._unapplied.of(push.gradients, error))
        assert native is not None
        self._under_way.remove(push)
        receipts = Receipts(native)
        self._tally.acknowledge(tuple(push.gradients), receipts)
        if (self._feedback is not None or push.has(Encoded)) and not push.has(Sparse):
            plain = 4 * sum(self._params[n].size for n in push.gradients)
            self._tally.bytes_saved += plain - receipts.bytes
        return None

    def rest(self) -> None:
        """Waits until nothing is in progress or in doubt."""
        self.turn()
        self.finish()
        self._doubts.settle(self.sum, wait=True)

    def flush(self, base: Versions | None) -> None:
        """Pushes what waits, and waits until nothing is in progress or in doubt."""
        self.rest()
        if self.sum.waiting:
            try:
                self.start(dict.fromkeys(self.sum.waiting), self.lr, base)
            finally:
                self.turn()
            self.rest()

    def not_applied(
        self, gradients: dict[str, Any], error: FastpsError, push: Noted | None = None
    ) -> FastpsError | None:
        """Keeps what a failed push, which may have been noted, has not applied.

        Returns:
            The error; None if slices were too stale and nothing else failed.
        """
        return self._take_back(push, self._unapplied.of(gradients, error))

    def _take_back(self, push: Noted | None, returned: Returned) -> FastpsError | None:
        """Adds unapplied gradients to the sum; `_repair` completes it after an interruption."""
        self._returned = push, returned
        self._under_way = [other for other in self._under_way if other is not push]
        while returned.refused:
            self.sum.take_first(returned.refused, returned.refused[0][0])
        self._doubts.add(returned.in_doubt)
        self._returned = None
        return returned.error

    def _repair(self) -> None:
        """Completes moves that an exception has interrupted, so that each gradient is in one place."""
        for one in self._sums:
            one.repair()
        if self._returned is not None:
            self._take_back(*self._returned)

    def note_lost(self, stacklevel: int) -> None:
        """Counts what restarted servers lost, and warns of it: training goes on without these pushes."""
        lost = [Lost._make(fields) for fields in self._native.lost()]
        self._tally.lose(lost)
        warn_of(lost, "worker", stacklevel=stacklevel + 1)

    def is_fenced(self, error: LeaseError | PartialPush) -> bool:
        """Returns whether a server has dropped this worker."""
        return self._unapplied.is_fenced(error)

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies of the waiting gradients and residuals, for `Worker.state_dict`."""
        residuals = {} if self._feedback is None else self._feedback.state_dict()
        if self.elsewhere is not None:
            for name, residual in self.elsewhere.state_dict().items():
                residuals[name] = residuals.get(name, 0.0) + residual
        return {**self.sum.state_dict(), "residuals": residuals}

    def forget(self) -> None:
        """Drops waiting gradients and residuals."""
        self.load_state_dict({"sum": {}, "residuals": {}, "summed": 0})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict` that fits these parameters."""
        self.sum.load_state_dict(state)
        residuals = dict(state["residuals"])
        if self.elsewhere is not None:
            self.elsewhere.take(residuals)
        if self._feedback is not None:
            self._feedback.load_state_dict(residuals)


def _by_rate(ready: dict[str, Any], lr: Rates) -> Iterable[tuple[float | None, dict[str, Any]]]:
    """Gradients by their learning rate, of which a push has one."""
    if not isinstance(lr, Mapping):
        return [(lr, ready)] if ready else []
    parts: dict[float | None, dict[str, Any]] = {}
    for name, gradient in ready.items():
        parts.setdefault(lr.get(name), {})[name] = gradient
    return parts.items()
