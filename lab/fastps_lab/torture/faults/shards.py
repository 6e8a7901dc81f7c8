"""Faults of a shard's server and of its connections, by the names of the plan."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import fastps
from fastps.commands.kit.proxy import Proxy
from fastps_lab.torture import tensors
from fastps_lab.torture.servers import Shard
from fastps_lab.torture.witness import Witness

__all__ = ["NET", "SHARD"]

#: Seconds in which a server must be durable again once its folder is back.
RECOVERY = 30.0

Args = Mapping[str, Any]


def _kill(shard: Shard, witness: Witness, args: Args, step: int) -> None:
    witness.push(args, step)
    shard.kill(step)
    shard.start(step)
    witness.call(args, step)


def _lose(shard: Shard, witness: Witness, args: Args, step: int) -> None:
    """Loses the machine with its disk; another one takes the shard over."""
    witness.push(args, step)
    shard.kill(step)
    shutil.rmtree(shard.directory)
    shard.start(step)
    witness.call(args, step)


def _kill_twice(shard: Shard, witness: Witness, args: Args, step: int) -> None:
    """Kills it again as soon as it listens."""
    witness.push(args, step)
    for _ in range(2):
        shard.kill(step)
        shard.start(step)
    witness.call(args, step)


def _terminate(shard: Shard, witness: Witness, args: Args, step: int) -> None:
    witness.push(args, step)
    shard.terminate(signal.Signals[args["signal"]], step)
    shard.start(step)
    witness.call(args, step)


def _stop(shard: Shard, witness: Witness, args: Args, step: int) -> None:
    shard.stop(args["seconds"], step)


def _second(shard: Shard, witness: Witness, args: Args, step: int) -> None:
    shard.second(step)


def _remove_folder(shard: Shard, witness: Witness, args: Args, step: int) -> None:
    """Removes the data directory under a server and makes it again; no other server may take it."""
    shutil.rmtree(shard.directory, ignore_errors=True)
    time.sleep(args["seconds"])
    shard.directory.mkdir(exist_ok=True)
    late = time.monotonic() + RECOVERY
    while not _is_durable(shard):
        if time.monotonic() > late:
            shard.hung(step, f"pushes are not durable {RECOVERY:g} s after the folder came back")
            break
        time.sleep(0.2)
    shard.second(step)


def _is_durable(shard: Shard) -> bool:
    """Returns whether the server confirms a logged push."""
    try:
        with fastps.connect(shard.addresses, timeout=5.0, ack="logged") as ps:
            for name in tensors.PROBES:
                ps.push(name, tensors.zeros(name))
    except fastps.FastpsError:
        return False
    return True


def _cut(proxy: Proxy, args: Args) -> None:
    proxy.cut()


def _cut_after(proxy: Proxy, args: Args) -> None:
    proxy.cut_after(args["bytes"])


def _truncate(proxy: Proxy, args: Args) -> None:
    """Cuts an answer in the middle."""
    proxy.cut_after(args["bytes"], to_server=False)


def _delay(proxy: Proxy, args: Args) -> None:
    proxy.delay = args["delay"]
    time.sleep(args["seconds"])
    proxy.delay = 0.0


def _half_open(proxy: Proxy, args: Args) -> None:
    """Stops all traffic, and then resets the connections."""
    proxy.freeze(True)
    time.sleep(args["seconds"])
    proxy.cut(reset=True)
    proxy.freeze(False)


def _reset(proxy: Proxy, args: Args) -> None:
    proxy.cut(reset=True)


def _stall(proxy: Proxy, args: Args) -> None:
    proxy.stall(True)
    time.sleep(args["seconds"])
    proxy.stall(False)


SHARD: dict[str, Callable[[Shard, Witness, Args, int], None]] = {
    "kill": _kill,
    "lose": _lose,
    "kill_twice": _kill_twice,
    "terminate": _terminate,
    "stop": _stop,
    "second": _second,
    "remove_folder": _remove_folder,
}

NET: dict[str, Callable[[Proxy, Args], None]] = {
    "cut": _cut,
    "cut_after": _cut_after,
    "truncate": _truncate,
    "delay": _delay,
    "half_open": _half_open,
    "reset": _reset,
    "stall": _stall,
}
