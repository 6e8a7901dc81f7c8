"""`Replica`: one model that trains in parts, in processes, in threads, or all in one."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from fastps import optim
from fastps._shared.checks import as_seconds, at_least
from fastps._shared.text import quoted
from fastps.codecs import Codec
from fastps.data import Portions
from fastps.errors import ConfigError, ConnectionLostError, NonFiniteError
from fastps.modes import Mode
from fastps.parameter_server import ParameterServer
from fastps.torch.optimizer import ParameterServerOptimizer
from fastps.torch.parallel.batch import cut
from fastps.torch.parallel.engine import Engine, Total
from fastps.torch.parallel.graph import Graph
from fastps.torch.parallel.links.gloo import Gloo
from fastps.torch.parallel.links.group import leave_group, number_of_replica, open_group, size_of
from fastps.torch.parallel.links.mailbox import Mailbox
from fastps.torch.parallel.links.messages import Kind, Message
from fastps.torch.parallel.links.queues import Queues
from fastps.torch.parallel.modules import Modules, check_parameters
from fastps.torch.parallel.optimizer import NoParameters, check_fits_predictors, make_optimizer
from fastps.torch.parallel.plan import Plan, Schedule
from fastps.torch.parallel.portions import ReplicaPortions
from fastps.torch.parallel.random import Seeds
from fastps.torch.parallel.threads import Threads
from fastps.worker import Step

__all__ = ["Replica"]


class Replica:
    """One part of a model that is cut into parts, which train together as one replica.

    Each part is a process with its own rank in a gloo group. ``torchrun --nproc-per-node PARTS`` starts them
    on one machine, and on several with ``--nnodes``. A replica is one unit: if a part fails, all parts raise,
    and the replica starts again from the servers' values (``torchrun --max-restarts``). Other replicas
    continue. Use it as a context manager, so that the other parts learn when this part leaves.

    Args:
        graph: The same in all processes.
        group: A gloo group that no other open replica has; None: the default group, or one from the
            environment that torchrun sets.
        timeout: Seconds to wait for another part's message, > 0.
        number: The replica's number among all replicas, from 0: the rank of its workers, and part of the seed
            of dropout. None: ``REPLICA`` of the environment, or 0.

    Attributes:
        part: This process's part; None if it has all.
        parts: Number of parts.

    Raises:
        ConfigError: The graph is not complete, does not fit the group, or differs between the parts; nothing
            but the comparison of graphs was sent.
        DeadlineError: Other parts did not join in time.

    Not safe for use by several threads at once.
    """

    part: int | None
    parts: int
    _group: dist.ProcessGroup | None
    _threads: Threads | None

    def __init__(
        self,
        graph: Graph,
        group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
        *,
        number: int | None = None,
    ) -> None:
        plan, timeout = Plan(graph, size_of(group)), as_seconds("timeout", timeout)
        self._set_up(plan, number_of_replica(number), timeout)
        group, self._made_group = open_group(group, timeout)
        self._group, self.part = group, group.rank()
        together = next(parts for parts in plan.groups(None) if self.part in parts)
        links = Gloo(group, timeout, together)
        self._links.append(links)
        mailbox = Mailbox(plan, self.part, links, timeout)
        with self._reporting_errors(mailbox):
            seeds = Seeds(graph.seed)
            modules = Modules(plan, [self.part], seeds)
            self._engines.append(Engine(plan, [self.part], modules, seeds, self.number, mailbox))
            self._leader = self._meet()

    @classmethod
    def local(
        cls,
        graph: Graph,
        threads: bool = False,
        timeout: float = 60.0,
        *,
        number: int | None = None,
        delay: int = 0,
    ) -> Self:
        """Creates all parts in this process, run in turn: for a first try, and as the reference of a run.

        Args:
            graph: The graph.
            threads: True: one thread per part. torch has one generator of random numbers per process, so
                nodes that draw from it run one at a time; a node that draws nothing in its first call (after
                `train` or `eval`) is taken to never draw.
            timeout: As for `Replica`, with threads.
            number: As for `Replica`.
            delay: Steps before the predictor of a decoupled value uses a target, >= 0: what late targets do
                can be studied without processes. With threads, a target comes one step later at the earliest.

        >>> graph = fastps.torch.parallel.Graph()
        >>> out = graph.node("out", torch.nn.Linear(3, 1), graph.input("x"), part=0)
        >>> graph.loss(torch.nn.functional.mse_loss, out, graph.input("y"))
        >>> replica = fastps.torch.parallel.Replica.local(graph)
        >>> optimizer = replica.optimizer(fastps.Store(), fastps.SGD(lr=0.1))
        >>> x = torch.eye(3)
        >>> losses = []
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     losses.append(replica.step(x=x, y=x.sum(1, keepdim=True)))
        ...     optimizer.step()
        >>> losses[-1] < losses[0] / 10
        True
        """
        plan, timeout = Plan(graph), as_seconds("timeout", timeout)
        delay = at_least(0, "delay", delay)
        return cls.__new__(cls)._hold_all(plan, number_of_replica(number), timeout, threads, delay)

    def _hold_all(self, plan: Plan, number: int, timeout: float, threads: bool, delay: int) -> Self:
        """Makes it a replica that has all parts."""
        self._set_up(plan, number, timeout)
        self.part = None
        seeds = Seeds(plan.graph.seed, threads)
        modules = Modules(plan, range(plan.parts), seeds)
        check_parameters(plan, modules.shapes)
        if threads:
            queues: list[Queues] = []
            for part in range(plan.parts):
                mailbox = Mailbox(plan, part, Queues(part, queues), timeout)
                engine = Engine(plan, [part], modules, seeds, self.number, mailbox, delay)
                self._engines.append(engine)
            self._threads = Threads(self._engines, queues)
        else:
            parts = range(plan.parts)
            self._engines.append(Engine(plan, parts, modules, seeds, self.number, delay=delay))
        return self

    def _set_up(self, plan: Plan, number: int, timeout: float) -> None:
        self.parts, self.number = plan.parts, number
        self._plan, self._timeout = plan, timeout
        self._links: list[Gloo] = []
        self._engines: list[Engine] = []
        self._threads = None
        self._group = None
        self._made_group, self._closed = False, False
        #: The part whose optimizer is made first in a warm start.
        self._leader = 0
        self._joined = 0
        self._portions = 0
        self._totals: list[Total] = []

    # -- training --------------------------------------------------------------------------------------------

    def step(self, *, micro_batches: int = 1, **inputs: torch.Tensor) -> float:
        """Forward and backward of one batch: adds to the gradients, as ``backward`` does.

        No part returns before all have finished their backward, so a step that fails is pushed by no part.
        Parts that a decoupled value connects do not wait for each other (`Graph.decouple`).

        Args:
            micro_batches: Pieces of the batch, along the first dimension, processed in a pipeline so that all
                parts have work. Their losses make that of the batch (`Graph.loss`). Equal on all parts.
            **inputs: Tensors by the names of the graph's inputs: at least those that this part's nodes use. A
                tensor without dimensions goes to every micro-batch unchanged.

        Returns:
            The loss of the batch, on every part. A part that does not wait for the loss returns the
            newest one that it knows, NaN before the first.

        Raises:
            ConfigError: An input is missing or unknown, a piece is out of range, an output is no tensor, the
                loss is not a mean over rows and its reduction is unknown (`Graph.loss`), or the parts make
                different calls.
            NodeError: A node raised an exception, on any part.
            NonFiniteError: The loss or a gradient is NaN or infinite, on any part; training may continue with
                other data, after ``zero_grad()``.
            ConnectionLostError: A part is gone.
            DeadlineError: A part hangs.
        """
        micro_batches = at_least(1, "micro_batches", micro_batches)
        self._totals = self._run(self._plan.training, micro_batches, inputs, Engine.step)
        home = self._plan.loss.part if self._threads is not None else 0
        return self._totals[home or 0].loss

    def predict(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Forward only, without gradients, of the graph's outputs.

        Modules are in the mode that `train` or `eval` has set. Inputs and errors are as for `step`.

        Returns:
            Names of the outputs to tensors, on every part.
        """
        if not self._plan.inference.outputs:
            raise ConfigError(
                "the graph has no output",
                expected="an output",
                got="none",
                advice="call graph.output(name, handle)",
            )
        found: list[dict[str, torch.Tensor]] = self._run(self._plan.inference, 1, inputs, Engine.predict)
        return found[0]

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales this part's gradients if the norm of the whole model's is larger than `max_norm`.

        Call it on all parts, after `step` and before the optimizer's ``step()``. Parts that do not wait for
        each other (`Graph.decouple`) have separate norms; predictors do not count and are not scaled.

        Returns:
            The norm before, of the gradients at the end of the last `step`.
        """
        norms = {parts: norm for total in self._totals for parts, norm in total.squared_norms.items()}
        for parts, squared in norms.items():
            scale = float(max_norm) / (squared**0.5 + 1e-6)
            if scale < 1:
                torch._foreach_mul_(self._gradients(parts), scale)
        whole: float = sum(norms.values()) ** 0.5
        return whole

    def _gradients(self, parts: Collection[int]) -> list[torch.Tensor]:
        """Gradients of the model, without predictors, on some of this process's parts."""
        params = (
            param
            for engine in self._engines
            for part in engine.parts
            if part in parts
            for node in self._plan.nodes_of([part])
            if node.decoupling is None
            for param in engine.modules.owned(part, node)
        )
        return [param.grad for param in params if param.grad is not None]

    def train(self, mode: bool = True) -> Self:
        """Sets this part's modules to training or evaluation mode, as ``torch.nn.Module.train``."""
        for engine in self._engines:
            engine.set_mode(mode)
        return self

    def eval(self) -> Self:
        """``train(False)``."""
        return self.train(mode=False)

    # -- what a part has -------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[str]:
        """Names of this part's nodes."""
        return [node.name for engine in self._engines for node in self._plan.nodes_of(engine.parts)]

    @property
    def modules(self) -> dict[str, Callable[..., Any]]:
        """Names of this part's nodes to what computes them. Buffers (BatchNorm's statistics) stay there."""
        nodes = [(node, engine) for engine in self._engines for node in self._plan.nodes_of(engine.parts)]
        return {node.name: engine.modules.by_node[node.index] for node, engine in nodes}

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This part's parameters by their names on the servers; those that parts share are the lowest's."""
        for engine in self._engines:
            for part in engine.parts:
                yield from engine.modules.named_parameters(part)

    def optimizer(
        self,
        ps: ParameterServer,
        rule: optim.Optimizer,
        mode: Mode | None = None,
        codec: Codec | None = None,
        *,
        on_step: Callable[[Step], object] | None = None,
    ) -> ParameterServerOptimizer | NoParameters:
        """The optimizer of this part's parameters, on the servers.

        New tensors are registered in the group ``part<k>``, so `fastps.Sync` and `fastps.Bounded` bind the
        same part of all replicas. All parts call this in the same order. Parameters of several parts are
        pushed and fetched by the lowest; the others get the values when their next `step` or `predict`
        begins.

        Args:
            ps: `fastps.Store` or what `fastps.connect` returns.
            rule: Such as ``fastps.Adam(lr=1e-3)``.
            mode: As for `fastps.Worker`, with this replica's number as rank; None means
                ``fastps.Async(momentum_matching=False)``. With `fastps.WarmStart`, or ``join_every`` of
                `fastps.Async`, the lowest part with parameters joins first, then the others.
            codec: As for `fastps.Worker`.
            on_step: As for `fastps.torch.ParameterServerOptimizer`.

        Raises:
            ConfigError: A setting is invalid, or the mode is `fastps.Sync` and a value is decoupled.

        Returns:
            A `fastps.torch.ParameterServerOptimizer`, or one that does nothing if this part has no
            parameters.
        """
        if self._plan.decoupled:
            check_fits_predictors(mode, self._plan.edge_of(self._plan.decoupled[0]))
        with self._reporting_errors():
            in_turn = mode is not None and mode.joins_in_turn
            waits = in_turn and self.part is not None and self.part != self._leader
            self._joined += 1
            if waits:
                what = "its turn to join"
                self._engines[0].wait_for(Kind.JOINED, self._joined, self._leader, what, patient=True)
            params = {
                part: engine.modules.named_parameters(part)
                for engine in self._engines
                for part in engine.parts
            }
            shapes = self._engines[0].modules.shapes
            predictors = {
                node.prefix + name for node in self._plan.decoupled for name in shapes.get(node.name, {})
            }
            made = make_optimizer(ps, rule, params, predictors, mode, codec, on_step, self.number)
            if self.part is not None and not waits:
                self._engines[0].tell(Message(Kind.JOINED, self._joined))
            return made

    def portions(
        self,
        ps: ParameterServer,
        n: int,
        size: int = 256,
        seed: int = 0,
        name: str = "train",
        *,
        epoch: int = 0,
        timeout: float | None = None,
    ) -> ReplicaPortions:
        """Portions of the data, leased by part 0; every part gets the same indices.

        Arguments are those of `fastps.data.Portions`; replicas with one `name` share the samples.

        >>> graph = fastps.torch.parallel.Graph()
        >>> out = graph.node("out", torch.nn.Linear(3, 1), graph.input("x"), part=0)
        >>> graph.loss(torch.nn.functional.mse_loss, out, graph.input("y"))
        >>> replica = fastps.torch.parallel.Replica.local(graph)
        >>> [len(rows) for rows in replica.portions(fastps.Store(), n=10, size=4)]
        [4, 4, 2]
        """
        self._portions += 1
        every = self._timeout / 2 if timeout is None else min(self._timeout / 2, timeout)
        leases = self.part in (0, None)
        own = Portions(ps, n, size, seed, name, epoch=epoch, timeout=min(1.0, every)) if leases else None
        engine = self._engines[0] if self.part is not None else None
        return ReplicaPortions(own, engine, epoch, timeout, self._portions)

    def stats(self) -> dict[str, Any]:
        """Counters of this part; with threads, sums over all.

        Returns:
            ``steps``; ``computing`` and ``waiting``: seconds in nodes and for messages; ``activation_bytes``:
            the most bytes of node outputs and received values that waited for their backward; ``edges``: for
            each value that crosses between two parts (``"conv1[:, -1:]: 0 -> 1"``), ``values`` and
            ``gradients``: messages forward and backward, ``value_bytes`` and ``gradient_bytes``. A decoupled
            value also has, on its part, ``lag``: steps between a value and the use of its target to how often
            that was; ``waited``: seconds for targets; and of the last 100 targets, or None before the first,
            the means of the predictor's ``relative_error`` |S - g| / |g| (1 when it predicts nothing) and of
            the ``cosine`` between the two.
        """
        described = [engine.described() for engine in self._engines]
        total: dict[str, Any] = {"steps": described[0]["steps"]}
        for key in ("computing", "waiting", "activation_bytes"):
            total[key] = sum(stats[key] for stats in described)
        edges: dict[str, dict[str, Any]] = {}
        for stats in described:
            for name, edge in stats["edges"].items():
                edges.setdefault(name, {}).update(edge)
        return {**total, "edges": edges}

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leaves the replica; parts that still wait for this one raise `ConnectionLostError`.

        Returns when the other parts have left, too, or after the timeout.
        """
        if self._closed:
            return
        self._closed = True
        broken = not self._engines or any(engine.broken is not None for engine in self._engines)
        for links in self._links:
            if not broken:
                self._engines[0].tell(Message(Kind.CLOSE))
            links.close(broken)
        if self._threads is not None:
            self._threads.close()
        if self._group is not None:
            leave_group(self._group, self._made_group, broken)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._links:
            self._engines[0].fail(error)
        self.close()

    # -- how -------------------------------------------------------------------------------------------------

    def _run(
        self,
        schedule: Schedule,
        micro_batches: int,
        inputs: dict[str, torch.Tensor],
        call: Callable[..., Any],
    ) -> list[Any]:
        """Calls every engine with its inputs."""
        self._check_open()
        with self._reporting_errors():
            batches = [
                cut(self._plan, schedule, engine.parts, micro_batches, inputs) for engine in self._engines
            ]
            if self._threads is None:
                return [call(self._engines[0], batches[0])]
            return self._threads.run([functools.partial(call, batch=batch) for batch in batches])

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("the replica is closed", expected="an open replica", got="a closed one")
        broken = next((engine.broken for engine in self._engines if engine.broken is not None), None)
        if broken is not None:
            raise ConnectionLostError(f"the replica has failed and must start again: {broken}") from broken

    @contextlib.contextmanager
    def _reporting_errors(self, mailbox: Mailbox | None = None) -> Iterator[None]:
        """Reports an error to the other parts; by the mailbox while there is no engine."""
        try:
            yield
        except NonFiniteError:  # on all parts at once; they may continue
            raise
        except BaseException as error:
            if self._engines and self._links:
                self._engines[0].fail(error)
                self.close()
            elif mailbox is not None:
                mailbox.fail(error)
                self.close()
            raise

    def _meet(self) -> int:
        """Compares the parts' graphs; returns the lowest part that has parameters."""
        engine, own = self._engines[0], self.part
        assert own is not None
        graph, shapes = self._plan.described(), engine.modules.shapes
        text = json.dumps({"graph": graph, "shapes": shapes}).encode()
        engine.tell(Message(Kind.HELLO, own, tensor=torch.frombuffer(bytearray(text), dtype=torch.uint8)))
        owners, everything = [own] if any(shapes.values()) else [], dict(shapes)
        for part in range(self.parts):
            if part == own:
                continue
            message = engine.wait_for(Kind.HELLO, part, part, "its graph")
            assert message.tensor is not None
            theirs = json.loads(bytes(message.tensor.tolist()))
            _check_same_graph(graph, theirs["graph"], own, part)
            everything |= theirs["shapes"]
            if any(theirs["shapes"].values()):
                owners.append(part)
        check_parameters(self._plan, everything)
        return min(owners, default=0)


def _check_same_graph(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], own: int, part: int) -> None:
    for here, there in itertools.zip_longest(ours, theirs, fillvalue={"name": "none"}):
        if here == there:
            continue
        expected, got = (
            ", ".join(
                f"{key} {_text(node.get(key))}" for key in here | there if here.get(key) != there.get(key)
            )
            for node in (here, there)
        )
        raise ConfigError(
            f'the graph differs between parts (node "{here["name"]}")',
            expected=f"{expected}, as part {own} has",
            got=f"{got} on part {part}",
        )


def _text(value: Any) -> str:
    """A value of a described graph, as errors show it."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return quoted(value)
    return "none" if value is None else str(value)
