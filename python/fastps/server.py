"""`serve`: shard servers in this process, with the code of the program ``fastps-server``."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self

from fastps import _fastps
from fastps._shared.checks import (
    as_path,
    flag,
    integer,
    integer_or_none,
    listed,
    number,
    path_or_none,
    seconds_or_none,
    several,
    words,
    words_or_none,
)
from fastps._shared.files import warn_if_shared
from fastps._shared.text import counted, table
from fastps._shared.types import File
from fastps.errors import ConfigError

__all__ = ["Server", "serve"]


class Server:
    """Shard servers in this process, from `serve`.

    Attributes:
        address_list: ``"host:port"`` of each shard, in the order of their indices.
        addresses: The same as one ``str``, ``"host:port,host:port"``. `fastps.connect` takes either, and the
            server itself.
    """

    __slots__ = ("__weakref__", "_native", "address_list", "addresses", "stopped")

    def __init__(self, native: _fastps.Server) -> None:
        self._native = native
        self.stopped = False
        self.address_list: list[str] = native.addresses()
        self.addresses: str = ",".join(self.address_list)
        _servers.add(self)

    def stop(self, timeout: float = 5.0) -> None:
        """Refuses new calls, finishes those in progress, and stops; a second call does nothing.

        Args:
            timeout: Seconds after which connections are closed.

        Raises:
            UnavailableError: The state is not on disk (``data_dir``) and cannot be saved.
            DeadlineError: A thread did not stop in time.
        """
        self._native.stop(timeout)
        self.stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        stopped = ", stopped" * self.stopped
        return f"<fastps.Server {self.addresses}, {counted(len(self.address_list), 'shard')}{stopped}>"

    def _repr_html_(self) -> str:
        state = {"state": "stopped"} if self.stopped else {}
        return table(
            "fastps.Server", {"addresses": self.addresses, "shards": len(self.address_list), **state}
        )


#: The servers of this process that something refers to.
_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def serve(
    shards: int = 1,
    listen: str | Sequence[str] = "127.0.0.1:0",
    *,
    memory_limit: int | None = None,
    lease: float = 10.0,
    refuse_worker: str | Sequence[str] = (),
    tls_cert: File | None = None,
    tls_key: File | None = None,
    tls_ca: File | None = None,
    local: bool = False,
    tokens: File | None = None,
    server_token_file: File | None = None,
    tls_crl: File | None = None,
    audit: File | None = None,
    certificate_role: Literal["reader", "worker", "admin", "server"] = "reader",
    insecure: bool = False,
    listen_unix: File | Sequence[File] = (),
    cluster: str | Sequence[str] = (),
    advertise: str | None = None,
    spin_us: int = 200,
    data_dir: File | None = None,
    snapshot_every: float = 300.0,
    snapshot_after: int = 4,
    keep: int = 2,
    keep_for: float = 0.0,
    keep_history: int = 0,
    copy_to: str | None = None,
    copy_history: bool = False,
    copy_log: float | None = None,
    copy_bytes_per_second: int | None = None,
    owner_lease: float | None = None,
    take_over: str | None = None,
    shard: int | None = None,
    accept_loss: bool = False,
) -> Server:
    """Starts gRPC shard servers on threads of this process, like ``fastps serve``.

    Args:
        shards: Number of shards in this process.
        listen: ``"host:port"`` of the first shard (the others get the next ports), or one address for each.
            Port 0 is any free port. A name with several addresses, such as ``localhost``, means all of them,
            on one port.
        memory_limit: Limit in bytes for tensors, readers and connections; None: 80 % of the memory of the
            machine, or of the smallest limit of the control groups around this process.
        lease: Seconds of silence after which a client's session ends.
        refuse_worker: Names of clients that are refused with a `PermissionDeniedError`. A client chooses its
            name itself: this keeps out a worker that spoils the run, and no attacker.
        tls_cert: Use TLS with this certificate (PEM), followed by its issuers.
        tls_key: Its private key (PEM); a `RuntimeWarning` if other users can read it.
        tls_ca: Require client certificates signed by a CA in this PEM file.
        local: With `tls_ca`: admit processes of this user on this machine without a certificate,
            through a Unix socket, as servers without do. With `tokens` they show a token.
        tokens: Let only callers in that show a token of this file (``fastps token new``), or a certificate
            with a role. Only its owner may read the file, which is read again every 5 s.
        server_token_file: A file with a token of role server, which this process shows to the other servers
            of `cluster`.
        tls_crl: With `tls_ca`: refuse certificates on these lists of revoked ones (CRLs, PEM).
        audit: Append a JSON line to this file for each start, refused credential, registration, removal,
            checkpoint and reload. While it cannot be written, calls of admins are refused.
        certificate_role: With `tls_ca` and without `tokens`: the role of client certificates that name none.
        insecure: Allow addresses other than loopback without TLS, or without `tokens` and `tls_ca`: every
            client may read and change everything.
        listen_unix: Paths of Unix sockets beside the ports, one per shard, for clients of the same user on
            this machine that connect to ``"unix:///path"``. The files are removed when the server stops.
        cluster: Addresses of all shards in the order of their indices, if other processes serve some of them.
        advertise: The address at which others reach this process, if it is not the one it listens on.
        spin_us: Busy-poll time before a shard sleeps, in microseconds (adaptive; 0 disables it; at most 1 s).
            Not used for clients whose pushes wait for the disk.
        data_dir: Keep snapshots and a log in this folder, one subfolder per shard, and start from them; None:
            nothing survives this process.
        snapshot_every: Seconds between snapshots.
        snapshot_after: Also take a snapshot at once when the log since the last one exceeds this multiple of
            the state's size, and 1 MiB; 0 disables that. At twice that and 16 MiB, pushes are refused, and
            repeated by clients, until the snapshot is complete.
        keep: Number of snapshots to keep, at least 1, with the log from the oldest of them on.
        keep_for: Also keep every snapshot younger than this many seconds.
        keep_history: Bytes of snapshots and log that each shard keeps, so that ``fastps rewind`` can go back
            to any moment in them; 0: only what a start may need.
        copy_to: Also copy each snapshot to ``"s3://bucket/prefix"``, with settings from the environment
            (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...), or to ``"file:///folder"``.
        copy_history: With `copy_to` and `keep_history`: copy the history there, too, up to the newest
            snapshot, and keep as much of it there. `history` and `rewind` read it from the URL.
        copy_log: With `copy_to` and `owner_lease`: copy the log there, too, each piece when it is this many
            seconds old (0.05 to 3600; the command line's default is 1) or 8 MiB long, so that a lost machine
            takes little. Each piece costs a put. None: only snapshots are copied.
        copy_bytes_per_second: With `copy_log`: bytes of the log to copy in a second at most, for all shards
            of this process; what comes faster falls behind. None: no limit.
        owner_lease: Seconds after which another server may own a shard whose owner is silent. With it, just
            one of several servers of a shard answers, by a record beside its copies in an S3 bucket
            (`copy_to`), and this call waits until the former owner has ended; Ctrl-C ends the wait. Once
            somebody asks for the shard (``fastps owner --release``), the server stops. None: whichever server
            has the files answers.
        take_over: Take a shard over from the servers that copy to this ``"s3://bucket/prefix"``: wait until
            its owner's lease has ended, then read its newest snapshot and its log into `data_dir`, which is
            empty, and serve. Needs `shard`, `data_dir` and `owner_lease`; copies go to this URL. With a
            `data_dir` that has served the shard this is a restart.
        shard: With `take_over`: the shard, by its place in `cluster`; 0 if there is only one.
        accept_loss: Start with what is readable in `data_dir` even if durable data is missing or damaged.

    Returns:
        A `Server`, to be used as a context manager.

    Raises:
        ConfigError: A port (the error names a server of this process that has it) or the path of a Unix
            socket is in use, an address is not loopback and there is neither TLS with `tokens` or `tls_ca`
            nor `insecure`, an option is invalid, or a file of TLS or of tokens cannot be read.

    >>> with fastps.serve(shards=2) as server, fastps.connect(server.address_list) as ps:
    ...     ps.register("w", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=0.5))
    ...     receipt = ps.push("w", np.ones(3, np.float32))
    ...     ps.pull("w")
    array([-0.5, -0.5, -0.5], dtype=float32)
    """
    tls_key = path_or_none("tls_key", tls_key)
    warn_if_shared(tls_key, stacklevel=2)
    arguments = (
        integer("shards", shards, 0, 2**32 - 1),
        _addresses("listen", listen),
        _paths(listen_unix),
        _addresses("cluster", cluster),
        words_or_none("advertise", advertise),
        integer_or_none("memory_limit", memory_limit),
        number("lease", lease),
        several("refuse_worker", refuse_worker),
        flag("local", local),
        flag("insecure", insecure),
        path_or_none("tls_cert", tls_cert),
        tls_key,
        path_or_none("tls_ca", tls_ca),
        integer("spin_us", spin_us, 0, 1_000_000),
        path_or_none("data_dir", data_dir),
        number("snapshot_every", snapshot_every),
        integer("snapshot_after", snapshot_after, 0, 2**64 - 1),
        integer("keep", keep),
        number("keep_for", keep_for),
        integer("keep_history", keep_history, 0, 2**64 - 1),
        words_or_none("copy_to", copy_to),
        flag("copy_history", copy_history),
        seconds_or_none("copy_log", copy_log),
        integer_or_none("copy_bytes_per_second", copy_bytes_per_second),
        seconds_or_none("owner_lease", owner_lease),
        words_or_none("take_over", take_over),
        None if shard is None else integer("shard", shard, 0, 2**32 - 1),
        flag("accept_loss", accept_loss),
        path_or_none("tokens", tokens),
        path_or_none("server_token_file", server_token_file),
        path_or_none("tls_crl", tls_crl),
        path_or_none("audit", audit),
        words("certificate_role", certificate_role),
    )
    try:
        return Server(_fastps.Server(*arguments))
    except ConfigError as error:
        own = _on_port(error.got)
        if own is None or not error.message.startswith("cannot listen"):
            raise _in_python(error) from None
        raise ConfigError(
            f"cannot listen on port {error.got}",
            expected=error.expected,
            got=error.got,
            advice=f"{own!r} of this process uses it: stop() that, or use fastps.connect({error.got})",
        ) from None


def _in_python(error: ConfigError) -> ConfigError:
    """The same error, with options of the command line as arguments of `serve`."""

    def spelled(text: str | None) -> str | None:
        if text is None:
            return None
        text = re.sub(r"--(insecure|local|accept-loss)\b", r"--\1=True", text)
        return re.sub(
            r"(fastps [a-z][^;()]*)|--([a-z][a-z-]*)(=True)?(?: (?=[A-Z]{2}))?",  # other commands stay
            lambda m: m[1] or m[2].replace("-", "_") + (m[3] or "="),
            text,
        )

    return type(error)(
        spelled(error.message) or "",
        shard=error.shard,
        expected=spelled(error.expected),
        got=spelled(error.got),
        advice=spelled(error.advice),
    )


def _on_port(port: str | None) -> Server | None:
    """The server of this process that listens on a port."""
    of = (server for server in list(_servers) if not server.stopped)
    return next((s for s in of if any(a.rpartition(":")[2] == port for a in s.address_list)), None)


def _paths(paths: File | Sequence[File]) -> list[File]:
    given: list[Any]
    if isinstance(paths, str):
        given = [one.strip() for one in paths.split(",") if one.strip()]
    else:
        given = [paths] if isinstance(paths, os.PathLike) else listed("listen_unix", paths)
    return [as_path("listen_unix", one) for one in given]


def _addresses(argument: str, given: str | Sequence[str]) -> list[str]:
    addresses = given.split(",") if isinstance(given, str) else listed(argument, given)
    return [one for address in addresses if (one := words(argument, address).strip())]
