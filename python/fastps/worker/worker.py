"""`Worker`: executes a mode, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from fastps._fastps import Versions
from fastps._shared.checks import at_least, flag, number, words_or_none
from fastps._shared.text import counted, some, table
from fastps._shared.types import Array, File, Rates
from fastps.codecs import Codec, Float32
from fastps.engines import own_rank
from fastps.errors import ConfigError, NonFiniteError
from fastps.modes import Async, Mode
from fastps.parameter_server import ParameterServer, check_ps
from fastps.store import Store
from fastps.worker.arguments import (
    as_rates,
    as_samples,
    check_codec,
    check_float32,
    check_mode,
    check_mode_of,
    check_note,
    check_params,
    of_kind,
    only_rates,
)
from fastps.worker.common import Common
from fastps.worker.exchanges import Exchanges
from fastps.worker.fetches import Fetches
from fastps.worker.gradients import finite
from fastps.worker.halves import computes
from fastps.worker.pushes import Elsewhere, Pushes
from fastps.worker.run.groups import Groups
from fastps.worker.run.notice import note_continuation
from fastps.worker.run.own import Own
from fastps.worker.run.progress import Progress, updates_of
from fastps.worker.run.ramp import Ramp
from fastps.worker.run.reporter import Reporter
from fastps.worker.run.seeds import Seeds
from fastps.worker.run.together import Together
from fastps.worker.run.warm_up import WarmUp
from fastps.worker.state import check_state
from fastps.worker.step import Step
from fastps.worker.steps import Steps
from fastps.worker.tally import Tally

__all__ = ["Worker"]


class Worker:
    """Trains on its own copy of the parameters and stays in step with other workers as its mode defines.

    With `fastps.Local` (Downpour's client) a `step` adds the gradients to a sum and takes a local step
    ``W <- W - lr * g``; every few steps it pushes the sum and fetches the parameters. With `fastps.DiLoCo` a
    step gives the values that the caller's own optimizer has reached; every few steps it pushes the
    difference. With the other modes every step pushes its gradients and fetches new values. A worker is a
    separate client; it registers no tensors and pulls first. It has a place among the workers of its tensors'
    groups; a worker that misses its lease (10 s unless the server sets another) loses its place, and the
    others no longer wait for it.

    Args:
        ps: A `fastps.Store` or the result of `fastps.connect`.
        params: A mapping of names to arrays of the registered shapes. Only names and shapes are used; the
            values are pulled.
        mode: `fastps.Async`, `fastps.Local`, `fastps.Bounded`, `fastps.Sync`, `fastps.DiLoCo`,
            `fastps.Hogwild` or `fastps.WarmStart`.
        codec: The encoding of gradients; None means `fastps.Float32`. The next push includes the error of a
            lossy codec (error feedback) and gradients that a server refused or fenced. Sparse gradients are
            sent as float32.
        copy: False: the worker takes over the memory of `params` and pulls values straight into it. They are
            writable, C-contiguous float32 arrays, buffers or torch CPU tensors. The next fetch overwrites
            what anything else writes there. Such writes raise `ForeignWriteError` for torch tensors, except
            through ``.data`` or a NumPy view; for arrays they go unnoticed.
        on_step: Called with a `Step` at the end of each step.
        accumulate: Steps per push and per fetch; a push is the mean of their gradients. Must be 1 with
            `fastps.Local` and `fastps.DiLoCo`, which have ``push_every`` and ``every``. `flush` pushes each
            gradient times 1 / accumulate.
        rank: Position in the order of workers, from 0; ``Sync(deterministic=True)`` needs it. None: the
            rank that an engine such as torchrun has given this process (`fastps.engines.detect`), if any.
        name: Shown where others wait for this worker, and its client's name in the servers' logs and
            history. None: machine and process, and the name of `ps`.
        wait: False: with `fastps.WarmStart` the constructor returns at once; `ready` is False until the warm
            start is over, and until then `step` and `begin` raise. So it is with ``join_every`` of
            `fastps.Async` until it is this worker's turn to begin. The other modes never wait there.

    Attributes:
        params: The worker's own float32 arrays by name. They change only in `step` and `add_params`; treat
            them as read-only.
        mode: The mode passed to the constructor.

    Raises:
        ConfigError: The mode does not fit these tensors, the group uses another mode, or with ``copy=False``
            two arrays share memory.
        UnavailableError: All places of `fastps.Sync` are taken.
        UnknownTensorError: A name is not registered.
        ShapeError: A shape differs from the registered one.

    Not safe for use by several threads at once.

    >>> store = fastps.Store()
    >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.Adagrad(lr=0.5))
    >>> with fastps.Worker(store, {"w": np.zeros(2, np.float32)}, mode=fastps.Async()) as worker:
    ...     worker.step({"w": np.ones(2, np.float32)})
    ...     worker.params["w"]
    array([-0.5, -0.5], dtype=float32)
    """

    def __init__(
        self,
        ps: ParameterServer,
        params: Mapping[str, Any],
        mode: Mode = Async(),  # noqa: B008 a value
        codec: Codec | None = None,
        *,
        copy: bool = True,
        on_step: Callable[[Step], object] | None = None,
        accumulate: int = 1,
        rank: int | None = None,
        name: str | None = None,
        wait: bool = True,
    ) -> None:
        check_ps(ps)
        check_mode(mode)
        if codec is not None:
            check_codec(codec)
        accumulate = at_least(1, "accumulate", accumulate)
        copy, wait = flag("copy", copy), flag("wait", wait)
        name = words_or_none("name", name)
        if (rank := own_rank(rank)) is not None:
            rank = at_least(0, "rank", rank, 2**32 - 1)
        check_mode_of(ps, params, mode, accumulate)
        then, codec = mode.after_warm_up, Float32() if codec is None else codec
        self.mode = mode
        self.params: dict[str, Array] = {}
        self.has_stepped = False
        self._on_step = on_step
        self._only_rates = only_rates(ps, params)
        # No part refers to the worker, so that it is collected when nothing else does.
        self._ps = own = ps.another(name=name)
        self._tally = tally = Tally()
        self._pushes = pushes = Pushes(own.native, self.params, codec, accumulate, tally)
        views = copy and then.lock_free and isinstance(ps, Store) and ps.address is not None
        self._fetches = fetches = Fetches(own, self.params, views, computes(mode))
        self._progress = Progress(own, lambda: fetches.installed, self.params)
        self._groups = groups = Groups(own.native, rank, name)
        self._together = Together(own, groups, pushes, fetches)
        self._together.refresh_by(self.refresh)
        self._reporter: Reporter | None = None
        if not isinstance(ps, Store):
            names = type(mode).__name__, type(codec).__name__
            self._reporter = Reporter(own.native, groups, tally, *names)
            groups.waits.show = self._reporter.goes_on
        self._own = Own(self, own, groups, self._together, params)
        self._warm_up = warm_up = WarmUp(groups, mode if params else then)
        ramp = Ramp(own, groups, then.join_every if params else None, params, self._reporter)
        common = Common(own.native, self.params, pushes, fetches, self._together, tally)
        self._steps: Steps | Exchanges
        if then.takes_values:
            self._steps = Exchanges(common, mode, is_far=not isinstance(ps, Store))
        else:
            self._steps = Steps(common, mode, accumulate, warm_up, ramp)
        self._seeds: Seeds | None = None
        pushes.note_lost(stacklevel=2)  # from here on losses are counted, not raised
        try:
            if self._reporter is not None:
                self._reporter.joins()
            groups.add(params)
            self._own.join(lambda: warm_up.join(wait))
            # Meanwhile this thread would take no steps of the worker beside this one.
            if not (warm_up.alone or warm_up.waits or (wait and self._own.beside())):
                ramp.begin(wait)
            fetches.installed = fetches.add(params, copy)
            self._steps.start()
            same = self._own.shared()
            alone = groups.present <= 1 or bool(same)
            # Several workers with copies of one model are no accident, two models with one memory each are.
            note_continuation(ps, self.params, fetches.installed, alone, frozenset() if copy else same)
            if not isinstance(ps, Store):  # whose workers share this process's generators
                self._seeds = Seeds(ps, groups)
        except BaseException as error:
            self._give_up(error)
            raise

    def add_params(self, params: Mapping[str, Any], *, copy: bool = True) -> None:
        """Adds parameters from the next step on. Arguments as for `Worker`.

        With `fastps.Local` only these are pulled; with other modes all are, so that the next gradients are
        computed at values that were fetched together.

        Raises:
            ConfigError: The worker already has one of them.
            UnknownTensorError, ShapeError, DTypeError: A name is not registered, has another shape, or is not
                float32.
        """
        self._together.check_open()
        check_params(params)
        twice = sorted(params.keys() & self.params.keys())
        if twice:
            raise ConfigError("the worker already has this tensor", tensor=twice[0], got="a second one")
        check_float32(self._ps, params)
        self._only_rates |= only_rates(self._ps, params)
        self._fetches.watched.check()
        self._steps.land()
        self._pushes.finish()
        groups = self._groups.add(params)
        try:
            self._fetches.add(params, copy)
        except BaseException:
            self._groups.remove(groups)
            raise
        self._steps.added()

    @property
    def versions(self) -> Versions | None:
        """The versions of the values in `params`, for ``push(..., based_on=)``; None if they are unknown.

        They are those of the last fetch that is installed: local steps do not change them. None in a shared
        store with `fastps.Hogwild`, whose values have no versions.

        >>> store = fastps.Store()
        >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
        >>> worker = fastps.Worker(store, {"w": np.zeros(2, np.float32)}, mode=fastps.Async())
        >>> worker.step({"w": np.ones(2, np.float32)})
        >>> worker.versions["w"]
        2
        """
        return self._fetches.installed

    @property
    def staleness(self) -> int | None:
        """Internal: largest staleness of the pushes acknowledged in the last step; None if there are none."""
        return self._tally.acknowledged[0]

    # -- training --------------------------------------------------------------------------------------------

    def step(
        self,
        grads: Mapping[str, Any] | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        samples: float | None = None,
        lr: Rates = None,
        loss: float | None = None,
        note: str | None = None,
    ) -> None:
        """Takes the gradients of one minibatch, computed at `params`; pushes and fetches as the mode defines.

        Args:
            grads: Names to float32 gradients of the parameters' shapes. Tensors without one take no step
                (with `fastps.Sync` all workers must give the same ones). A gradient may be `fastps.Sparse`
                or `fastps.torch.Encoded`, but not with `fastps.Local`. The arrays may be reused after the
                call.
            values: With `fastps.DiLoCo` instead of `grads`: names to the values of all parameters after a
                local step from `params`, which become these. The arrays may be `params` themselves.
            samples: Samples of the minibatch, finite and > 0, by which a mean is weighted with
                ``reduce="weighted"`` of `fastps.DiLoCo` and `fastps.Sync`, whose other ways only count them.
                A contribution without any has weight 1.
            lr: Learning rate of this step's push, or names to rates; None uses the optimizers'.
            loss: Passed to ``on_step``, and shown by ``fastps status``.
            note: What the gradients came from, as for `ParameterServer.push`; of steps that are pushed
                together, the last one's.

        Raises:
            NonFiniteError, ShapeError, DTypeError, ConfigError: A gradient is invalid; nothing was changed.
                Exceptions: gradients whose sum is not finite, and those that a server finds not finite
                because of ``check_finite=False``, were taken and are dropped.
            ForeignWriteError: Something else wrote to the worker's torch tensors (``copy=False``); nothing
                was sent or changed.
            ConfigError: `values` in a mode other than `fastps.DiLoCo`, or gradients in that.
            DeadlineError: Other workers did not arrive in time; the error names those present or behind.
            LeaseError: The worker missed its lease, so the others continued without it; its gradients were
                dropped. It has its place again and has fetched new values. (With `fastps.DiLoCo` only if it
                is unknown what became of its contribution; one that was refused is sent again.)
            FastpsError: A push or fetch failed. The step itself was taken; what was refused goes with the
                next push (with `fastps.Sync` it is dropped: the next gradient is of another version).
        """
        if not self.has_stepped and isinstance(values if grads is None else grads, Mapping):
            self.first_step({}, "fastps.worker_seed(base, ps)")
        lr = as_rates(lr, self.params, self._only_rates)
        if note is not None:
            check_note(note)
        if loss is not None and type(loss) is not float:
            loss = number("loss", loss)
        given = of_kind(self._steps.mode, grads, values, samples)
        self.take(given, samples, lr, loss, note)

    def begin(
        self,
        grads: Mapping[str, Any] | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        samples: float | None = None,
        lr: Rates = None,
    ) -> None:
        """Starts to push some gradients of the next step while others are still computed. With `accumulate`,
        only a step that pushes sends them; until then they are summed.

        With `fastps.Sync` and `fastps.Bounded` a program can compute while it waits for other workers: begin
        with all gradients, do other work until `ready`, then call ``step({})``, which ends the step without
        waiting for another worker. Without `ready`, ``step({})`` waits as ``step(grads)`` does.

        Args:
            grads: As for `step`, which takes the others. The arrays are read until `step` returns.
            values: As for `step`, with `fastps.DiLoCo`.
            samples: As for `step`, with `fastps.DiLoCo`.
            lr: As for `step`.

        Raises:
            ConfigError: The mode is `fastps.Local`.
            FastpsError: As from `step`.
        """
        if self._steps.mode.local_lr is not None:
            raise ConfigError(
                "begin() needs gradients that are pushed",
                expected="a mode other than fastps.Local",
                got=repr(self.mode),
            )
        given = of_kind(self._steps.mode, grads, values, samples)
        self._steps.begin(given, samples, as_rates(lr, self.params, self._only_rates))

    def ready(self) -> bool:
        """Returns whether ``step({})``, after `begin` got all gradients, returns without waiting for others.

        With `fastps.Sync`: the version that the gradients belong to is made, or they were refused. With
        `fastps.Bounded`: the slowest worker is at most `staleness` steps behind. The first call reports the
        step to the servers, so it takes no further gradients. With ``wait=False``: False until a warm start
        is over, and with ``join_every`` of `fastps.Async` until it is this worker's turn to begin. With all
        other modes, and before `begin`: True.

        It never waits for another worker. With `fastps.Bounded` and in a warm start it asks a server, which
        takes one round trip. With a `fastps.Store` it is True as soon as the push that ends the wait returns.
        A thread that runs several workers calls it for each of them: ``a.ready() and b.ready()`` may never
        report the step of b that a waits for.

        Raises:
            FastpsError: A server could not be asked.

        >>> store = fastps.Store()
        >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
        >>> mode, params, ones = fastps.Sync(workers=2), {"w": np.zeros(2)}, {"w": np.ones(2, np.float32)}
        >>> a, b = (fastps.Worker(store, params, mode) for _ in range(2))
        >>> a.begin(ones)
        >>> a.ready()
        False
        >>> b.begin(ones)
        >>> a.ready(), b.ready()
        (True, True)
        >>> a.step({})
        >>> a.params["w"]
        array([-1., -1.], dtype=float32)
        """
        self._together.check_open()
        return self._steps.ready()

    @property
    def global_step(self) -> int:
        """The optimizer steps of all workers that `params` contain, as the servers count them.

        It is the largest step count of any of the tensors, so those that few steps use do not hold it back,
        and a worker that joins late has the same as the others. It is read once, with the servers' optimizer
        state, and then follows the versions that come with pushes and fetches, at no further calls (with
        views of a shared store, it is asked every 20 steps). With `fastps.Sync` a
        round is one step, with `fastps.Local` or `accumulate` each push is one. It is read again after
        `push_model`, `pull_model`, and `assign` or `load_state` of any client in this process; what another
        process assigns counts as a step until this worker calls `pull_model`.

        >>> store = fastps.Store()
        >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
        >>> a, b = (fastps.Worker(store, {"w": np.zeros(2)}, fastps.Async()) for _ in range(2))
        >>> for worker in (a, b, a):
        ...     worker.step({"w": np.ones(2, np.float32)})
        >>> a.global_step, b.global_step  # b has not fetched since
        (3, 2)
        """
        return self._progress.now(self._tally.steps)

    def flush(self) -> None:
        """Pushes all waiting gradients and returns when every push is acknowledged; `params` do not change.

        What error feedback holds, and what was refused or fenced, goes with the next step's push.
        """
        self._together.check_open()
        self._steps.land()
        self._pushes.flush(self._fetches.installed)

    def push_model(self) -> None:
        """Assigns `params` to the servers' tensors; use it after something else wrote to `params`.

        Waiting gradients and residuals belong to the former values and are dropped. The optimizers' state
        stays. Other workers get these values when they fetch, so let one worker do this while the others
        wait.

        Raises:
            NonFiniteError: A value is NaN or infinite; nothing is dropped or assigned.
            FastpsError: An assignment or the fetch after it failed; some tensors may be assigned.

        >>> store = fastps.Store()
        >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
        >>> worker = fastps.Worker(store, {"w": np.zeros(2, np.float32)}, mode=fastps.Async())
        >>> worker.params["w"][...] = 5.0
        >>> worker.push_model()
        >>> store.pull("w")
        array([5., 5.], dtype=float32)
        """
        self.push_values({})

    def push_values(self, exact: Mapping[str, Array]) -> None:
        """Internal: as `push_model`, with these float32 values in place of what `params` show of them."""
        self._together.check_open()
        assigned: dict[str, Any] = {**self.params, **exact}
        for name, values in assigned.items():
            if not finite(np.asarray(values)):
                raise NonFiniteError(
                    "a value is not finite",
                    tensor=name,
                    expected="finite values",
                    got="NaN or infinity",
                    advice="nothing was dropped or assigned",
                )
        self._steps.land()
        self._pushes.rest()
        self._pushes.forget()
        for name, values in assigned.items():
            self._ps.assign(name, values)
        self.pull_model()

    def pull_model(self) -> None:
        """Fetches the servers' values now and overwrites what something else wrote to `params`.

        `global_step` is read again, since the values may be assigned ones.

        Raises:
            FastpsError: The fetch failed.
        """
        self._together.check_open()
        self._steps.restart()
        self._progress.restart()
        self._fetches.watched.note()

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of this worker's own state; waits until no push is in progress or in doubt.

        Returns:
            ``step``: steps taken; ``summed``: local steps whose gradients are in the sum, or with other modes
            1 if there are any; ``sum`` and ``params``: names to arrays (``params`` is empty with modes other
            than `fastps.Local`, whose values are on the server); ``rows``: names to indices and values of
            sparse sums; ``residuals``: as `ErrorFeedback.state_dict`. With `fastps.DiLoCo` also ``begun``:
            the values that the round began from; ``round`` and ``samples``: its steps and their samples;
            ``fragments``: those of each fragment; ``mixing``: the number of the one whose version is to be
            installed, and 1 if that was made without this worker.
        """
        self._steps.land()
        self._pushes.rest()
        return {
            "step": self._tally.steps,
            "params": {n: p.copy() for n, p in self.params.items()} if computes(self._steps.mode) else {},
            **self._pushes.state_dict(),
            **({} if self._steps.rounds is None else self._steps.rounds.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state. Fetches that were in progress when it was saved are not restored.

        With `fastps.DiLoCo` an unfinished round continues if the servers have the values that it began from;
        otherwise it is dropped, and the next one begins at the servers' values.

        Raises:
            ConfigError, ShapeError: The state is of other parameters, or of a mode or codec that this worker
                does not have; nothing is changed.
        """
        self._fetches.watched.check()
        self.check_state(state)
        self._steps.land()
        self._pushes.rest()
        self._fetches.under_way.clear()
        self._progress.restart()
        self._tally.steps = int(state["step"])
        self._steps.load_state_dict(state)
        self._pushes.load_state_dict(state)

    def save(self, path: File) -> None:
        """Writes `state_dict` to a file, completely or not at all. See `load`.

        Args:
            path: The file (NumPy's ``.npz``), replaced if it exists.

        Raises:
            OSError: The file cannot be written.

        >>> import tempfile
        >>> path, store = tempfile.mkdtemp() + "/worker.npz", fastps.Store()
        >>> mode, params, ones = fastps.Async(), {"w": np.zeros(2)}, {"w": np.ones(2, np.float32)}
        >>> store.register("w", np.zeros(2, np.float32), optimizer=fastps.SGD(lr=1.0))
        >>> worker = fastps.Worker(store, params, mode, accumulate=2)
        >>> worker.step(ones)  # the first of two
        >>> worker.save(path)
        >>> other = fastps.Worker(store, params, mode, accumulate=2)
        >>> other.load(path)
        >>> other.step(ones)
        >>> other.params["w"]
        array([-1., -1.], dtype=float32)
        """
        from fastps.worker import file  # slow to import

        file.write(path, self.state_dict())

    def load(self, path: File) -> None:
        """Restores the state from a file of `save`: of this worker before a restart, or of another.

        Parameters and optimizer state are on the server, which may have continued in the meantime.

        Raises:
            DamagedFileError: The file is damaged or another one; nothing is changed.
            ConfigError, ShapeError: As for `load_state_dict`; nothing is changed.
            OSError: The file cannot be read.
        """
        from fastps.worker import file

        self.load_state_dict(file.read(path))

    def stats(self) -> dict[str, Any]:
        """Counters of this worker.

        Returns:
            ``steps``; ``acknowledged``: acknowledged pushes of each tensor, by name; ``lost``: how many of
            those a restarted server lost, by name (a worker counts them and gives a `RuntimeWarning` where
            others raise `VersionsLost`); ``bytes_pushed``: bytes of encoded gradients; ``bytes_saved``: the
            bytes that float32 would have needed in addition; ``rejected``: pushes with a part that was too
            stale or not finite and was dropped; ``samples_contributed``, ``samples_lost``: those given to
            ``step`` with `fastps.DiLoCo` and `fastps.Sync` whose contributions were applied, or dropped;
            ``samples_partial``: those of the former that a worker sent early, since a quorum was in;
            ``scaled``: pushes with a part that was scaled down for its staleness; ``staleness``: histogram as
            a dict from staleness (largest of a push's tensors) to pushes; ``staleness_p50``,
            ``staleness_p99``: None before the first push.
        """
        self._pushes.note_lost(stacklevel=2)
        return self._tally.stats(self.params)

    def close(self) -> None:
        """Calls `flush`, then ends this worker's session (not that of `ps`).

        A `RuntimeWarning` says if something else wrote to torch tensors (``copy=False``) after the last step.
        """
        if self._ps.closed:
            return
        try:
            self._fetches.watched.warn(stacklevel=2)
            self.flush()
            self._groups.leave()
        except BaseException as error:
            self._give_up(error)
            raise
        self._pushes.note_lost(stacklevel=2)
        self._own.closed()
        self._steps.close()
        self._ps.close()

    def __repr__(self) -> str:
        """Shows local knowledge; asks no server."""
        steps, closed = counted(self._tally.steps, "step"), ", closed" * self._ps.closed
        return (
            f'<fastps.Worker "{self._groups.name}" {self.mode!r}, {steps}, '
            f"tensors {some(self.params)}{closed}>"
        )

    def _repr_html_(self) -> str:
        known = {
            "name": self._groups.name,
            "mode": self.mode,
            "steps": self._tally.steps,
            "tensors": some(self.params),
        }
        return table("fastps.Worker", known | ({"state": "closed"} if self._ps.closed else {}))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._give_up(error)

    # -- for the adapters: internal --------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Internal: `close` was called, or an error has closed it."""
        return self._ps.closed

    @property
    def began_alone(self) -> bool:
        """Internal: True if it joined before any other worker, or trains in a warm start."""
        return self._warm_up.alone or self._groups.present == 1

    def is_first(self) -> bool:
        """Internal: True if it joined before all present workers, or trains in a warm start."""
        return self._warm_up.alone or self._groups.is_first()

    def place(self) -> tuple[int, int]:
        """Internal: how many present workers joined before it, at most 8, and how many are present."""
        return self._groups.place()

    def updates(self) -> int:
        """Internal: the updates that the run has taken by now."""
        return updates_of(self._ps, self.params)

    def refresh(self) -> None:
        """Internal: fetches, unless that would undo local steps or hide writes that the next step reports."""
        rounds = self._steps.rounds
        holds = computes(self._steps.mode) if rounds is None else rounds.holds
        if not holds and not self._fetches.watched.written:
            self._steps.restart()

    def refresh_by(self, method: Callable[[], object]) -> None:
        """Internal: calls this method of an adapter, which calls `refresh`, instead of that."""
        self._together.refresh_by(method)

    def keep_residuals(self, elsewhere: Elsewhere) -> None:
        """Internal: an adapter keeps residuals of gradients that it encodes itself."""
        self._pushes.elsewhere = elsewhere

    def count_steps_of(
        self, names: Callable[[], Iterable[str]], trained: Callable[[], frozenset[str]]
    ) -> None:
        """Internal: makes `global_step` the steps of these tensors, some of which are trained now."""
        self._progress.of(names, trained)

    def fetched(self) -> dict[str, Array]:
        """Internal: a copy of the values that the servers have now."""
        return self._fetches.copy()

    def unchanged(self) -> dict[str, Array]:
        """Internal: the servers' values of the tensors of which `params` must have the same ones."""
        return {} if computes(self._steps.mode) else self._fetches.unchanged()

    @property
    def at_version(self) -> bool:
        """Internal: True if values were installed after the last local step."""
        return self._steps.rounds is None or self._steps.rounds.installed

    def check_samples(self, samples: Any) -> None:
        """Internal: raises unless a step can have these samples now."""
        self._together.check_open()
        if samples is not None:
            as_samples(samples)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Internal: raises unless a state of `state_dict` fits."""
        check_state(state, self.params, self._steps.mode, residuals=self._pushes.keeps_residuals)
        if self._steps.rounds is not None:
            self._steps.rounds.check_state(state)

    def first_step(self, states: Mapping[str, str], cure: str) -> None:
        """Internal: at the first step, gives a warning if another process draws the same batches.

        Args:
            states: Digests of generators' states by name, beside those that every process has.
            cure: The call that gives a worker a separate seed.
        """
        self.has_stepped = True
        if self._seeds is not None:
            self._seeds.compare(states, cure, stacklevel=4)

    def take(
        self,
        given: Any,
        samples: float | None,
        lr: Rates,
        loss: float | None,
        note: str | None,
        convert: Callable[[], Mapping[str, Any]] | None = None,
        threads: int = 0,
    ) -> None:
        """Internal: takes a step, whose arguments are checked, and reports it.

        Args:
            given: Gradients or values, as the mode takes.
            samples, lr, loss, note: As for `step`.
            convert: Returns the gradients as `step` takes them, if several calls need that; None: as given.
            threads: How many threads torch has, if those are to do the work instead of the store's.
        """
        if self._reporter is not None:
            self._reporter.begin()
        self._steps.step(given, samples, lr, note, convert, threads)
        if self._reporter is not None:
            self._reporter.end(self._tally.steps, loss)
        if self._on_step is not None:
            rate = max(lr.values(), default=None) if isinstance(lr, Mapping) else lr
            steps, (staleness, sent, scale, momentum) = self._tally.steps, self._tally.acknowledged
            self._on_step(Step(steps, loss, staleness, sent, scale, self.global_step, rate, momentum))

    # -- how -------------------------------------------------------------------------------------------------

    def _give_up(self, error: BaseException) -> None:
        """Leaves the groups after an error without waiting, so that no other worker waits for this one."""
        try:
            try:
                if not self._ps.closed:
                    self._groups.leave(timeout=1.0)
            finally:
                self._own.closed()
                self._steps.close()
                self._ps.close()
        except Exception as late:
            error.add_note(f"closing the worker also failed: {late}")
