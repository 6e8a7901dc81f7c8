"""Learning rate schedulers that follow the steps of all workers together."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch.optim import lr_scheduler

from fastps._shared.checks import at_least, invalid
from fastps.errors import ConfigError
from fastps.torch._notes import note
from fastps.torch.optimizer import ParameterServerOptimizer

__all__ = ["GlobalSchedule"]

#: The note with the length of the run's schedule, in two numbers that float32 has exactly.
_NOTE, _DIGITS = "fastps.schedule", 1 << 20
#: Names of the lengths of torch's schedulers.
_LENGTHS = ("total_steps", "T_max", "total_iters")
#: Keys that they keep in the parameter groups.
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
#: Schedulers that treat all groups alike, except for their base rates.
_ALIKE = (
    lr_scheduler.ConstantLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.ExponentialLR,
    lr_scheduler.LambdaLR,
    lr_scheduler.LinearLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.StepLR,
)
_Kind = TypeVar("_Kind")


class GlobalSchedule(lr_scheduler.LRScheduler):
    """Makes a learning rate scheduler follow `ParameterServerOptimizer.global_step`.

    A scheduler counts its own worker's steps: with three workers, a cosine gets a third of the way on each.
    This one takes as many steps as there were gradients in the servers' steps, so all workers use the rate
    of the same point, also late and resumed ones; the scheduler's own state need not be saved. It follows
    `fastps.torch.resume`, ``load_state_dict``, ``push_model`` and ``pull_model`` at once. With
    `fastps.data.Portions`, a run takes ``len(portions) * epochs`` steps in every mode: a round of
    ``fastps.Sync(workers=n)`` and a push of ``fastps.Local(push_every=n)`` count as n.

    A group that ``add_param_group`` adds gets the rates that it would have, had it been there from the first
    step. Schedulers with settings for each group (`OneCycleLR`, `CyclicLR`, several functions, those of other
    libraries) refuse it.

    Trainers that expect an `LRScheduler` of torch (Lightning, accelerate, transformers) take this one.

    Args:
        scheduler: Of `torch.optim.lr_scheduler`, over a `ParameterServerOptimizer`; not `ReduceLROnPlateau`.
        length: Steps after which the rates stay constant. None: `OneCycleLR` keeps its last rate, others
            continue as torch defines.

    Raises:
        ConfigError: The scheduler is of another kind or of another optimizer, or was made before its last
            group was added, or another worker of this run has a schedule of another length.

    >>> import torch, fastps.torch
    >>> store, model = fastps.Store(), torch.nn.Linear(2, 1)
    >>> optimizer = fastps.torch.ParameterServerOptimizer(
    ...     model.named_parameters(), store, fastps.SGD(lr=1.0)
    ... )
    >>> cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
    >>> schedule = fastps.torch.GlobalSchedule(cosine)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(3, 2)).sum().backward()
    ...     optimizer.step()
    ...     schedule.step()
    >>> schedule.get_last_lr()
    [0.0]
    """

    optimizer: ParameterServerOptimizer

    def __init__(self, scheduler: Any, *, length: int | None = None) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, ParameterServerOptimizer):
            raise invalid("scheduler", "one over a fastps.torch.ParameterServerOptimizer", scheduler)
        if isinstance(scheduler, (lr_scheduler.ReduceLROnPlateau, GlobalSchedule)):
            raise invalid("scheduler", "one of torch that counts steps", type(scheduler).__name__)
        groups, own_groups = len(optimizer.param_groups), len(scheduler.get_last_lr())
        if own_groups != groups:
            raise ConfigError(
                "the scheduler was made before a group was added",
                expected=f"{groups} parameter groups",
                got=str(own_groups),
                advice="make it after add_param_group",
            )
        given = None if length is None else at_least(1, "length", length)
        own = [getattr(scheduler, name) for name in _LENGTHS if hasattr(scheduler, name)]
        lengths = own if given is None else [given]
        # Not the base's constructor, which begins another schedule.
        self._scheduler, self.optimizer = scheduler, optimizer
        mode = optimizer.mode
        #: Gradients of a step, and the steps of a warm start, which have one.
        self._each = mode.after_warm_up.least_workers * mode.after_warm_up.push_every
        self._alone = mode.warm_up_steps
        ends = lengths[:1] if self._each > 1 else [] if given is None else [given]
        if hasattr(scheduler, "total_steps"):  # its rate of the step after the last one may be negative
            ends.append(scheduler.total_steps - 1)
        self._end: int | None = min(ends, default=None)
        if lengths:
            self._agree(int(lengths[0]))
        optimizer._opt_called = True  # type: ignore[attr-defined] # torch would warn of a late worker
        self.last_epoch = self._first = _steps_of(scheduler)
        self._begin()
        self.base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        #: The scheduler and the groups' rates before the first step that this one takes.
        self._before = self._copied((scheduler.state_dict(), self._rates()))
        self.step()
        optimizer._schedule = self

    def step(self, epoch: int | None = None) -> None:
        """Takes as many steps as there were gradients since the last call; call it after each step.

        Args:
            epoch: None: the servers have the number of the step.
        """
        if epoch is not None:
            raise invalid("epoch", "None, as the schedule follows the steps of the servers", epoch)
        steps = self.optimizer.global_step
        target = steps + max(0, steps - self._alone) * (self._each - 1)
        if self._end is not None:
            target = min(target, self._end)
        if target < self.last_epoch and self.last_epoch > self._first:
            self._go_back()
        while self.last_epoch < target:
            self.last_epoch += 1
            self._scheduler.step()
        self._step_count = self.last_epoch + 1

    def state_dict(self) -> dict[str, Any]:
        """The step and the rates, for whom a checkpoint tells them; nothing needs them."""
        rates = self.get_last_lr()
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count, "_last_lr": rates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002 torch's argument
        """Takes the rates of the servers' step: that of `state_dict` may be another one."""
        self._follow()

    def _check_addition(self) -> None:
        """Raises unless a parameter group can be added."""
        for part in _parts(self._scheduler):
            functions = getattr(part, "lr_lambdas", [])
            if type(part) not in _ALIKE or any(f is not functions[0] for f in functions) or self._first:
                expected, got = "one that begins at step 0 and treats all groups alike", type(part).__name__
                raise ConfigError(
                    "a parameter group cannot be added, because its rates are not clear from the scheduler",
                    expected=expected,
                    got=got,
                    advice="give the optimizer all groups before the scheduler is made, and call "
                    "requires_grad_(False) for those that are not trained yet",
                )

    def _add(self, group: dict[str, Any]) -> None:
        """Gives a new parameter group the rates it would have, had it been there from the start."""
        self._go_back()
        base = group.setdefault("initial_lr", group["lr"])
        others = self.optimizer.param_groups[:-1]
        shares = (float(other["lr"]) / float(other["initial_lr"]) for other in others if other["initial_lr"])
        group["lr"] = base * next(shares, 1.0)
        self.base_lrs.append(base)
        for part in _parts(self._scheduler):
            part.base_lrs.append(base)
            if hasattr(part, "lr_lambdas"):
                part.lr_lambdas.append(part.lr_lambdas[0])
        self._before = self._copied((self._scheduler.state_dict(), self._rates()))
        self.step()

    def _follow(self) -> None:
        """Gives the groups the rates of the present step, whatever they have: after a resume."""
        self._go_back()
        self.step()

    def _go_back(self) -> None:
        """Undoes all steps: most schedulers continue from the groups' rates, and none goes back."""
        state, rates = self._copied(self._before)
        self._scheduler.load_state_dict(state)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            group.update(rate)
        self.last_epoch = self._first

    def _copied(self, what: _Kind) -> _Kind:
        """A copy that shares nothing but the optimizer, which cannot be copied."""
        return copy.deepcopy(what, {id(self.optimizer): self.optimizer})

    def _rates(self) -> list[dict[str, Any]]:
        """The schedulers' entries of the parameter groups."""
        groups = self.optimizer.param_groups
        return [{name: group[name] for name in _RATES if name in group} for group in groups]

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The current rates, one number per parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    get_lr = get_last_lr

    def _agree(self, length: int) -> None:
        """Raises if another worker of this run has a schedule of another length."""
        optimizer, (high, low) = self.optimizer, divmod(length, _DIGITS)
        tensor = optimizer._held.note_of(_NOTE)
        high, low = map(int, note(optimizer._held.ps, tensor, [float(high), float(low)]))
        theirs = high * _DIGITS + low
        if theirs != length:
            raise ConfigError(
                "schedules of one run must be equally long",
                expected=f"{theirs} steps, as another worker has",
                got=f"{length} steps",
                advice=f"to begin a schedule of another length, call ps.unregister({tensor!r}) while no "
                "worker trains",
            )

    def _begin(self) -> None:
        """Gives the groups the rates of the scheduler's step: most schedulers continue from those."""
        scheduler, groups = self._scheduler, self.optimizer.param_groups
        chained = isinstance(scheduler, lr_scheduler.ChainedScheduler)
        parts = scheduler._schedulers if chained else [scheduler]
        new = self.last_epoch == 0 and all(hasattr(part, "base_lrs") for part in parts)
        for group, rate in zip(groups, parts[0].base_lrs if new else scheduler.get_last_lr(), strict=True):
            group["lr"] = self._copied(rate)
        for part in parts if new else ():
            part.last_epoch = -1
            part._initial_step()
        if chained:
            scheduler._last_lr = self.get_last_lr()


def _parts(scheduler: Any) -> list[Any]:
    """The schedulers that a scheduler consists of."""
    if not isinstance(scheduler, (lr_scheduler.ChainedScheduler, lr_scheduler.SequentialLR)):
        return [scheduler]
    return [part for own in scheduler._schedulers for part in _parts(own)]


def _steps_of(scheduler: Any) -> int:
    """The steps that a scheduler has taken."""
    if isinstance(scheduler, lr_scheduler.ChainedScheduler):
        return _steps_of(scheduler._schedulers[0])
    return int(getattr(scheduler, "last_epoch", 0))
