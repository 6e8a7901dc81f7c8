"""A torch optimizer whose parameters, state and steps live in a parameter server."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import torch
from torch.optim import optimizer as base

from fastps import optim
from fastps._shared.checks import at_least, invalid, number
from fastps._shared.types import Array
from fastps.codecs import Codec, Float32
from fastps.engines import own_rank
from fastps.errors import ConfigError, FastpsError
from fastps.modes import Mode
from fastps.parameter_server import ParameterServer, check_ps
from fastps.store import Store
from fastps.torch._arguments import check_buffers, check_optimizer, checked, checked_dtype, mode_of
from fastps.torch._averaged import warn_if_averaged
from fastps.torch._bodies import Bodies, Residuals
from fastps.torch._duplicates import check_memory, warn_of_other_names
from fastps.torch._file import steps_of
from fastps.torch._params import (
    Entry,
    Filled,
    Gpus,
    absent,
    as_lr,
    by_name,
    check_unchanged,
    rule_of_group,
    settings_of,
)
from fastps.torch.buffers import Buffers, Way
from fastps.torch.encode import Encoded
from fastps.torch.optimizer_state import OptimizerState, arrays_of, is_of_one_worker
from fastps.torch.seeds import state as random_state
from fastps.torch.step.ahead import Ahead, hooks_of
from fastps.torch.step.groups import check_group
from fastps.worker import Step, Worker
from fastps.worker.halves import Halves, computes
from fastps.worker.run.others import Others

_log = logging.getLogger("fastps")
#: Hooks of all optimizers. If this torch keeps them elsewhere, every step takes the hooked path.
_HOOKS_OF_ALL = [getattr(base, f"_global_optimizer_{when}_hooks", True) for when in ("pre", "post")]
#: Optimizers that may be open.
_MADE: weakref.WeakSet[ParameterServerOptimizer] = weakref.WeakSet()
#: How to go on where a trainer loads a model and then its optimizer.
_TRAINERS = (
    "; where a trainer does the loading, call fastps.torch.resume() before training instead, and give its "
    "rate finder a model with an optimizer of torch"
)
_NO_GRADIENT = (
    "no parameter has a gradient, so this step pushed nothing. If the model's parameters were replaced "
    "(load_state_dict(assign=True), new layers), make a new optimizer of the present ones"
)


class _Schedule(Protocol):
    """Sets the rates of the parameter groups: a `GlobalSchedule`."""

    def _follow(self) -> None: ...
    def _check_addition(self) -> None: ...
    def _add(self, group: dict[str, Any]) -> None: ...


class ParameterServerOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` that pushes gradients to a parameter server and pulls the parameters from it.

    The server runs the optimizer and keeps its state. Parameters that it does not have yet are registered
    with the model's values: those of the first worker win, and the others start from them. ``step()`` pushes
    ``.grad`` with the group's current ``lr``, so learning rate schedulers work as usual.

    Args:
        params: ``model.named_parameters()``, or groups of it: ``[{"params": [(name, tensor), ...],
            "lr": 0.1}, ...]``. A group may override every setting of `optimizer`. The server has
            the same names, without torch.compile's ``_orig_mod.``.
        ps: `fastps.Store` or what `fastps.connect` returns.
        optimizer: Such as ``fastps.Adam(lr=1e-3)``. After the first step of a group only its ``lr`` may
            change.
        mode: As for `fastps.Worker`; `fastps.Async` if none is given.
        codec: The encoding of gradients; None means `fastps.Float32`.
        prefix: Prefix of all names, for several models on one server.
        apply: How new parameters are registered, see `fastps.TensorSpec`.
        average: `fastps.EMA`: the servers also keep an average of each new parameter, for
            ``fastps.torch.load(view="average")`` and other readers. None: present ones keep what they have.
        dtype: ``"bfloat16"``: the servers keep new parameters in bfloat16, rounded stochastically at each
            step (`fastps.ParameterServer.register`). None: as float32, those of bfloat16, too.
        push_in_backward: Push gradients as soon as backward has computed them, while it computes others.
            There must then be one backward for each step, and nothing may touch the gradients in between: no
            accumulation, no clipping, no `GradScaler`. After an exception in backward call `zero_grad`. Not
            with `fastps.Local`.
        on_step: Called with a `fastps.Step` after each step; ``loss`` is what the closure returned, or
            ``step(loss=...)``.
        rank: As for `fastps.Worker`.
        model: The model, whose floating-point buffers (BatchNorm's statistics) then go to the servers, too,
            and whose parameters are looked for in each step.
        buffers: ``"average"``: the servers keep a running average of all workers' buffers (`fastps.Average`),
            and of masks and counters (whose values are integers) those that came last; ``"latest"``: the
            values that came last; ``"local"``: none. None: ``"average"`` with a model.
        buffers_every: Steps between two pushes of the buffers; the last values follow in `close`.

    float32 and bfloat16 parameters that are contiguous are updated where they are; values of bfloat16 ones
    come in that type, in half of the bytes. Others (float16, channels last, with a mode of local steps also
    bfloat16) have a float32 copy beside them and are cast from it. Those of a CUDA GPU have a copy of their
    values and one of the gradient in pinned memory, and copies run on a separate stream. A parameter
    without a gradient takes no step, but receives the values that others push.

    Each worker trains with its own buffers. With `model`, the servers have them as well, in the group
    ``"default.buffers"``: a worker reads them when it starts, and `fastps.torch.load` when a model is
    evaluated. Integer buffers (``num_batches_tracked``) stay with each worker; so do, with one
    `RuntimeWarning`, float64 buffers, those that are not finite at the start (masks), and those whose shape
    changes.

    Values that something else writes into a parameter (``model.load_state_dict``, an average that is swapped
    in) would be replaced by the server's: the next step raises `ForeignWriteError` until `push_model` or
    `pull_model` chooses which to keep. Writes through ``.data`` or a NumPy view go unnoticed and are lost.

    After ``load_state_dict(assign=True)`` and after layers are replaced, the optimizer has parameters that
    are no longer the model's. With `model` the next step raises; without, the first step in which no
    parameter has a gradient gives a `RuntimeWarning`.

    Raises:
        ConfigError: A setting is invalid or unknown, a parameter has no name, two parameters share memory, or
            the server has parameters of these names with other shapes or settings; all of them are listed,
            and nothing was registered.

    >>> import torch, fastps.torch
    >>> store, model = fastps.Store(), torch.nn.Linear(2, 1)
    >>> optimizer = fastps.torch.ParameterServerOptimizer(
    ...     model.named_parameters(), store, fastps.Adam(lr=0.1)
    ... )
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> optimizer.step()
    >>> store.versions("weight")["weight"]
    2
    >>> bool((model.weight.detach().numpy() == store.pull("weight")).all())
    True
    """

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        ps: ParameterServer,
        optimizer: optim.Optimizer,
        mode: Mode | None = None,
        codec: Codec | None = None,
        *,
        prefix: str = "",
        apply: Literal["exact", "hogwild"] = "exact",
        average: optim.EMA | None = None,
        dtype: Literal["float32", "bfloat16"] | None = None,
        push_in_backward: bool = False,
        on_step: Callable[[Step], object] | None = None,
        rank: int | None = None,
        model: torch.nn.Module | None = None,
        buffers: Way | None = None,
        buffers_every: int = 5,
    ) -> None:
        check_ps(ps)
        check_optimizer(optimizer)
        mode = mode_of(mode, codec, push_in_backward)
        check_buffers(buffers, model)
        buffers_every = at_least(1, "buffers_every", buffers_every)
        rank = own_rank(rank)
        self._ps, self._prefix, self._apply, self._average = ps, prefix, apply, average
        self._dtype = checked_dtype(dtype)
        self._optimizer = optimizer
        self._rules: list[optim.Optimizer] = []
        self._entries: list[Entry] = []
        self._model = model
        self._filled = Filled([], model)
        self._rows, self._own_types = mode.after_warm_up.local_lr is None, not computes(mode)
        is_lossy = not isinstance(codec, (Float32, type(None)))
        self._gpus = Gpus(codec if is_lossy and self._rows else None)
        self._bodies: dict[str, Bodies] = {}
        self._groups: list[list[Entry]] = []
        #: The state of the parameters on the servers.
        self._held = OptimizerState(ps, prefix, rank, self._rules, self._groups)
        self._worker: Worker | None = None
        self._buffers: Buffers | None = None
        self._schedule: _Schedule | None = None
        self._reports = on_step is not None
        self._push_in_backward = push_in_backward
        self._ahead = Ahead()
        self._hooks: list[Any] = []
        #: Set after the warning of a step without gradients.
        self._warned = False
        #: None once it has nothing left to say.
        self._others: Others | None = None
        try:
            super().__init__(params, settings_of(optimizer))
            self._completing: Any = self.register_state_dict_post_hook(_complete)
            if model is not None and buffers != "local":
                self._buffers = Buffers(ps, model, buffers or "average", "default", prefix, buffers_every)
            self._register(self._entries, stacklevel=4)
            own = {entry.name: entry.array for entry in self._entries}
            self._worker = Worker(ps, own, mode, codec, copy=False, on_step=on_step, rank=rank)
            self._worker.refresh_by(self._refresh)
            self._worker.keep_residuals(Residuals(self._bodies))
            self._others = Others(mode, self._worker.place, self._worker.updates)
            self._leave_out(())
            self._filled.show()
            if self._buffers is not None:
                self._buffers.read()
            _MADE.add(self)
        except BaseException:
            self._close(last=False)  # the model's hooks would outlive it
            raise

    # -- what torch asks for ---------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds named parameters, like ``torch.optim.Optimizer.add_param_group``.

        Raises:
            ConfigError: As from the constructor, or the group's rates are not clear from the scheduler of a
                `GlobalSchedule`; nothing is added.
            ForeignWriteError: Something else has written to a parameter; nothing is added.
        """
        group = dict(param_group)
        check_group(group, self.defaults, self._optimizer)
        named = by_name(group["params"], group.pop("param_names", None), self._prefix)
        taken = {entry.name: entry.param for entry in self._entries}
        for name, param in named.items():
            if name in taken and taken[name] is not param:
                raise invalid(f"name {name!r}", "a name for each parameter", "two parameters of this name")
        if self._worker is not None:
            self._filled.check()
        if self._schedule is not None:
            self._schedule._check_addition()
        rule = rule_of_group(self._optimizer, {**self.defaults, **group})
        entries = [Entry.of(n, param, self._gpus, self._own_types) for n, param in named.items()]
        check_memory({**taken, **named})
        group["params"], group["param_names"] = list(named.values()), list(named)
        super().add_param_group(group)
        # torch's functions for state dicts take a step where there is no state.
        self.state.update({param: {} for param in named.values()})
        self._rules.append(rule)
        self._groups.append(entries)
        self._entries.extend(entries)
        self._bodies.update({e.name: e.bodies for e in entries if e.bodies is not None})
        self._filled = Filled(self._entries, self._model)
        if self._worker is not None:
            try:
                self._register(entries, stacklevel=3)
                self._worker.add_params({entry.name: entry.array for entry in entries}, copy=False)
            except BaseException:
                del self.param_groups[-1], self._rules[-1], self._groups[-1]
                for param in named.values():
                    del self.state[param]
                del self._entries[len(self._entries) - len(entries) :]
                for entry in entries:
                    self._bodies.pop(entry.name, None)
                self._filled = Filled(self._entries, self._model)
                raise
            self._filled.show()
        if self._push_in_backward:
            self._hooks += hooks_of(self, entries)
        if self._schedule is not None:
            self._schedule._add(self.param_groups[-1])

    def step(
        self, closure: Callable[[], Any] | None = None, *, loss: Any = None, note: str | None = None
    ) -> Any:
        """Pushes the gradients, and installs new values as the mode says.

        Args:
            closure: Recomputes the loss and the gradients, and returns the loss.
            loss: For ``on_step``, without a closure.
            note: What the batch is, such as ``"batch 8131"``, as for `fastps.ParameterServer.push`. Gradients
                that have left in backward have none.

        Returns:
            The closure's result.

        Raises:
            NonFiniteError: A gradient, or a buffer that this step pushes, is NaN or infinite; nothing was
                sent or changed.
            ConfigError: A setting other than ``lr`` was changed, an ``lr`` is negative or not finite,
                gradients were changed after they had left, or a parameter or its memory was replaced; this
                step was not taken.
            ForeignWriteError: Something else wrote to a parameter; this step was not taken.
            FastpsError: A push or fetch failed. Refused gradients join the next push.
        """
        if self._is_watched():
            return self._watched_step(closure, loss=loss, note=note)
        return self._step(closure, loss=loss, note=note)

    # It does itself what torch wraps a step in, at some ten microseconds, and only if that is asked for.
    step.hooked = True  # type: ignore[attr-defined]

    def _is_watched(self) -> bool:
        hooks = (self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, *_HOOKS_OF_ALL)
        return any(hooks) or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]

    def _step(
        self, closure: Callable[[], Any] | None = None, *, loss: Any = None, note: str | None = None
    ) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                loss = result = closure()
        worker = self._open()
        self._check_open()
        if not worker.has_stepped:
            worker.first_step(random_state(), "fastps.torch.seed(base, ps)")
            warn_if_averaged((entry.param for entry in self._entries), stacklevel=3)
        intact = False
        try:
            self._filled.check()
            intact = True
            rates = self._rates()
            if self._buffers is not None:
                self._buffers.begin_step()
            if not self._reports or loss is None:
                value = None
            else:
                value = number("loss", loss.detach() if isinstance(loss, torch.Tensor) else loss)
            raw = self._raw()
            if self._filled.is_plain and not self._ahead:
                worker.take(raw, None, rates, value, note, self._gradients, torch.get_num_threads())
            else:
                worker.take(self._gradients(), None, rates, value, note)
        except BaseException:
            if self._ahead:  # that much of the step was taken
                with contextlib.suppress(FastpsError):
                    worker.flush()
            raise
        finally:
            self._ahead.clear()
            if intact and not self._filled.watched.written:
                self._filled.show()
        if self._buffers is not None:
            self._buffers.stepped()
        if self._others is not None and (staleness := worker.staleness) is not None:
            is_dense = any(not gradient.is_sparse for gradient in raw.values())
            if self._others.stepped(staleness, is_dense):
                self._others = None
        if not raw and not self._warned:
            self._warned = True
            warnings.warn(_NO_GRADIENT, RuntimeWarning, stacklevel=3)
        return result

    _watched_step = torch.optim.Optimizer.profile_hook_step(_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. With `push_in_backward` it also ends a step whose backward failed.

        Gradients pushed before the failure are applied, as a step of their parameters; the others are
        dropped, and the next backward begins a new step.

        Args:
            set_to_none: As for torch's.

        Raises:
            FastpsError: A push of that step failed; the step has ended, and what was refused goes with the
                next push.
        """
        self._ahead.drop()
        try:
            if self._ahead:
                self._open().flush()
        finally:
            self._ahead.clear()
            super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """A complete state: settings, the servers' optimizer state, and this worker's own.

        Returns:
            ``"param_groups"`` and ``"state"`` as torch's optimizers have them, the latter fetched from the
            servers, on the CPU; a torch optimizer of the same kind takes them. ``"fastps"``: steps,
            residuals and unsent gradients of this worker, and ``"values"``: the float32 values of
            parameters of another type. Hooks of state dicts get all of it.
        """
        self._optimizer_state_dict_post_hooks.move_to_end(self._completing.id, last=False)
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a state that `state_dict` returned.

        The optimizer state goes to the servers if they have taken no step yet, and with it the values of a
        model that was loaded before. If they have, training goes
        on with theirs, and a warning is logged unless they are as many as the saved ones; see
        `fastps.torch.resume`. As there, gradients in the saver's own state (not pushed yet, or dropped by its
        codec) go to the worker of its rank, or without ranks to the first worker, if the servers have taken
        no step since: several workers would push them several times. The others begin without, which is
        logged. What ``torch.distributed.checkpoint.state_dict.get_state_dict`` gave is taken, too, without
        the saver's own state. ``set_state_dict`` loads the model last: call `push_model` then on new servers,
        and `pull_model` on those that still have the run.

        Raises:
            ConfigError: It is another optimizer's, or of other parameters, groups or settings (one that it
                lacks is this optimizer's); nothing is changed.
            ForeignWriteError: Something else has written to a parameter other values than it would get
                now; nothing is changed.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            other = before(self, state_dict)
            state_dict = state_dict if other is None else other
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        named = bool(keys) and all(isinstance(key, str) for key in keys)  # of get_state_dict
        if "fastps" not in state_dict and not named:
            expected, got = "what state_dict() of this class gave", "the state of another optimizer"
            raise ConfigError(
                "wrong state",
                expected=expected,
                got=got,
                advice="fastps.torch.resume() and fastps.torch.to_store() take torch's own",
            )
        states = self._held.saved(state_dict)
        worker = self._open()
        own = {key: arrays_of(value) for key, value in state_dict.get("fastps", {}).items()}
        rank, saver = own.pop("rank", self._held.rank), own.pop("saver", None)
        values = own.pop("values", {})
        if own:
            worker.check_state(own)  # before anything changes on the servers
        self._filled.wait()
        self._filled.check_memory()
        # A checkpoint's model is loaded, too, and has mostly the values that the servers have.
        written = self._filled.watched.written
        if written and self._held.steps_taken() == 0 < steps_of(state_dict):  # new servers
            self._push_values({})
        elif written and not self._filled.equal(own.get("params") or worker.fetched()):
            self._filled.check(_TRAINERS)
        there = self._held.take_over(states, values)
        own_place = saver == self._held.id or self._held.takes_over_from(worker, rank)
        if own and (not is_of_one_worker(own) or (there and own_place)):
            worker.load_state_dict(own)
        else:
            if there and own:
                _log.warning(
                    "this worker begins without the saver's residuals and unsent gradients, which go to %s",
                    "the first worker" if rank is None else f"the worker of rank {rank}",
                )
            worker.pull_model()
        for rule, group, saved in zip(
            self._rules, self.param_groups, state_dict["param_groups"], strict=True
        ):
            settings = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
            group.update(copy.deepcopy({**settings_of(rule), **settings}))
        self._filled.show()
        self._follow_schedule()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ParameterServerOptimizer has a connection and cannot be copied or pickled; save state_dict()"
        )

    # -- what is its own -------------------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """The mode passed to the constructor, or its default."""
        return self._open().mode

    @property
    def global_step(self) -> int:
        """The steps of all workers that the model's values contain; see `fastps.Worker.global_step`.

        The largest step count of any parameter, frozen ones included and predictors of
        `fastps.torch.parallel` left out. When layers are frozen (``requires_grad_(False)``), it goes on from
        there with the steps of the others. It continues after `fastps.torch.resume`, and a step that
        `GradScaler` skips does not count. `GlobalSchedule` makes a learning rate scheduler follow it.
        """
        return self._open().global_step

    def is_first(self) -> bool:
        """Returns whether this worker joined before all others that are present now.

        It is the one to save checkpoints: there is one in every run, and if it ends, the next one takes its
        place. In a warm start it is the worker that trains.

        Raises:
            ConfigError: The store is shared by processes, which do not know each other's workers.
            FastpsError: The servers could not be asked.

        >>> import torch, fastps.torch
        >>> store, named = fastps.Store(), list(torch.nn.Linear(2, 1).named_parameters())
        >>> workers = [fastps.torch.ParameterServerOptimizer(named, store, fastps.Adam()) for _ in range(2)]
        >>> [worker.is_first() for worker in workers]
        [True, False]
        """
        if isinstance(self._ps, Store) and self._ps.address is not None:
            raise invalid("store", "servers, or a store of this process", "a store shared by processes")
        return self._open().is_first()

    def stats(self) -> dict[str, Any]:
        """Counters, as `fastps.Worker.stats`; with parameters on a GPU also ``pinned_bytes``.

        Those are the bytes of pinned memory for values and gradients. They do not grow after the first step.
        """
        return {**self._open().stats(), **self._filled.stats()}

    def push_model(self) -> None:
        """Assigns the model's current values to the servers' tensors; see `fastps.Worker.push_model`.

        If the servers have its buffers, those are assigned, too; if one is not finite, nothing is. Where
        nothing has written to a float16 or bfloat16 parameter, its float32 value stays.

        >>> import torch, fastps.torch
        >>> store, model = fastps.Store(), torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = fastps.torch.ParameterServerOptimizer(
        ...     model.named_parameters(), store, fastps.Adam(lr=0.1)
        ... )
        >>> result = model.load_state_dict({"weight": torch.ones(1, 2)})
        >>> optimizer.push_model()
        >>> store.pull("weight")
        array([[1., 1.]], dtype=float32)
        """
        self._push_values({})

    def pull_model(self) -> None:
        """Fetches the servers' values into the model now, replacing what something else wrote there.

        The model keeps its buffers.
        """
        self._check_open()
        self._filled.check_memory()
        self._filled.wait()
        self._open().pull_model()
        self._filled.show()
        self._follow_schedule()

    def _refresh(self) -> None:
        """Fetches the servers' values into the model, unless something else has written to it."""
        if not self._filled.watched.written:
            self._filled.wait()
            self._open().refresh()
            self._filled.show()
            self._follow_schedule()

    def flush(self) -> None:
        """Waits until all pushes are acknowledged. The parameters stay unchanged."""
        self._check_open()
        self._open().flush()

    def close(self) -> None:
        """`flush`, and ends this optimizer's session; `ps` stays open.

        A `RuntimeWarning` says if something else wrote to the parameters after the last step, such as
        averaged weights: the servers do not have those values.

        Raises:
            NonFiniteError: The model's buffers are not finite; they are not pushed. The session has ended.
        """
        try:
            self._warn_if_written()
        finally:
            self._close(last=True)

    def _warn_if_written(self) -> None:
        worker, others = self._open(), list[str]()
        if worker.closed:
            return
        if not self._filled.watched.written:  # writes through `.data` are counted nowhere
            with contextlib.suppress(FastpsError):
                there = worker.unchanged()
                others = [e.name for e in self._entries if e.name in there and not e.shows(there[e.name])]
        self._filled.watched.warn(stacklevel=3, others=others)

    def _close(self, last: bool) -> None:
        """Ends everything; `last`: pushes the last values of the buffers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        try:
            if self._buffers is not None:
                self._buffers.close(last)
        finally:
            if self._worker is not None:
                self._worker.close()

    def __repr__(self) -> str:
        """Shows local knowledge, without asking a server, and torch's groups."""
        own = "not open" if self._worker is None else repr(self._worker)
        groups = super().__repr__().partition("\n")[2].rstrip(")")
        return f"ParameterServerOptimizer (\n{self._optimizer!r} at {self._ps!r}\n{own}\n{groups})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._warn_if_written()
            self._open().__exit__(kind, error, trace)
        finally:
            self._close(last=error is None)

    # -- for other modules of this package -------------------------------------------------------------------

    def _push_values(self, values: Mapping[str, Array]) -> None:
        """Assigns the model's values, and these in place of what a parameter shows of them."""
        worker = self._open()
        self._check_open()
        self._filled.check_memory()
        self._filled.wait()
        buffers = {} if self._buffers is None else self._buffers.values()
        self._filled.take()
        exact = {}
        for entry in self._entries:
            if entry.name in values and isinstance(entry.array, Halves):
                exact[entry.name] = values[entry.name]
            elif entry.name in values:
                entry.array[...] = values[entry.name]
        worker.push_values({**self._wider(), **exact})
        self._filled.show()
        if self._buffers is not None:
            self._buffers.assign(buffers)
        self._follow_schedule()

    def _wider(self) -> dict[str, Array]:
        """The float32 values of float32 tensors that bfloat16 parameters show, rounded."""
        return self._held.wider(self._open())

    def _read_buffers(self) -> None:
        """Gives the model the servers' buffers, if they have any of it."""
        if self._buffers is not None:
            self._buffers.read()

    def _load_own(self, own: dict[str, Any]) -> None:
        """Gives the worker the state of the one that saved, if it is of this mode and codec."""
        worker = self._open()
        try:
            worker.check_state(own)
        except FastpsError as error:
            _log.warning("this worker begins without the state of the one that saved: %s", error)
        else:
            worker.load_state_dict(own)
        self._filled.show()

    def _follow_schedule(self) -> None:
        """The groups' rates are those of the present step, which may be another one than before."""
        if self._schedule is not None:
            self._schedule._follow()

    def _leave_out(self, names: Iterable[str]) -> None:
        """`global_step` does not count these parameters, unless there are no others."""
        entries, others = self._entries, frozenset(names)  # not the optimizer: it may be collected
        self._open().count_steps_of(
            lambda: [e.name for e in entries if e.name not in others] or [e.name for e in entries],
            lambda: frozenset(e.name for e in entries if e.param.requires_grad),
        )

    # -- how -------------------------------------------------------------------------------------------------

    def _open(self) -> Worker:
        assert self._worker is not None
        return self._worker

    def _check_open(self) -> None:
        if self._open().closed:
            expected, got = "an open optimizer", "a closed one"
            raise ConfigError(
                "this ParameterServerOptimizer is closed",
                expected=expected,
                got=got,
                advice="make another one",
            )

    def _register(self, entries: list[Entry], stacklevel: int) -> None:
        """Registers missing tensors; existing ones must match. `stacklevel` is as for `warnings.warn`."""
        rules = {
            entry.name: rule for rule, group in zip(self._rules, self._groups, strict=True) for entry in group
        }
        arrays = {entry.name: entry.array for entry in entries}
        shaped = {name: (array.shape, rules[name]) for name, array in arrays.items()}
        new = absent(self._ps, shaped, self._average, self._dtype)
        params = {entry.name: entry.param for entry in self._entries}
        warn_of_other_names(self._ps, new, params, self._prefix, stacklevel)
        self._ps.register(
            {name: arrays[name] for name in new},
            optimizer={name: rules[name] for name in new},
            apply=self._apply,
            average=self._average,
            dtype=self._dtype or "float32",
        )

    def _raw(self) -> dict[str, torch.Tensor]:
        """The gradients in torch's form."""
        return {entry.name: grad for entry in self._entries if (grad := entry.param.grad) is not None}

    @torch.no_grad()
    def _gradients(self) -> dict[str, Any]:
        """The gradients in a worker's form, except those already pushed."""
        self._ahead.check()
        grads: dict[str, Any] = {}
        for entry in self._entries:
            gradient = None if entry.name in self._ahead else entry.gradient(self._rows)
            if gradient is not None:
                grads[entry.name] = gradient
        self._arrive(grads)
        return grads

    def _arrive(self, grads: Mapping[str, Any]) -> None:
        """Waits for gradients from GPUs; raises if one that was encoded there is not finite."""
        self._filled.wait()
        for name, gradient in grads.items():
            if isinstance(gradient, Encoded):
                self._bodies[name].check()

    def _rates(self) -> float | dict[str, float]:
        """Returns the current rate of each group; raises if another setting has changed."""
        rates = []
        for rule, group in zip(self._rules, self.param_groups, strict=True):
            check_unchanged(rule, group)
            rates.append(as_lr(group["lr"]))
        if len(set(rates)) == 1:
            return rates[0]
        return {e.name: rate for rate, group in zip(rates, self._groups, strict=True) for e in group}

    def _push_ahead(self, entry: Entry) -> None:
        """Collects a complete gradient, and pushes those collected once they are large enough."""
        with torch.no_grad():
            leaving = self._ahead.collect(entry, self._rows)
            if leaving:
                self._filled.check()
                grads = {e.name: gradient for e, gradient in leaving}
                self._arrive(grads)
                self._open().begin(grads, lr=self._rates())
                self._ahead.pushed(e for e, _ in leaving)


def open_optimizers() -> set[ParameterServerOptimizer]:
    """Internal: the open optimizers of this process."""
    return {one for one in _MADE if not one._open().closed}


def _complete(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The hook that comes before all others of a state dict."""
    assert isinstance(optimizer, ParameterServerOptimizer)
    optimizer._held.complete(state, optimizer._open())
