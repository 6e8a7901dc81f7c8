"""A process beside a fleet, at which its machines find each other: torch's store, or hivemind's first peer.

It is none of the machines, so that each of them may be lost.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from fastps.commands.kit import watch_stdin

__all__ = ["main"]


def store() -> tuple[object, str]:
    """The store in which torchrun's elastic agents keep who is there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, f"127.0.0.1:{store.port}"


def swarm() -> tuple[object, str]:
    """A peer of hivemind's hash table that trains nothing."""
    import hivemind

    table = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    return table, str(table.get_visible_maddrs()[0])


#: By the kind of the machines' processes.
KINDS: dict[str, Callable[[], tuple[object, str]]] = {"elastic": store, "hivemind": swarm}


def main(kind: str) -> None:
    """Prints the address, and stays until it is killed."""
    _kept, address = KINDS[kind]()
    print(address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    watch_stdin(lambda _: None, lambda: os.killpg(0, signal.SIGKILL))
    main(sys.argv[1])
