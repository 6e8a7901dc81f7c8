"""A notice when a worker begins with tensors that have taken steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fastps._fastps import Versions
from fastps._shared.kept import is_kept
from fastps._shared.text import ago, some
from fastps._shared.types import Array
from fastps.parameter_server import ParameterServer
from fastps.worker.run.progress import updates_of

__all__ = ["note_continuation"]


def note_continuation(
    ps: ParameterServer,
    params: Mapping[str, Array],
    versions: Versions | None,
    alone: bool,
    shared: Collection[str],
) -> None:
    """Logs one line if the tensors that a worker begins with have taken steps, or are another model's.

    Args:
        ps: The store or servers.
        params: The worker's arrays.
        versions: Of their tensors, or None.
        alone: Log a warning: no worker of another program is present, so these may be the weights of a former
            run.
        shared: The tensors that another model of the same thread has, too.
    """
    if updates := _updates(ps, versions):
        what = "a model that was trained before" if ps.namespace is None else f"namespace {ps.namespace}"
        import logging  # here, because `import fastps` should bring little

        changes = ps.native.last_changes(list(params), None)
        last = min((seconds for seconds in changes if seconds is not None), default=None)
        when = "" if last is None else f", last change {ago(last)}"
        level = logging.WARNING if alone else logging.INFO
        logging.getLogger("fastps").log(level, "continuing %s: %s updates%s", what, f"{updates:,}", when)
    elif shared:
        import logging

        logging.getLogger("fastps").warning(
            "two open workers of this thread train the same tensors, as one model: %s. Another model needs "
            "names of its own (prefix=... of ParameterServerOptimizer)",
            some(sorted(shared)),
        )


def _updates(ps: ParameterServer, versions: Versions | None) -> int:
    """Optimizer steps of the tensor that has taken the most; 0 for what fastps keeps beside a model."""
    if versions is None or max((versions[name] for name in versions), default=1) == 1:
        return 0
    names = versions.names()
    return 0 if is_kept(ps.spec(names[0]).group) else updates_of(ps, names)
