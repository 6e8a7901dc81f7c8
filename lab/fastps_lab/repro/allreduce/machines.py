"""Two machines on this one: network namespaces with a shaped cable between them (Linux, root)."""

from __future__ import annotations

import os
import shutil
import subprocess

from fastps.commands.kit import Closing, CommandError

__all__ = ["CABLE", "Machines"]

#: Name of the cable's end in each namespace.
CABLE = "cable"


class Machines(Closing):
    """Network namespaces, one for each machine.

    Args:
        rate: Bandwidth of the cable in each direction, in Mbit/s.

    Attributes:
        hosts: The machines' addresses.

    Raises:
        CommandError: This process may not make namespaces, or iproute2 is missing.
    """

    def __init__(self, rate: float) -> None:
        self.hosts = ["10.77.9.1", "10.77.9.2"]
        self._names = [f"fastps-repro-{os.getpid()}-{machine}" for machine in range(2)]
        if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
            raise CommandError(f"two machines need {' and '.join(missing)} (iproute2)")
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
            first, second = self._names
            cable = ("link", "add", CABLE, "netns", first, "type", "veth", "peer", "name", CABLE)
            _run("ip", *cable, "netns", second)
            for name, host in zip(self._names, self.hosts, strict=True):
                _run("ip", "-n", name, "address", "add", f"{host}/24", "dev", CABLE)
                for device in ("lo", CABLE):
                    _run("ip", "-n", name, "link", "set", device, "up")
                shape = ("tbf", "rate", f"{rate:g}mbit", "burst", "256kb", "latency", "100ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", CABLE, "root", *shape)
        except BaseException:
            self.close()
            raise

    def inside(self, machine: int) -> list[str]:
        """The beginning of a command that runs on a machine."""
        return ["ip", "netns", "exec", self._names[machine]]

    def bytes_sent(self) -> int:
        """Bytes that have left both machines."""
        counter = f"/sys/class/net/{CABLE}/statistics/tx_bytes"
        return sum(int(_run(*self.inside(machine), "cat", counter)) for machine in range(2))

    def close(self) -> None:
        """Removes the namespaces, and so the cable."""
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommandError(f"two machines need root: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
