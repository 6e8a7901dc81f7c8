"""`run`: a simulated run of a real store, from its arguments to its trace."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from fastps._shared.checks import as_moment, as_seconds, at_least, integer, invalid
from fastps._shared.types import Array
from fastps.codecs import Codec
from fastps.errors import ConfigError
from fastps.modes import Async, Mode
from fastps.simulate.durations import Durations, Exponential, times_of
from fastps.simulate.events import Event, Join, check_events
from fastps.simulate.plan import Gradient, Plan
from fastps.simulate.simulation import Simulation
from fastps.simulate.trace import Trace
from fastps.store import Store
from fastps.worker.arguments import check_mode, check_params

__all__ = ["run"]

#: Maximum number of events that the warning lists.
_MAX_LISTED_EVENTS = 8


def run(
    store: Store,
    params: Mapping[str, Any],
    gradient: Gradient,
    *,
    workers: int,
    mode: Mode = Async(),  # noqa: B008 a value
    codec: Codec | None = None,
    durations: Durations = Exponential(1.0),  # noqa: B008 a value
    delay: float = 0.0,
    events: Iterable[Event] = (),
    lease: float = 10.0,
    updates: int,
    every: tuple[int, Callable[[dict[str, Array]], Any]] | None = None,
    seed: int = 0,
) -> Trace:
    """Trains a store with logical workers under a virtual clock, in this thread.

    Each logical worker is a separate `fastps.Worker`, so modes, codecs and the store are the real ones. A
    worker's step begins when it has fetched; its duration later the gradient is computed, at the worker's
    stale values, pushed, and new values are fetched. With `fastps.Sync`, `fastps.DiLoCo` and `fastps.Bounded`
    the worker then waits for others in virtual time, in which a grace passes, too. The run is the same, bit
    for bit, each time that it is repeated with a store that was prepared in the same way, as far as the
    gradient function is.

    Args:
        store: A store of this process with the tensors registered. It holds the result.
        params: Names to arrays of the registered shapes, as for `fastps.Worker`.
        gradient: ``gradient(params, worker, step, rng)`` returns names to float32 gradients, or those and the
            loss. `params` are the worker's values, not to be changed; `step` counts from 1; `rng` draws the
            same numbers for this worker and step, whatever else happens. With `fastps.DiLoCo` it returns the
            values after a local step instead of gradients.
        workers: Logical workers, >= 1; with ``Sync(workers=n, backup=b)``, from n to n + b.
        mode: Any mode but `fastps.Hogwild`, whose races need real threads.
        codec: As for `fastps.Worker`.
        durations: Virtual seconds that a gradient takes: `Exponential`, `Pareto`, `Constant` or a number; a
            list with one of these for each worker (those that join included); a table with a row of seconds
            for each worker, which is repeated; or a function ``durations(worker, step, rng)``.
        delay: Virtual seconds of each way between a worker and the store; a step takes two.
        events: `Kill`, `Pause` and `Join`.
        lease: Virtual seconds after which a killed or paused worker loses its place; `math.inf`: never.
        updates: The run ends when the store has made this many updates: pushes that were applied, or with
            `fastps.Sync` and `fastps.DiLoCo` versions, of any fragment.
        every: ``(n, evaluate)``: at the start, after every n updates and at the end, ``evaluate(values)`` is
            called with the store's values; the trace has the results.
        seed: Of durations and of the gradient function's `rng`, 0 to 2**64 - 1.

    Returns:
        A `Trace`. If no workers are left before the updates are made, its `complete` is False, and a
        `RuntimeWarning` lists the events that ended them.

    Raises:
        ConfigError: An argument is invalid, or the store or the mode needs real workers; nothing happened.
        GradientError: `gradient` raised, or returned no gradients; names worker, step and virtual time.
        DeadlockError: Workers wait and nothing will end that; names who waits for whom.
        FastpsError: A push was refused, for example because a gradient has a wrong shape, an unknown name or
            NaN; the text ends with worker, step and virtual time.

    After an error the store keeps the updates made so far, and the logical workers have left it.
    """
    _check_store(store)
    workers = at_least(1, "workers", workers)
    _check_mode(mode, workers)
    if codec is not None and not isinstance(codec, Codec):
        raise invalid("codec", "a codec, such as fastps.Int8()", codec)
    if not callable(gradient):
        raise invalid("gradient", "a function", gradient)
    check_params(params)
    if not params:
        raise invalid("params", "at least one tensor", dict(params))
    known = check_events(events, workers)
    most = workers + sum(isinstance(event, Join) for event in known)
    seed = integer("seed", seed)
    plan = Plan(
        gradient=gradient,
        workers=workers,
        mode=mode,
        codec=codec,
        times=times_of(durations, most, seed),
        delay=as_moment("delay", delay),
        events=known,
        lease=math.inf if isinstance(lease, float) and lease == math.inf else as_seconds("lease", lease),
        updates=at_least(1, "updates", updates),
        every=_every(every),
        seed=seed,
        settings=_settings(workers, mode, codec, durations, delay, seed),
    )
    simulation = Simulation(store, params, plan)
    try:
        trace = simulation.run()
    finally:
        simulation.leave()
    if not trace.complete:
        warnings.warn(_incomplete(trace, plan.updates), RuntimeWarning, stacklevel=2)
    return trace


def _incomplete(trace: Trace, updates: int) -> str:
    """Why a run ended early."""
    fates = [f"{effect} at {time:.6g}" for time, _, effect in trace.events if "lost its place" not in effect]
    more = f", and {len(fates) - _MAX_LISTED_EVENTS} more events" if len(fates) > _MAX_LISTED_EVENTS else ""
    return (
        f"the simulated run is not complete: expected {updates} updates, got {trace.updates}; {trace.ended} "
        f"({'; '.join(fates[:_MAX_LISTED_EVENTS])}{more}); kill fewer workers, or let others join"
    )


def _check_store(store: Any) -> None:
    """Raises unless the store belongs to this process only."""
    if isinstance(store, Store) and store.address is None:
        return
    got = "a shared store" if isinstance(store, Store) else type(store).__name__
    raise ConfigError(
        "invalid store",
        expected="a fastps.Store of this process only",
        got=got,
        advice="with servers and shared stores use real workers (fastps.Worker)",
    )


def _check_mode(mode: Any, workers: int) -> None:
    check_mode(mode)
    then = mode.after_warm_up
    if then.lock_free:
        raise ConfigError(
            "invalid mode",
            expected="a mode whose pushes come one after the other",
            got=f"{mode!r}, whose races one thread cannot show",
            advice="use real workers (fastps.Worker in threads)",
        )
    least, most = then.least_workers, then.most_workers
    if most is not None and not least <= workers <= most:
        raise invalid("workers", f"from {least} to {most} workers for {then}", workers)


def _every(every: Any) -> tuple[int, Callable[[dict[str, Array]], Any]] | None:
    if every is None:
        return None
    if not isinstance(every, tuple) or len(every) != 2 or not callable(every[1]):
        raise invalid("every", "(updates, function) or None", every)
    return at_least(1, "every", every[0]), every[1]


def _settings(
    workers: int, mode: Mode, codec: Codec | None, durations: Any, delay: float, seed: int
) -> dict[str, str]:
    """The arguments that a reader of the trace wants to know."""
    table = isinstance(durations, (np.ndarray, list, tuple))
    named = getattr(durations, "__name__", repr(durations))
    return {
        "workers": str(workers),
        "mode": repr(mode),
        "codec": "float32" if codec is None else repr(codec),
        "durations": "per worker" if table else named,
        **({"delay": repr(float(delay))} if delay else {}),
        "seed": str(seed),
    }
