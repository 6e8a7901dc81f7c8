"""The numbers of threads, processes and shards that a row measures."""

from __future__ import annotations

import os
from collections.abc import Iterable

from device.row import Setting


def up_to_cores(counts: Iterable[int], setting: Setting) -> list[int]:
    """Those counts for which this process has cores; a rehearsal has at most two."""
    cores = len(os.sched_getaffinity(0))
    return [count for count in counts if count <= (min(2, cores) if setting.small else cores)]
