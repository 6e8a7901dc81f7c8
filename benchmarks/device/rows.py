"""All measured rows, in the order in which they run."""

from __future__ import annotations

from cores import cluster, disk, parts, shared, threads
from device import encoders, network, stall
from device.row import Row

GPU: list[Row] = [*encoders.ROWS, *stall.ROWS, *network.ROWS]
#: Scaling on many cores, without a GPU.
CORES: list[Row] = [*threads.ROWS, *shared.ROWS, *cluster.ROWS, *parts.ROWS, *disk.ROWS]
ROWS = {row.name: row for row in [*GPU, *CORES]}
