"""The notice that a worker continues what others have trained."""

from __future__ import annotations

from fastps._fastps import Versions
from fastps._shared.text import ago
from fastps.parameter_server import ParameterServer

__all__ = ["note_continuation"]


def note_continuation(ps: ParameterServer, versions: Versions | None, alone: bool) -> None:
    """Logs one line if the tensors that a worker begins with have changed since they were registered.

    Args:
        ps: The store or servers.
        versions: Of the worker's tensors, or None.
        alone: Log a warning: no worker of another program is present, so these may be the weights of a former
            run.
    """
    updates = max((versions[name] for name in versions), default=1) - 1 if versions is not None else 0
    if updates:
        what = "a model that was trained before" if ps.namespace is None else f"namespace {ps.namespace}"
        import logging  # here, because `import fastps` should bring little

        changes = ps.native.last_changes(list(versions), None) if versions is not None else []
        last = min((seconds for seconds in changes if seconds is not None), default=None)
        when = "" if last is None else f", last change {ago(last)}"
        level = logging.WARNING if alone else logging.INFO
        logging.getLogger("fastps").log(level, "continuing %s: %s updates%s", what, f"{updates:,}", when)
