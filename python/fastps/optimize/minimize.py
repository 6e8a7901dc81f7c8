"""`minimize`: batch optimization of tensors that stay on the shards."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastps._shared.checks import as_seconds, flag, integer, invalid, several, words
from fastps.errors import ConfigError, FastpsError, FencedError
from fastps.optimize.batches import Batches, LocalReplica
from fastps.optimize.coordinator import Coordinator
from fastps.optimize.lbfgs import LBFGS
from fastps.optimize.line_search import StrongWolfe, is_number
from fastps.optimize.method import COMMON, Method
from fastps.optimize.objective import Objective, Task, shapes_of
from fastps.optimize.result import OptimizeResult
from fastps.optimize.state import Limits, Problem, State
from fastps.optimize.vectors import Vectors
from fastps.parameter_server import ParameterServer, check_ps

__all__ = ["minimize"]

#: Relative error of a function's values, by dtype.
_EPS = {"float32": 1e-7, "float64": 1e-14}
_PORTIONS, _MOST_PORTIONS = 64, 65_536


def minimize(
    ps: ParameterServer,
    names: Sequence[str],
    objective: Objective | None = None,
    *,
    samples: int,
    method: Method = LBFGS(history_size=10),  # noqa: B008 a value
    line_search: StrongWolfe = StrongWolfe(c1=1e-4, c2=None),  # noqa: B008 a value
    portions: int | None = None,
    space: str = "minimize",
    l2: float = 0.0,
    tol: float = 1e-5,
    max_iterations: int = 200,
    max_evaluations: int = 1000,
    callback: Callable[[OptimizeResult], Any] | None = None,
    check_gradient: bool = False,
    resume: bool = False,
    min_replicas: int = 1,
    timeout: float | None = None,
) -> OptimizeResult:
    """Minimizes a function of registered tensors over a whole data set: DistBelief's Sandblaster (Dean et
    al., NIPS 2012, section 4.2).

    The function is ``f(w) = (sum of the samples' losses) / samples + l2 / 2 |w|^2``, where |w|^2 is the sum
    over all `names`. This call coordinates: it commands vectors on the shards and holds only scalars, never
    an array. Replicas compute losses and gradients of portions of the samples: one here (`objective`), or any
    number on other threads (`Replica`). They may join, leave, fail or stall; slow portions are computed
    twice, and count once. No sum depends on the order of its terms, so the same problem gives the same bits
    for any number of replicas.

    The tensors change only when an iteration is accepted: a pull or a checkpoint never sees a trial point,
    and whatever fails leaves the best point so far. Meanwhile nothing else may push or assign to them.

    Args:
        ps: A `fastps.Store`, or what `fastps.connect` returns.
        names: Names of the tensors: ``apply="exact"``, of one dtype.
        objective: ``objective(params, indices) -> (loss, gradients)``, as for `Replica`, to be computed in
            this process; None: `Replica` objects compute it.
        samples: Number of samples.
        method: `LBFGS`, `CG` or `GradientDescent`.
        line_search: When a step is good enough.
        portions: Number of portions that the samples are cut into, 1 to 65,536, at most `samples`; portion p
            of P is samples floor(p S / P) to floor((p + 1) S / P). Choose 8 to 16 per replica that there may
            be. The bits of the result depend on it. None: 64, or `samples` where these are fewer.
        space: Name of the space of vectors; replicas need the same.
        l2: Factor of |w|^2 / 2, >= 0; the shards add it.
        tol: Largest magnitude of an element of the gradient at which the run has succeeded. A run also ends
            with success where rounding hides whatever is lower.
        max_iterations: Most iterations.
        max_evaluations: Most evaluations of the function and its gradient.
        callback: Called at the start and after each iteration with the result so far; stops the run after
            an iteration, as in scipy, if it returns True or raises StopIteration.
        check_gradient: Compare the gradient of each tensor at the first point with differences of the
            function. Takes 2 to 12 evaluations per tensor, and memory for the tensors in this process. A
            wrong gradient raises before any step, and the space is closed.
        resume: Go on where a former call with the same arguments was interrupted, from its last accepted
            point, with the same bits.
        min_replicas: Replicas that must be present before samples are dealt.
        timeout: Seconds to wait for replicas or for the next portion of a batch; None: no limit. A call
            of `objective` that takes longer continues on its own thread.

    Returns:
        `OptimizeResult`. A limit, or a search that finds nothing lower where the gradient promises it,
        returns ``success=False``; `message` says what to do.

    Raises:
        UnknownTensorError: There is no tensor of a name.
        ConfigError: An argument is invalid; a tensor is ``hogwild``, or dtypes differ; the space has a
            coordinator or other vectors; `resume` finds nothing, or the state of something else; the
            objective is of other names or samples, or returned something else, such as a mean instead of a
            sum; or its gradient of a tensor is wrong (`check_gradient`).
        ShapeError, DTypeError: The objective returned a gradient of another shape or dtype.
        NonFiniteError: The loss or a gradient is not finite at the first point, or too large. (Later the
            search steps back.)
        CapacityError: A shard has no memory for the vectors; none keeps any.
        DeadlineError: Nothing came from replicas within `timeout`.
        FencedError: Another coordinator has taken over.
        ConnectionLostError, UnavailableError, DeadlineError: The servers could not be reached; call again
            with ``resume=True``.

    >>> store = fastps.Store()
    >>> store.register("w", np.zeros(2), optimizer=fastps.SGD(lr=1.0))
    >>> targets = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> def objective(params, indices):
    ...     away = params["w"] - targets[indices]
    ...     return (away**2).sum(), {"w": 2 * away.sum(axis=0)}
    >>> result = fastps.optimize.minimize(store, ["w"], objective, samples=2)
    >>> result.success, result.fun, store.pull("w")
    (True, 2.0, array([2., 3.]))
    """
    check_ps(ps)
    if isinstance(names, str):
        raise invalid("names", "a list of names", names)
    names = several("names", names)
    for name, function in (("objective", objective), ("callback", callback)):
        if function is not None and not callable(function):
            raise invalid(name, "a function, or None", function)
    words("space", space)
    samples = integer("samples", samples, 1, 2**62)
    most = min(_MOST_PORTIONS, samples)
    portions = min(_PORTIONS, most) if portions is None else integer("portions", portions, 1, most)
    if not isinstance(method, Method):
        raise invalid("method", "LBFGS(...), CG(...) or GradientDescent()", method)
    if not isinstance(line_search, StrongWolfe):
        raise invalid("line_search", "StrongWolfe(...)", line_search)
    # Here, since nothing is open yet: the method's c2 may not suit the c1 that was given.
    rule = line_search if line_search.c2 is not None else dataclasses.replace(line_search, c2=method.c2)
    for name, value in (("l2", l2), ("tol", tol)):
        if not is_number(value) or not 0 <= value < math.inf:
            raise invalid(name, "a finite number >= 0", value)
    limits = Limits(
        float(tol),
        integer("max_iterations", max_iterations, 0, 2**62),
        integer("max_evaluations", max_evaluations, 1, 2**62),
    )
    flag("check_gradient", check_gradient)
    flag("resume", resume)
    min_replicas = integer("min_replicas", min_replicas, 1, 65_536)
    timeout = None if timeout is None else as_seconds("timeout", timeout)
    shapes, dtype = shapes_of(ps, names)
    if objective is not None:
        Task(objective, shapes, dtype, samples, portions)  # compares names and samples
    size = sum(math.prod(shape) for shape in shapes.values())
    problem = Problem(samples, portions, float(l2), _EPS[dtype.name], size)
    # The names are those of the space.
    settings = f"samples={samples}, portions={portions}, l2={problem.l2}, {method}, {line_search}"
    v = Vectors(ps, names, [*COMMON, *method._vectors], space=space)
    local = None if objective is None else LocalReplica(ps, objective, space)
    batches = Batches(v, samples, portions, min_replicas, timeout, local)
    coordinator = Coordinator(v, batches, problem, method, rule, limits, settings, callback)
    with local or contextlib.nullcontext(), _ending(v, coordinator):
        stored = _stored(v, settings) if resume else None
        return coordinator.run(stored, check_gradient)


def _stored(v: Vectors, settings: str) -> State:
    """Returns the state that the interrupted call stored."""
    if v.stored is None:
        raise ConfigError(
            f'nothing to resume in space "{v.space}"',
            expected="a stored run",
            got="none",
            advice="call minimize without resume=True",
        )
    state = State.from_json(v.stored)
    if state.settings != settings:
        raise ConfigError(
            f'the run of space "{v.space}" had other settings', expected=state.settings, got=settings
        )
    return state


@contextlib.contextmanager
def _ending(v: Vectors, coordinator: Coordinator) -> Iterator[None]:
    """Closes the space, unless a call with ``resume=True`` can continue from it."""
    try:
        yield
    except FencedError:
        v.leave()
        raise
    except BaseException as error:
        if coordinator.is_refused or (coordinator.state is None and v.stored is None):
            with contextlib.suppress(FastpsError):  # the error that ends the run says more
                v.close()
            raise
        v.leave()
        if coordinator.state is not None:
            error.add_note(
                f"iteration {coordinator.state.iteration} of the minimization is the tensors' value; "
                "minimize(..., resume=True) continues from there, fastps.optimize.drop(ps, "
                f'"{v.space}") gives up and lets others push'
            )
        raise
    else:
        v.close()
