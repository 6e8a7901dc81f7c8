"""Measured costs: seconds of gradients, of messages and of parts, in a file that virtual runs read."""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastps.commands.kit import CommandError, replaced

__all__ = ["COMMITTED", "COSTS_VERSION", "Costs", "processor", "read_costs", "write_costs"]

#: The file in the package.
COMMITTED = Path(__file__).with_name("costs.json")
#: Version of the file; raise it when something else is measured.
COSTS_VERSION = 2


@dataclass(frozen=True)
class Costs:
    """Costs on one machine, each the quickest of many calls on one thread.

    Attributes:
        machine: Its processor.
        date: Day of the measurement.
        load: Load of the machine before it.
        gradient: Seconds of the gradient of a batch of 32, by net.
        sample: Seconds for a sample of a portion of 1,000, by net.
        latency: Seconds of each way between a worker and a server.
        bandwidth: Bytes per second between a worker and a server.
        parts: Seconds of a part's forward and backward pass, by net and number of parts.
        message: Of messages between two parts that are processes: ``seconds`` of one without content,
            ``bandwidth`` in bytes per second, and ``end``, seconds of a step beyond its messages.
        two_parts: By net: seconds of the ``quickest`` and the ``median`` step of two parts that are
            processes, and of the computation of one of them while the other one computes (``beside``).
        version: Version of the file.
    """

    machine: str
    date: str
    load: float
    gradient: dict[str, float]
    sample: dict[str, float]
    latency: float
    bandwidth: float
    parts: dict[str, dict[str, float]]
    message: dict[str, float]
    two_parts: dict[str, dict[str, float]]
    version: int = COSTS_VERSION

    @property
    def where(self) -> str:
        """Machine and day, for captions."""
        return f"{self.machine}, {self.date}"


def read_costs(path: Path = COMMITTED) -> Costs:
    """The costs in a file.

    Raises:
        CommandError: The file is missing, damaged, or of another version.
    """
    again = "measure them with fastps-lab repro figures --measure"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        version = found.get("version")
        if version != COSTS_VERSION:
            raise CommandError(f"{path} has costs of version {version!r}, expected {COSTS_VERSION}: {again}")
        return Costs(**found)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CommandError(f"--costs {path} cannot be read ({error}): {again}") from error


def write_costs(costs: Costs, path: Path) -> None:
    """Writes the file, completely or not at all."""
    with replaced(path) as unfinished:
        unfinished.write_text(json.dumps(dataclasses.asdict(costs), indent=1) + "\n")


def processor() -> str:
    """Name of the CPU, and on x86 its generation: the instruction set determines the order of BLAS's sums."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().partition("\n\n")[0].splitlines() if info.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name", platform.machine())
    return f"{name} (family {facts['cpu family']}, model {facts['model']})" if "cpu family" in facts else name
