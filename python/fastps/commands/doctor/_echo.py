"""The other process of two measurements of `fastps doctor`; run as a file, without the package.

``pipe``: echoes each byte of standard input. ``echo PORT SIZE``: echoes each SIZE bytes of a connection.
``drain PORT``: reads a connection to its end, then answers one byte.
"""

import os
import socket
import sys


def pipe() -> None:
    while byte := os.read(0, 1):
        os.write(1, byte)


def echo(connection: socket.socket, size: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while len(data := connection.recv(size, socket.MSG_WAITALL)) == size:
        connection.sendall(data)


def drain(connection: socket.socket) -> None:
    room = bytearray(1 << 20)
    while connection.recv_into(room):
        pass
    connection.sendall(b".")


if __name__ == "__main__":
    what, *numbers = sys.argv[1:]
    if what == "pipe":
        pipe()
    else:
        with socket.create_connection(("127.0.0.1", int(numbers[0])), timeout=10) as connection:
            if what == "echo":
                connection.settimeout(None)  # MSG_WAITALL needs a blocking socket
                echo(connection, int(numbers[1]))
            else:
                drain(connection)
