"""A torch optimizer that takes local steps with others, and joins their results on a parameter server."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch

from fastps import optim
from fastps._shared.checks import invalid
from fastps._shared.text import quoted
from fastps._shared.types import Array
from fastps.codecs import Codec
from fastps.engines import own_rank
from fastps.errors import ConfigError, FastpsError, NonFiniteError
from fastps.modes import DiLoCo
from fastps.parameter_server import ParameterServer, check_ps
from fastps.torch._arguments import check_buffers, check_optimizer
from fastps.torch._params import Entry, Filled, Gpus, absent, by_name, settings_of
from fastps.torch.buffers import Buffers
from fastps.torch.optimizer_state import OptimizerState, arrays_of
from fastps.torch.seeds import state as random_state
from fastps.worker import Step, Worker

__all__ = ["LocalOptimizer"]

_log = logging.getLogger("fastps")


class LocalOptimizer(torch.optim.Optimizer):
    """Takes local steps with torch's optimizers, and exchanges only their result: `fastps.DiLoCo`.

    ``step()`` takes one step of each inner optimizer. The last of a round sends the parameters that the round
    began from minus those that it has reached, waits for the others as the mode says, and installs the
    servers' new values. Parameters that the servers do not have yet are registered with the model's values:
    those of the first worker win. Inner optimizers keep their state on this worker, whole matrices included,
    so `torch.optim.Muon` is one of them.

    It is an optimizer like others: learning rate schedulers, hooks, clipping and `GradScaler` take it for the
    inner ones, whose parameter groups it has. A step that `GradScaler` skips is no step of the round.

    Args:
        named_parameters: ``model.named_parameters()``: all of them. Those that no inner optimizer has must
            need no gradient.
        optimizers: Inner optimizers, made of the same parameters; one, or a list.
        ps: `fastps.Store` or what `fastps.connect` returns.
        mode: `fastps.DiLoCo`.
        codec: The encoding of the differences; None means `fastps.Float32`.
        optimizer: The outer optimizer, with which new parameters are registered.
        prefix: Prefix of all names, for several models on one server.
        on_step: Called with a `fastps.Step` after each step.
        rank: As for `fastps.Worker`.
        model: As for `fastps.torch.ParameterServerOptimizer`: its floating-point buffers go to the servers,
            once in `every` steps.
        buffers: As there.

    Raises:
        ConfigError: The mode is another one, a parameter has no name, two inner optimizers or none has one,
            or the server has parameters of these names with other shapes or settings; nothing was registered.

    >>> import torch, fastps.torch
    >>> store, model = fastps.Store(), torch.nn.Linear(2, 1)
    >>> optimizer = fastps.torch.LocalOptimizer(
    ...     model.named_parameters(),
    ...     torch.optim.AdamW(model.parameters(), lr=0.1),
    ...     store,
    ...     fastps.DiLoCo(every=5),
    ... )
    >>> for _ in range(10):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(3, 2)).square().mean().backward()
    ...     optimizer.step(samples=3)
    >>> store.versions("weight")["weight"]
    3
    >>> bool((model.weight.detach().numpy() == store.pull("weight")).all())
    True
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        ps: ParameterServer,
        mode: DiLoCo,
        codec: Codec | None = None,
        *,
        optimizer: optim.Optimizer = DiLoCo.outer,
        prefix: str = "",
        on_step: Callable[[Step], object] | None = None,
        rank: int | None = None,
        model: torch.nn.Module | None = None,
        buffers: Literal["average", "latest", "local"] | None = None,
    ) -> None:
        check_ps(ps)
        check_optimizer(optimizer)
        check_buffers(buffers, model)
        rank = own_rank(rank)
        if not getattr(mode, "takes_values", False):
            advice = "fastps.torch.ParameterServerOptimizer has the other modes"
            raise invalid("mode", "fastps.DiLoCo(every=...)", mode, advice)
        own = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        if not own or not all(isinstance(one, torch.optim.Optimizer) for one in own):
            raise invalid("optimizers", "optimizers of torch", optimizers)
        named = by_name(named_parameters, None, prefix)
        _check_inner(named, own)
        gpus = Gpus()
        entries = [Entry.of(name, param, gpus) for name, param in named.items()]
        self._worker: Worker | None = None
        super().__init__(list(named.values()), {})
        #: The inner optimizers, in the order given.
        self.optimizers = own
        self.param_groups = [group for one in own for group in one.param_groups]
        self._entries, self._outer = entries, optimizer
        #: The state of the outer optimizer, on the servers.
        self._held = OptimizerState(ps, prefix, rank, [optimizer], [entries])
        arrays = {entry.name: entry.array for entry in entries}
        new = absent(ps, {name: (array.shape, optimizer) for name, array in arrays.items()})
        ps.register({name: arrays[name] for name in new}, optimizer=optimizer)
        self._filled = Filled(entries, model)
        self._buffers: Buffers | None = None
        try:
            if model is not None and buffers != "local":
                self._buffers = Buffers(ps, model, buffers or "average", "default", prefix, mode.every)
            self._worker = Worker(ps, arrays, mode, codec, copy=False, on_step=on_step, rank=rank)
            self._worker.refresh_by(self._refresh)
            self._filled.show()
            self._read_buffers()
        except BaseException:
            self._close(last=False)
            raise

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after the constructor: the servers' parameters are those of the whole round.

        Raises:
            ConfigError: Always.
        """
        if self._worker is not None:
            raise ConfigError(
                "a LocalOptimizer takes no further parameters",
                expected="all parameters in the constructor",
                got="another group",
                advice="close it, and make a new one",
            )
        super().add_param_group(param_group)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss: Any = None,
        samples: float | None = None,
    ) -> Any:
        """Takes a step of each inner optimizer; the last step of a round installs the servers' new values.

        Args:
            closure: Recomputes the loss and the gradients, and returns the loss. A single inner optimizer may
                call it several times.
            loss: For ``on_step``, without a closure.
            samples: As for `fastps.Worker.step`.

        Returns:
            The closure's result.

        Raises:
            NonFiniteError: The round's difference is not finite; nothing was sent, and the next step begins
                at the servers' values. Or a buffer that this step pushes is not; no step was taken.
            ConfigError: `samples` is invalid; no step was taken.
            DeadlineError, LeaseError, FastpsError: As from `fastps.Worker.step`.
        """
        worker = self._open()
        if not worker.has_stepped:
            worker.first_step(random_state(), "fastps.torch.seed(base, ps)")
        worker.check_samples(samples)
        self._filled.check_memory()
        if self._buffers is not None:
            self._buffers.begin_step()
        result = None
        if closure is not None and len(self.optimizers) > 1:
            with torch.enable_grad():
                result, closure = closure(), None
        for one in self.optimizers:
            result = one.step(closure) if closure is not None else (one.step(), result)[1]
        value = result if loss is None else loss
        value = (
            float(value.detach() if isinstance(value, torch.Tensor) else value) if value is not None else None
        )
        self._filled.take()
        try:
            worker.step(values=worker.params, samples=samples, loss=value)
        except NonFiniteError:
            worker.pull_model()
            raise
        finally:
            if worker.at_version:
                self._filled.show()
        if self._buffers is not None:
            self._buffers.stepped()
        return result

    def _refresh(self) -> None:
        worker = self._open()
        worker.refresh()
        if worker.at_version:
            self._filled.show()

    def _open(self) -> Worker:
        if self._worker is None:
            raise ConfigError("the optimizer is not complete", expected="an open one", got="a failed one")
        return self._worker

    @property
    def worker(self) -> Worker:
        """Its `fastps.Worker`, for ``stats()`` and the like."""
        return self._open()

    def is_first(self) -> bool:
        """Returns whether this worker joined before all others that are present now.

        Raises:
            FastpsError: The servers could not be asked.
        """
        return self._open().is_first()

    def pull_model(self) -> None:
        """Fetches the servers' values into the model; an unfinished round is dropped.

        Raises:
            FastpsError: The fetch failed.
        """
        self._open().pull_model()
        self._filled.show()

    def state_dict(self) -> dict[str, Any]:
        """A complete state: of the inner optimizers, of the unfinished round, and the servers' of the outer.

        Returns:
            ``optimizers``: the inner ones' states; ``fastps``: as `fastps.Worker.state_dict`, with tensors;
            ``state`` and ``param_groups``: the outer optimizer as torch's have it.
        """
        names = [entry.name for entry in self._entries]
        group = {"params": list(range(len(names))), "param_names": names, **settings_of(self._outer)}
        state: dict[str, Any] = {"param_groups": [group]}
        self._held.complete(state, self._open())
        return {**state, "optimizers": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores this worker's state. The round continues if the servers have the values that it began
        from; else the next one begins at theirs. The outer optimizer's state is the servers', to which
        `fastps.torch.resume` gives a saved one.

        Raises:
            ConfigError, ShapeError: The state is of other parameters, or of another codec; nothing is
                changed.
        """
        own = {key: arrays_of(value) for key, value in state_dict["fastps"].items()}
        worker = self._open()
        self._check_inner_states(state_dict)
        worker.check_state(own)
        self._load_inner(state_dict)
        worker.load_state_dict(own)
        self._filled.show()

    def close(self) -> None:
        """Leaves the group, so that no other worker waits for this one. An unfinished round is dropped.

        Raises:
            NonFiniteError: The model's buffers are not finite; they are not pushed. The session has ended.
        """
        self._close(last=True)

    def _close(self, last: bool) -> None:
        """Ends everything; `last`: pushes the last values of the buffers."""
        try:
            if self._buffers is not None:
                self._buffers.close(last)
        finally:
            if self._worker is not None:
                self._worker.close()

    # -- for `fastps.torch.save` and `resume` ----------------------------------------------------------------

    def _check_inner_states(self, state_dict: Mapping[str, Any]) -> None:
        """Raises unless a state has one for each inner optimizer, of as many parameters."""
        states = state_dict.get("optimizers", [])
        sizes = [[len(group["params"]) for group in state["param_groups"]] for state in states]
        ours = [[len(group["params"]) for group in one.param_groups] for one in self.optimizers]
        if sizes != ours:
            expected, got = (f"inner optimizers with groups of {each} parameters" for each in (ours, sizes))
            raise ConfigError("the saved state is of others", expected=expected, got=got)

    def _load_inner(self, state_dict: Mapping[str, Any]) -> None:
        """Gives the inner optimizers their saved states."""
        for one, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            one.load_state_dict(copy.deepcopy(state))
        # `load_state_dict` gives them new groups.
        self.param_groups[:] = [group for one in self.optimizers for group in one.param_groups]

    def _load_own(self, own: dict[str, Any]) -> None:
        """Continues the saver's round, if the state is of this mode and codec."""
        worker = self._open()
        try:
            worker.check_state(own)
        except FastpsError as error:
            _log.warning("this worker begins without the state of the one that saved: %s", error)
        else:
            worker.load_state_dict(own)
        self._filled.show()

    def _push_values(self, values: Mapping[str, Array]) -> None:
        """Assigns the model's values, and these in place of what a parameter shows of them."""
        self._filled.check_memory()
        buffers = {} if self._buffers is None else self._buffers.values()
        self._filled.take()
        for entry in self._entries:
            if entry.name in values:
                entry.array[...] = values[entry.name]
        self._open().push_model()
        self._filled.show()
        if self._buffers is not None:
            self._buffers.assign(buffers)

    def _read_buffers(self) -> None:
        """Gives the model the servers' buffers, if they have any of it."""
        if self._buffers is not None:
            self._buffers.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._open().__exit__(kind, error, trace)
        finally:
            self._close(last=error is None)


def _check_inner(named: Mapping[str, torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises unless each parameter that needs a gradient has one inner optimizer."""
    names = {id(param): name for name, param in named.items()}
    params = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    had = [names.get(id(param)) for param in params]
    if None in had:
        expected, got = quoted(named), f"{had.count(None)} parameters that are none of these"
        raise ConfigError("an inner optimizer has parameters of another model", expected=expected, got=got)
    twice = sorted({name for name in had if name is not None and had.count(name) > 1})
    lacking = [n for n, param in named.items() if param.requires_grad and n not in had]
    if twice or lacking:
        raise ConfigError(
            "each parameter that needs a gradient has one inner optimizer",
            tensor=(twice or lacking)[0],
            expected="one inner optimizer",
            got=f"{'two' if twice else 'none'} for {quoted(twice or lacking)}",
        )
