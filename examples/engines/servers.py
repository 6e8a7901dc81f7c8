"""Servers that another program waits for: writes their addresses, and runs until SIGTERM.

Needs no extra.

    python examples/engines/servers.py FILE DIR [HOST]

FILE gets the addresses once the servers listen; a FIFO (mkfifo) wakes its reader then. DIR keeps their state:
servers that start with it again, on any host, continue. With HOST, an address or a name of this machine,
other machines reach them, without TLS: only in a network that you trust.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import fastps


def main(file: str, folder: str, host: str = "127.0.0.1") -> None:
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with fastps.serve(shards=2, listen=f"{host}:0", data_dir=folder, insecure=True) as server:
        Path(file).write_text(server.addresses)
        signal.sigwait(signals)


if __name__ == "__main__":
    main(*sys.argv[1:])
