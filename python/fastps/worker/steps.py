"""Steps whose gradients are pushed, and whose values are fetched, as a mode defines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from fastps._shared.text import quoted
from fastps._shared.types import Rates
from fastps.errors import ConfigError
from fastps.modes import Mode
from fastps.worker.arguments import check_given, check_mapping
from fastps.worker.common import Common
from fastps.worker.local import LocalStepper
from fastps.worker.one_call import OneCall
from fastps.worker.pushes import Refused
from fastps.worker.run.ramp import Ramp
from fastps.worker.run.warm_up import WarmUp
from fastps.worker.tally import NOTHING

__all__ = ["Steps"]


class Steps:
    """Executes all modes but `fastps.DiLoCo`, whose steps `Exchanges` takes.

    Args:
        common: The parts of the worker.
        mode: Its mode.
        accumulate: Steps per push and per fetch, unless these are local.
        warm_up, ramp: What the worker waits for before its first step.

    Attributes:
        mode: The mode of the present steps, from `start` on.
    """

    rounds: ClassVar[None] = None

    def __init__(self, common: Common, mode: Mode, accumulate: int, warm_up: WarmUp, ramp: Ramp) -> None:
        native, self._params, self._pushes, self._fetches, self._together, self._tally = common
        self._looks, self._accumulate, self._exchanges = native.check_finite, accumulate, mode.exchanges
        self._warm_up, self._ramp = warm_up, ramp
        self._one_call = OneCall(common)
        #: Samples of the steps since the last push.
        self._samples = 0.0
        self.mode = mode

    def start(self) -> None:
        """Prepares for the first step, at the values that were fetched."""
        self._follow()
        self._bind()

    def _follow(self) -> None:
        """Continues with the mode that the warm start leaves the worker now."""
        self.mode = mode = self._warm_up.mode
        self._pushes.follow(mode)
        self._pull_every = self._accumulate
        self._local: LocalStepper | None = None
        if mode.local_lr is not None:
            self._pull_every = mode.pull_every
            self._local = LocalStepper(self._params, self._pushes, mode.local_lr, self._looks)
        self._one_call.drop()

    def _bind(self) -> None:
        """Prepares steps of one call, where the mode and the codec have them."""
        if self._pushes.in_one_call and self._exchanges and not self._ramp.waits:
            self._one_call.bind()

    def added(self) -> None:
        """Takes up parameters that were added; all are fetched, unless that would undo local steps."""
        self._bind()
        if self._local is not None:
            self._local.refresh()
        else:
            self._fetches.restart()  # those under way know no versions of the new ones

    def restart(self) -> None:
        """Fetches anew."""
        self._fetches.restart()

    def land(self) -> None:
        """Nothing is sent that only a later step installs."""

    def close(self) -> None:
        """Lets go of the arrays."""
        self._one_call.drop()

    # -- one step --------------------------------------------------------------------------------------------

    def step(
        self,
        grads: Any,
        samples: Any,
        lr: Rates,
        note: str | None,
        convert: Callable[[], Mapping[str, Any]] | None = None,
        threads: int = 0,
    ) -> None:
        """Takes a step; arguments as for `Worker.step` and `Worker.take`."""
        self._fetches.watched.check()
        has_samples = samples is not None or self._samples
        if not has_samples and self._one_call.step(grads, lr, self.mode, note, threads):
            return
        self._in_several_calls(grads if convert is None else convert(), samples or 0.0, lr, note)
        if self._warm_up.stepped():
            self._follow()

    def _in_several_calls(
        self, grads: Mapping[str, Any], samples: float, lr: Rates, note: str | None
    ) -> None:
        self._check_may_push(grads)
        self._together.begin()
        self._tally.acknowledged = NOTHING
        k, pushes = self._tally.steps + 1, self._pushes
        pushes.resume()
        pushing, fetching = k % pushes.every == 0, k % self._pull_every == 0
        if self._local is not None:
            self._local.step(grads, self._fetches.installed)
            grads = {}
        else:
            try:
                pushes.check(grads, lr)
            except Refused:
                pushes.let_go()
                raise
            if not pushing:
                pushes.add(grads, self._fetches.installed)
        self._tally.steps, pushes.lr = k, lr
        if pushing or fetching:
            pushes.note_lost(stacklevel=5)
        behind, counts, rejected = self._samples + samples, False, self._tally.rejected
        try:
            if pushing:
                pushes.weight = behind if behind and self.mode.weighs else None
                pushes.note = note
                pushes.start({**dict.fromkeys(pushes.sum.waiting), **grads}, lr, self._fetches.installed)
                counts = True
        finally:
            pushes.note = None
            if pushing and pushes.refused and self._local is None:
                self._tally.steps -= 1
            else:
                self._samples = 0.0 if pushing else behind
                pushes.turn()
                try:
                    self._exchange(k, fetching)
                    counts = counts and self._tally.rejected == rejected
                except BaseException:
                    counts = False
                    raise
                finally:
                    self._tally.samples[not counts] += behind if pushing else 0.0

    def _exchange(self, k: int, fetching: bool) -> None:
        """Ends step k: waits for what the mode waits for, and fetches."""
        if self.mode.waits_for_others:
            if fetching:
                self._together.end(self.mode)
            return
        if not self.mode.overlap:
            try:
                if fetching:  # follows the push on the same connection, so the values contain it
                    self._fetches.now()
            finally:
                self._pushes.finish()
            return
        if fetching:
            self._fetches.start(k + self._pull_every)
        self._fetches.install(k)

    def begin(self, grads: Any, samples: Any, lr: Rates) -> None:
        """Starts to push some gradients of the next step."""
        self._check_may_push(grads)
        self._fetches.watched.check()
        behind = self._samples + (samples or 0.0)
        self._pushes.weight = behind if behind and self.mode.weighs else None
        pushing = (self._tally.steps + 1) % self._pushes.every == 0
        self._pushes.begin(grads, lr, self._fetches.installed, pushing)
        self._samples = behind

    def ready(self) -> bool:
        """Returns whether the worker may take steps, and the next one ends without a wait. Never waits."""
        return self._has_begun() and (not self.mode.waits_for_others or self._together.ready(self.mode))

    def _has_begun(self) -> bool:
        if self._warm_up.waits:
            if not self._warm_up.ended():
                return False
            self._follow()
            self._fetches.now()
            if not self._warm_up.alone:
                self._ramp.begin(wait=False)
        if self._ramp.waits:
            if not self._ramp.ended():
                return False
            self._fetches.now()
            self._bind()
        return True

    def _check_may_push(self, grads: Mapping[str, Any]) -> None:
        """Raises if no gradient may be pushed now, or `grads` is not a mapping."""
        self._together.check_open()
        check_mapping("gradients", "gradients", grads)
        check_given(grads)
        if not self._has_begun():
            raise ConfigError(
                "the warm start is not over" if self._warm_up.waits else "this worker's turn has not come",
                expected="a worker whose ready() is True",
                got="one that waits",
                advice="call ready() until it returns True",
            )
        if self._together.reported and grads:
            raise ConfigError(
                "ready() has ended the gradients of this step",
                expected="step({})",
                got=f"gradients of {quoted(sorted(grads))}",
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the values of a state that fits: those saved of local steps, else the servers'."""
        if self._local is None:
            self._fetches.now()
        for name, values in state["params"].items():
            self._params[name][...] = values
