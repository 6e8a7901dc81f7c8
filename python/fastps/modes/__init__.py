"""Modes: how a worker and the parameter server keep together. A mode is a value; `Worker` executes it.

What `Worker` asks of each: ``push_every`` and ``pull_every``, in steps; ``overlap``: fetched values are
installed ``pull_every`` steps later; ``_local_lr``: the rate of local steps, None without them;
``_correction()``.
"""

from __future__ import annotations

from fastps.modes.asynchronous import Async
from fastps.modes.local import Local

__all__ = ["Async", "Local", "Mode"]

Mode = Async | Local
