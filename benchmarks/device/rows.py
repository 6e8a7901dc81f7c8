"""All measured rows, in the order in which they run."""

from __future__ import annotations

from device import network, stall
from device.row import Row

GPU: list[Row] = [*stall.ROWS, *network.ROWS]
#: Scaling on many cores, without a GPU.
CORES: list[Row] = []
ROWS = {row.name: row for row in [*GPU, *CORES]}
