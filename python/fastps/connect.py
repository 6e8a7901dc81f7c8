"""`connect`: a client of the shards of a parameter server."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, SupportsIndex

from fastps import _fastps
from fastps._shared.addresses import default_addresses
from fastps._shared.checks import (
    flag,
    integer,
    invalid,
    number,
    path_or_none,
    words,
    words_or_none,
)
from fastps._shared.files import warn_if_shared
from fastps._shared.types import File
from fastps.errors import ConfigError, ConnectionLostError, FastpsError
from fastps.parameter_server import ParameterServer
from fastps.server import Server

__all__ = ["Resolver", "connect"]

#: Names the file of the token, where the argument does not.
_TOKEN_FILE = "FASTPS_TOKEN_FILE"

#: The forms in which `connect` takes addresses.
Addresses = str | int | Server | Iterable[str | int]


def _addresses(given: Any) -> str:
    """Addresses as one string; `given` is the argument of `connect`."""
    if isinstance(given, Server):
        return given.addresses
    if isinstance(given, str):
        listed = words("addresses", given).split(",")
    elif isinstance(given, Iterable) and not isinstance(given, bytes):
        listed = [_address(one) for one in given]
    else:
        return _address(given)
    if len(listed) == 2 and ":" not in listed[0]:
        port = listed[1].removeprefix("127.0.0.1:")
        if port.isdecimal():
            pair, got = f"one str, '{listed[0]}:{port}'", f"host and port, {given!r}"
            raise ConfigError("invalid addresses", expected=pair, got=got)
    if len(listed) > 1 and all(len(one) <= 1 for one in listed):
        expected = "server.addresses as it is, a str, or the list server.address_list"
        got = f"the characters of a str, {listed[0]!r}, {listed[1]!r}, ..."
        raise ConfigError("invalid addresses", expected=expected, got=got)
    return ",".join(listed)


def _address(one: Any) -> str:
    if isinstance(one, str):
        return words("addresses", one)
    if isinstance(one, SupportsIndex) and not isinstance(one, bool):
        return f"127.0.0.1:{integer('port', one, 1, 65535)}"
    raise invalid("addresses", "a Server, a port, 'host:port' or a list of these", one)


class Resolver:
    """Internal: a callable that returns addresses; its errors name it."""

    __slots__ = ("ask", "cause")

    #: The exception that the callable raised last, or None.
    cause: Exception | None

    def __init__(self, ask: Callable[[], Addresses]) -> None:
        self.ask = ask
        self.cause = None

    def __call__(self) -> list[str]:
        """The addresses, each ``host:port`` or ``unix:///path``."""
        try:
            given = self.ask()
        except Exception as error:
            self.cause = error
            raise ConnectionLostError(
                f"the resolver {self} raised {type(error).__name__}: {error}"
            ) from error
        self.cause = None
        try:
            listed = _addresses(given).split(",")
        except ConfigError as error:
            raise ConfigError(f"the resolver {self} returned {error}") from error
        return [address for one in listed if (address := one.strip())]

    def __reduce__(self) -> tuple[Any, ...]:
        return Resolver, (self.ask,)

    def __str__(self) -> str:
        kind = type(self.ask)
        module = getattr(self.ask, "__module__", kind.__module__)
        return f"{module}.{getattr(self.ask, '__qualname__', kind.__qualname__)}"


def connect(
    addresses: Addresses | Callable[[], Addresses] | None = None,
    timeout: float = 30.0,
    check_finite: bool = True,
    transport: Literal["tcp", "unix", "shm"] | None = None,
    *,
    tls_ca: File | None = None,
    tls_cert: File | None = None,
    tls_key: File | None = None,
    tls_server_name: str | None = None,
    token_file: File | None = None,
    spin_us: int = 200,
    ack: Literal["applied", "logged", "copied"] = "applied",
    namespace: str | None = None,
    wait: float | None = None,
    name: str | None = None,
) -> ParameterServer:
    """Connects to the shards of a parameter server.

    A client that waits for a server for more than a second logs a warning to the logger ``"fastps"``, once
    per wait; a slow answer of a reachable server is an ``INFO`` record.

    Args:
        addresses: ``"host:port,host:port"`` or a list of ``"host:port"``, in any order; one is enough to find
            the others, each at the address that it reports. Once all shards have answered, addresses that do
            not answer within a second are skipped, such as those of servers that wait for a shard.
            Or the result of `fastps.serve`, which then runs as long as this client exists, or a port of this
            machine, such as 7070.
            ``"unix:///path"`` is a server on this machine that listens on this path (``--listen-unix``); it
            is used only through that socket, without TLS. Shards that are not listed are reached over TCP, so
            list the sockets of all. None: the value of the environment variable ``FASTPS_ADDRESSES``, which
            ``fastps run`` sets; without it, ``127.0.0.1:7070``.

            A callable without arguments (a resolver) returns any of these. It is called again, on a thread of
            its own, while a server does not answer: so a server that restarts at another address is found.
            Pauses grow from .1 to 2 s, and calls keep their deadlines. It may name some shards only. The
            client recognizes a shard by the identity of its cluster and its index. If only servers of
            other clusters answer, twice in a row, the tensors are gone (`FencedError`).
        timeout: Seconds after which a call fails; each method can override it.
        check_finite: Scan gradients for NaN and infinity before anything is sent. False skips that scan:
            servers still refuse slices with such values, but other slices of the same push may be applied by
            then (`PartialPush`).
        transport: ``"tcp"``, ``"unix"`` or ``"shm"`` fixes how gradients and values reach the servers. By
            default, servers of the same user on this machine are reached through shared memory (or a Unix
            socket if they have no memory for that), others over TCP; `ParameterServer.transport` says which
            and why. ``"tcp"`` cannot be combined with ``"unix:///path"``.
        spin_us: Busy-poll time before a call sleeps, in microseconds (adaptive; 0 disables it; at most 1 s).
            Polling shortens calls and occupies a core.
        ack: The meaning of a receipt. ``"applied"``: the push is in the server's memory. ``"logged"``: it is
            also in the server's log on disk (``--data-dir``), so it survives a crash of the process or
            machine; a push then waits for the disk. ``"copied"``: it is also in the copy of that log in a
            bucket (``--copy-log``), so it survives the loss of the machine; a push then waits for two
            requests to the bucket, which all that come meanwhile share. Of `hogwild` tensors only snapshots
            survive.
        namespace: Separate names for tensors, groups and portions, so that several runs can use one server:
            1 to 64 of a-z, A-Z, 0-9, ``.``, ``_``, ``-``. None: no namespace; the names of namespace ``a``
            then begin with ``run:a/``. ``fastps ls`` and ``fastps rm`` list and free namespaces.
        wait: Seconds to wait for servers that do not answer yet, such as ones that start later; None: as long
            as `timeout`.
        name: The client's name in logs and statistics of the servers, at most 256 bytes; None: ``"pid N"``.
            Control, bidirectional and invisible characters in it are escaped.
        tls_ca: Use TLS, and trust servers whose certificate is signed by a CA in this PEM file.
        tls_cert: This client's certificate (PEM), followed by its issuers, for servers that require one.
        tls_key: Its private key (PEM); a `RuntimeWarning` if other users can read it.
        tls_server_name: The name in the servers' certificates, if it is not the host of their address.
        token_file: A file with the token to show (``fastps token new``), for servers with ``--tokens``. Only
            its owner may read it. It is read again for each new connection. Without TLS the token is sent to
            servers on loopback and on Unix sockets only. None: the file in the environment variable
            ``FASTPS_TOKEN_FILE``, if it is set.

    Returns:
        A `ParameterServer`, to be used as a context manager. It can be pickled (for ``spawn``) if its
        resolver can; the copy connects when first used.

    Raises:
        ConnectionLostError, DeadlineError: No server could be reached; the error lists the addresses. Or the
            resolver raised (its exception is the cause) or did not return. Later the client asks it again
            until the call's deadline, and the call's error says so.
        PermissionDeniedError: A server's certificate is not trusted, a server rejects this client's
            certificate, only one end uses TLS, or a Unix socket belongs to another user.
        UnauthenticatedError: A server asks for a token, and there is none, or it is unknown or expired.
        CapacityError: This process cannot open more files, or a server has no memory for another client.
        ConfigError: An address or option is invalid, a TLS file cannot be read, others can read the token's
            file, a token would be sent to another machine without TLS, a server keeps no log for
            ``ack="logged"``, or does not copy it for ``ack="copied"``.

    >>> with fastps.serve() as server:
    ...     with fastps.connect(lambda: server.address_list, namespace="exp1") as ps:
    ...         ps.names()
    []
    """
    resolver = Resolver(addresses) if callable(addresses) else None
    source = None
    if resolver is not None:
        text = str(resolver)
    elif addresses is None:
        text, source = default_addresses()
    else:
        text = _addresses(addresses)
    tls_key = path_or_none("tls_key", tls_key)
    warn_if_shared(tls_key, stacklevel=2)
    options: dict[str, Any] = {
        "timeout": number("timeout", timeout),
        "check_finite": flag("check_finite", check_finite),
        "transport": words_or_none("transport", transport),
        "spin_us": integer("spin_us", spin_us, 0, 1_000_000),
        "ack": words("ack", ack),
        "tls_ca": path_or_none("tls_ca", tls_ca),
        "tls_cert": path_or_none("tls_cert", tls_cert),
        "tls_key": tls_key,
        "tls_server_name": words_or_none("tls_server_name", tls_server_name),
        "token_file": path_or_none("token_file", token_file) or os.environ.get(_TOKEN_FILE) or None,
    }
    if namespace is not None:
        options["namespace"] = words("namespace", namespace)
    if resolver is not None:
        options["resolver"] = resolver
    if wait is not None:
        options["wait"] = number("wait", wait)
        if not 0 <= options["wait"] < math.inf:
            raise invalid("wait", "a finite number of seconds >= 0", wait)
    if name is not None:
        options["name"] = words("name", name)
    try:
        native = _fastps.connect(text, **options)
    except FastpsError as error:
        if source is not None:
            error.args = (f"{error} ({_fastps.without_secrets(text)} is {source})",)
        if resolver is not None and resolver.cause is not None:
            raise error from resolver.cause
        raise
    return ParameterServer(native, (text, options), addresses if isinstance(addresses, Server) else None)
