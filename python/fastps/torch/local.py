"""A torch optimizer that takes local steps with others, and joins their results on a parameter server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from fastps import optim
from fastps._shared.checks import invalid
from fastps._shared.text import quoted
from fastps.codecs import Codec
from fastps.errors import ConfigError, NonFiniteError
from fastps.modes import DiLoCo
from fastps.parameter_server import ParameterServer, check_ps
from fastps.torch._arguments import check_optimizer
from fastps.torch._params import Entry, Filled, Gpus, absent, by_name
from fastps.torch.seeds import state as random_state
from fastps.worker import Step, Worker

__all__ = ["LocalOptimizer"]


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
    ) -> None:
        check_ps(ps)
        check_optimizer(optimizer)
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
        arrays = {entry.name: entry.array for entry in entries}
        for name in absent(ps, {name: (array.shape, optimizer) for name, array in arrays.items()}):
            ps.register(name, arrays[name], optimizer)
        self._filled = Filled(entries, None)
        self._worker = Worker(ps, arrays, mode, codec, copy=False, on_step=on_step, rank=rank)
        self._worker.refresh_by(self._refresh)
        self._filled.show()

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
                at the servers' values.
            ConfigError: `samples` is invalid; no step was taken.
            DeadlineError, LeaseError, FastpsError: As from `fastps.Worker.step`.
        """
        worker = self._open()
        if not worker.has_stepped:
            worker.first_step(random_state(), "fastps.torch.seed(base, ps)")
        worker.check_samples(samples)
        self._filled.check_memory()
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

    def state_dict(self) -> dict[str, Any]:
        """The states of the inner optimizers, the unfinished round and residuals.

        Returns:
            ``optimizers``: the inner ones' states; ``worker``: as `fastps.Worker.state_dict`, with tensors.
        """
        states = [one.state_dict() for one in self.optimizers]
        return {"optimizers": states, "worker": _map(self._open().state_dict(), torch.from_numpy)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state. The round continues if the servers have the values that it began from; else the
        next one begins at theirs.

        Raises:
            ConfigError, ShapeError: The state is of other parameters, or of another codec.
        """
        states = state_dict["optimizers"]
        if len(states) != len(self.optimizers):
            expected, got = f"{len(self.optimizers)} inner optimizers", f"the states of {len(states)}"
            raise ConfigError("the saved state is of others", expected=expected, got=got)
        worker = self._open()
        worker.load_state_dict(_map(state_dict["worker"], lambda tensor: tensor.numpy()))
        for one, state in zip(self.optimizers, states, strict=True):
            one.load_state_dict(state)
        # `load_state_dict` gives them new groups.
        self.param_groups[:] = [group for one in self.optimizers for group in one.param_groups]
        self._filled.show()

    def close(self) -> None:
        """Leaves the group, so that no other worker waits for this one. An unfinished round is dropped."""
        if self._worker is not None:
            self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.__exit__(kind, error, trace)


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


def _map(state: Any, convert: Callable[[Any], Any]) -> Any:
    """A state with its arrays converted."""
    if isinstance(state, Mapping):
        return {key: _map(value, convert) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(_map(value, convert) for value in state)
    return convert(state) if hasattr(state, "shape") else state
