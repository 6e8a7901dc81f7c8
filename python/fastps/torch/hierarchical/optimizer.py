"""An optimizer that averages gradients inside a machine and meets other machines in a parameter server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from fastps import optim
from fastps._shared.checks import invalid
from fastps._shared.types import Array
from fastps.codecs import Codec
from fastps.engines import detect
from fastps.errors import ConfigError, FastpsError, NonFiniteError
from fastps.modes import Async, Mode
from fastps.parameter_server import ParameterServer, check_ps
from fastps.torch._params import Entry, Filled, Gpus, absent, as_lr, check_unchanged, float32, settings_of
from fastps.torch.hierarchical.node import Node
from fastps.torch.hierarchical.parameters import Parameters, pieces, scaled
from fastps.torch.seeds import state as random_state
from fastps.worker import Step, Worker
from fastps.worker.arguments import check_codec, check_mode, like
from fastps.worker.run.parts import group_of, register, turns

__all__ = ["Hierarchical"]


class Hierarchical(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` for several processes on each machine: all-reduce inside, the server between.

    The processes of one machine, its local ranks, average their gradients with torch.distributed (gloo or
    NCCL). Each local rank then pushes its own part of the parameters and pulls their new values, which all
    get from it. So a machine sends and receives the bytes of one worker, and no process is the bottleneck.

    Local rank k's tensors belong to the group ``"<group>/k"``, whose workers are the machines: with two
    machines use ``Sync(workers=2)``, whatever the number of local ranks. All machines need the same number of
    them. Machines need no common process group: each may have its own torchrun.

    Args:
        model: The model, equal on all local ranks; the servers' values replace its own. It may be in
            ``DistributedDataParallel(process_group=node)``, which then averages the gradients. After
            ``fully_shard`` over the node (FSDP2) each shard is a tensor, ``name@k/n``, which
            `fastps.torch.load` joins.
        ps: The result of `fastps.connect`.
        optimizer: Such as ``fastps.Adam(lr=1e-3)``. Only its ``lr`` may change later
            (``param_groups[0]["lr"]``, as schedulers do).
        mode: As for `fastps.Worker`; `fastps.Async` if none is given.
        codec: The encoding of gradients; None means `fastps.Float32`.
        node: The process group of this machine's local ranks; None: those of the default group that have its
            host name.
        group: The tensors' group, without the number of the local rank.
        prefix: Prefix of all names.
        on_step: Called with a `fastps.Step` after each step, on each local rank that pushes something.
        rank: The machine's number, for ``Sync(deterministic=True)``. None: the first rank of the node, or,
            if the node is all of the default group, the node of `fastps.engines.detect`.

    Gradients are averaged in the order of the local ranks, so equal gradients give equal bits. A parameter
    whose gradient is missing on some local ranks counts as zero there; one without any takes no step. Sparse
    gradients become dense. Buffers stay with each process.

    If a step fails on one local rank, it fails on all of them, and the error names that one. Other machines
    continue, as after the loss of a worker. If a `GradScaler` finds an overflow on one local rank, all of
    them skip the step. Otherwise all local ranks take each step, with one rate.

    Raises:
        ConfigError: There is no process group, the model's gradients are averaged over other ranks than the
            node's, or other machines have divided the model in another way.

    >>> import torch, torch.distributed as dist, fastps.torch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> store, model = fastps.Store(), torch.nn.Linear(2, 1)
    >>> with fastps.torch.Hierarchical(model, store, fastps.SGD(lr=0.1)) as optimizer:
    ...     model(torch.ones(3, 2)).sum().backward()
    ...     optimizer.step()
    >>> store.spec("weight").group
    'default/0'
    >>> dist.destroy_process_group()
    """

    #: A `GradScaler` calls `step` for an overflow, too, with `found_inf`, and does not unscale gradients.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: torch.nn.Module,
        ps: ParameterServer,
        optimizer: optim.Optimizer,
        mode: Mode | None = None,
        codec: Codec | None = None,
        *,
        node: dist.ProcessGroup | None = None,
        group: str = "default",
        prefix: str = "",
        on_step: Callable[[Step], object] | None = None,
        rank: int | None = None,
    ) -> None:
        check_ps(ps)
        given: object = optimizer
        if not isinstance(given, optim.Optimizer):
            raise invalid("optimizer", f"one such as {like(optim.Optimizer, given, 'Adam')}", given)
        mode = Async() if mode is None else mode
        check_mode(mode)
        if codec is not None:
            check_codec(codec)
        self._rule, self._node = optimizer, Node(node)
        self._parameters = Parameters(model, self._node, prefix)
        gpus = Gpus()
        owned = self._parameters.owned
        self._entries = [Entry.of(one.name, one.local, gpus) for one in owned]
        self._filled = Filled(self._entries, None)
        self._vectors = [self._vector(process) for process in range(self._node.size)]
        self._worker: Worker | None = None
        #: Calls of `zero_grad` since the last step: as many on each local rank.
        self._zeroed = 0
        super().__init__([*model.parameters()], settings_of(optimizer))
        try:
            own = group_of(group, self._node.rank)
            for joining in turns(mode, self._node.size):
                self._on_all(partial(self._open, joining, ps, mode, codec, own, on_step, rank))
        except BaseException:
            self.close()
            raise

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any:
        """Averages the gradients of this machine, and pushes and pulls as the mode says.

        Args:
            closure: Recomputes the loss and the gradients, and returns the loss.
            loss: For ``on_step``, without a closure.

        Returns:
            The closure's result.

        Raises:
            NonFiniteError: A gradient of a local rank is NaN or infinite; nothing was sent.
            ConnectionLostError: A local rank has ended; the error names it.
            ConfigError: A setting other than ``lr`` was changed, or local ranks have different rates, or one
                has left out a step (by its calls of `zero_grad`); this step was not taken.
            FastpsError: A push or pull of a local rank failed, as from `fastps.Worker.step`.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                loss = result = closure()
        rate, failed = 0.0, None
        try:
            check_unchanged(self._rule, self.param_groups[0])
            rate = as_lr(self.param_groups[0]["lr"])
        except ConfigError as error:
            failed = error
        value = loss.detach() if isinstance(loss, torch.Tensor) else loss
        grads = self._averaged(rate, failed)
        if grads is None:
            return result

        def push() -> None:
            if (worker := self._worker) is None:
                return
            if not worker.has_stepped:
                worker.first_step(random_state(), "fastps.torch.seed(base, ps)")
            self._filled.check()
            try:
                worker.step(grads, lr=rate, loss=None if value is None else float(value))
            finally:
                if not self._filled.watched.written:
                    self._filled.show()

        self._on_all(push)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; every local rank calls it equally often before a step."""
        self._zeroed += 1
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises: the local ranks have divided the parameters when the optimizer is made."""
        if self.param_groups:
            raise ConfigError(
                "a Hierarchical takes no parameters later",
                expected="all parameters in its model",
                got="add_param_group()",
                advice="make it of the whole model, and call requires_grad_(False) for those that are not "
                "trained yet",
            )
        super().add_param_group(param_group)

    def pull_model(self) -> None:
        """Fetches the servers' values into the model now; every local rank calls it."""

        def pull() -> None:
            if self._worker is not None:
                self._worker.pull_model()
                self._filled.show()

        self._on_all(pull)

    def push_model(self) -> None:
        """Assigns the model's present values to the servers' tensors; every local rank calls it."""

        def push() -> None:
            if self._worker is not None:
                self._filled.take()
                self._worker.push_model()
                self._filled.show()

        self._on_all(push)

    @property
    def global_step(self) -> int:
        """The steps of all machines that this process's part contains; 0 if it pushes nothing."""
        return 0 if self._worker is None else self._worker.global_step

    def is_first(self) -> bool:
        """Returns whether this is local rank 0 of the machine that joined first: the one to save files."""
        return self._node.rank == 0 and self._worker is not None and self._worker.is_first()

    def stats(self) -> dict[str, Any]:
        """Counters of this process's part, as `fastps.Worker.stats`; empty if it pushes nothing."""
        return {} if self._worker is None else self._worker.stats()

    def close(self) -> None:
        """Ends this process's session; `ps` stays open. Other local ranks are not waited for."""
        if self._worker is not None:
            try:
                if not self._worker.closed:
                    self._filled.watched.warn(stacklevel=2)
            finally:
                self._worker.close()

    def state_dict(self) -> NoReturn:
        """Raises: the servers have the state; `fastps.checkpoint.save` saves it, values included."""
        raise ConfigError(
            "a Hierarchical has no state dict",
            expected="fastps.checkpoint.save(ps, path)",
            got="state_dict()",
            advice="the servers have values and optimizer state; fastps.checkpoint.load brings them back",
        )

    def load_state_dict(self, state_dict: Any) -> NoReturn:  # noqa: ARG002 torch's argument
        """Raises, as `state_dict`."""
        self.state_dict()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a Hierarchical has a connection and cannot be copied or pickled")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._worker is not None:
            self._worker.__exit__(kind, error, trace)

    # -- how -------------------------------------------------------------------------------------------------

    def _open(
        self,
        joining: range,
        ps: ParameterServer,
        mode: Mode,
        codec: Codec | None,
        group: str,
        on_step: Callable[[Step], object] | None,
        rank: int | None,
    ) -> None:
        """Registers this process's tensors that the servers lack, and begins to train them.

        Does nothing unless `joining` has this local rank.
        """
        if not self._entries or self._node.rank not in joining:
            return
        if not self._parameters.names:
            self._parameters.check_shards(ps)
        arrays = {entry.name: entry.array for entry in self._entries}
        new = absent(ps, {name: (array.shape, self._rule) for name, array in arrays.items()})
        register(ps, arrays, new, self._rule, group)
        if rank is None:
            rank = (detect().node or 0) if self._node.spans_all else self._node.first
        self._worker = Worker(ps, arrays, mode, codec, copy=False, on_step=on_step, rank=rank)
        self._filled.show()

    def _on_all(self, act: Callable[[], None]) -> None:
        """Does what every local rank does with its part at the same time, and gives all of them the values.

        Raises:
            FastpsError: It failed on this local rank or on another one.
        """
        failed = None
        try:
            act()
        except FastpsError as error:
            failed = error
        self._share(failed)

    def _averaged(self, rate: float, failed: FastpsError | None) -> dict[str, Array] | None:
        """The mean gradients of this process's parameters, over the node; None if all skip the step."""
        parameters, node = self._parameters, self._node
        scale = getattr(self, "grad_scale", None)
        factor = 1.0 if scale is None else 1.0 / float(scale)
        said = [float(failed is not None), float(getattr(self, "found_inf", 0.0)), float(self._zeroed), rate]
        self._zeroed = 0
        if parameters.averaged:
            if not self._agree(
                node.exchange([torch.tensor(said, dtype=torch.float32, device=node.device)] * node.size),
                failed,
            ):
                return None
            each = ((one.name, one.gradient()) for one in parameters.owned)
            return {name: float32(scaled(grad.detach(), factor)) for name, grad in each if grad is not None}
        parts = node.exchange(parameters.gradients(node.size, said, factor))
        if not self._agree(parts[:, : len(said)], failed):
            return None
        parts = parts[:, len(said) :]
        for process, first in enumerate(parts[:, 0].tolist()):
            if first:
                raise NonFiniteError(
                    f"a gradient of local rank {process} is not finite",
                    tensor=parameters.names[int(first) - 1],
                    expected="finite values",
                    got="NaN or infinity",
                    advice="nothing was sent",
                )
        count = 1 + len(parameters.owned)
        present = parts[:, 1:count].any(dim=0).tolist()
        total = parts[0, count:].clone()
        for part in parts[1:, count:]:
            total += part
        total = (total / node.size).cpu()
        owned = [one.local for one in parameters.owned]
        means = zip(parameters.owned, present, pieces(total, owned), strict=True)
        return {one.name: float32(mean) for one, has, mean in means if has}

    def _agree(self, said: torch.Tensor, failed: FastpsError | None) -> bool:
        """Returns whether the step is taken: no `GradScaler` has found an overflow.

        Args:
            said: Of each process: whether it has failed, and its overflow, calls of `zero_grad`, and rate.
            failed: The error of this process.

        Raises:
            FastpsError: A process has failed, or they are at different steps or have different rates.
        """
        if said[:, 0].any():
            self._node.raise_of(failed)
        for column, what in ((2, "calls of zero_grad() before this step"), (3, "lr")):
            values = said[:, column].tolist()
            if len(set(values)) > 1:
                each = (f"{value:g} on local rank {rank}" for rank, value in enumerate(values))
                raise ConfigError(
                    "the local ranks are not at the same step",
                    expected=f"the same on each: {what}",
                    got=", ".join(each),
                    advice="let all local ranks take a step, or none: all-reduce the decision to skip it",
                )
        return not said[:, 1].any()

    def _vector(self, process: int) -> torch.Tensor:
        """A process's status, 1 if it has failed, and the values of its parameters."""
        numbers = sum(param.numel() for param in self._parameters.of(process))
        return torch.zeros(1 + numbers, dtype=torch.float32, device=self._node.device)

    @torch.no_grad()
    def _share(self, failed: FastpsError | None) -> None:
        """Gives the others the values of this process's part, and takes theirs; raises if one has failed."""
        own = self._vectors[self._node.rank]
        own[0] = float(failed is not None)
        if self._parameters.names and own.numel() > 1:
            flat = torch.cat([torch.from_numpy(entry.array).reshape(-1) for entry in self._entries])
            own[1:].copy_(flat)
        self._node.share(self._vectors)
        if any(bool(vector[0]) for vector in self._vectors):
            self._node.raise_of(failed)
        for process, vector in enumerate(self._vectors):
            params = self._parameters.of(process) if process != self._node.rank else []
            for param, values in zip(params, pieces(vector[1:], params), strict=True):
                param.copy_(values)
