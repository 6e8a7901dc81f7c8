"""``fastps ls`` and ``fastps rm``: what a cluster holds, by namespace, and how to free it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastps._shared.process import EXIT_OK, CommandError
from fastps._shared.text import ago
from fastps.connect import connect
from fastps.parameter_server import ParameterServer, TensorSpec

__all__ = ["Listed", "add_addresses", "add_arguments", "add_namespace", "listed", "ls", "rm"]

#: Prefix of the names of a namespace's tensors on the servers.
_MARK = "run:"
#: Bytes of an element.
_BYTES = {"float32": 4, "float64": 8}


class Listed(NamedTuple):
    """A tensor on the servers.

    Attributes:
        namespace: Its namespace, or None.
        spec: Its description, with its name in the namespace.
        version: The smallest version of its slices.
        bytes: Of its values; optimizer state comes on top.
        changed: Seconds since it last changed; None if it has not changed since the servers' start.
    """

    namespace: str | None
    spec: TensorSpec
    version: int
    bytes: int
    changed: float | None


def listed(ps: ParameterServer) -> list[Listed]:
    """All tensors of a client without a namespace, by namespace and name."""
    names = ps.names()
    versions = ps.versions(names)
    found = []
    for name, changed in zip(names, ps.native.last_changes(names, None), strict=True):
        spec = ps.spec(name)
        namespace, own = None, name
        if name.startswith(_MARK) and "/" in name:
            namespace, _, own = name.removeprefix(_MARK).partition("/")
        spec = dataclasses.replace(spec, name=own)
        size = math.prod(spec.shape) * _BYTES[spec.dtype]
        found.append(Listed(namespace, spec, versions[name], size, changed))
    return sorted(found, key=lambda one: (one.namespace or "", one.spec.name))


def add_addresses(parser: argparse.ArgumentParser) -> None:
    """The argument for the addresses of running servers."""
    parser.add_argument(
        "addresses",
        nargs="?",
        metavar="ADDRESSES",
        help="host:port of each shard, separated by commas (default: FASTPS_ADDRESSES, else 127.0.0.1:7070)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that both commands have."""
    add_addresses(parser)
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="seconds to wait for an answer (30)"
    )
    tls = parser.add_argument_group("TLS")
    tls.add_argument("--tls-ca", metavar="FILE", help="the CA that signed the servers' certificates")
    tls.add_argument(
        "--tls-cert", metavar="FILE", help="the client certificate, for servers that require one"
    )
    tls.add_argument("--tls-key", metavar="FILE", help="the private key of --tls-cert")
    tls.add_argument(
        "--token-file",
        metavar="FILE",
        help="the file of the token to show, for servers that require one (default: FASTPS_TOKEN_FILE)",
    )


def add_namespace(parser: argparse.ArgumentParser, purpose: str, required: bool = False) -> None:
    """The option ``--namespace``, and its former spelling."""
    either = parser.add_mutually_exclusive_group(required=required)
    either.add_argument("--namespace", metavar="NAME", help=purpose)
    either.add_argument("--run", dest="namespace", action=_FormerSpelling, help=argparse.SUPPRESS)


class _FormerSpelling(argparse.Action):
    """The option ``--run``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(f"{parser.prog}: {option_string} is deprecated: write --{self.dest}", file=sys.stderr)
        setattr(namespace, self.dest, values)


def ls(args: argparse.Namespace) -> int:
    """Prints the tensors of all namespaces, or of one."""
    with _connect(args) as ps:
        found = [one for one in listed(ps) if args.namespace in (None, one.namespace)]
    if args.json:
        print(json.dumps([_as_json(one) for one in found]))
        return EXIT_OK
    rows = [("NAMESPACE", "TENSOR", "SHAPE", "DTYPE", "OPTIMIZER", "VERSION", "BYTES", "LAST CHANGE")]
    for namespace, spec, version, size, changed in found:
        shape = "x".join(map(str, spec.shape)) or "scalar"
        rule = type(spec.optimizer).__name__
        numbers = f"{version:,}", f"{size:,}", ago(changed)
        rows.append((namespace or "-", spec.name, shape, spec.dtype, rule, *numbers))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:5], widths[:5], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(row[5:], widths[5:], strict=True)]
        print("  ".join(cells))
    return EXIT_OK


def rm(args: argparse.Namespace) -> int:
    """Frees all tensors of a namespace."""
    with _connect(args) as ps:
        found = [one for one in listed(ps) if one.namespace == args.namespace]
        if not found:
            raise CommandError(
                f"there is no namespace {args.namespace!r}; fastps ls {','.join(ps.transport)} lists them"
            )
        for one in found:
            ps.unregister(f"{_MARK}{args.namespace}/{one.spec.name}")
    tensors = f"{len(found)} tensor{'s' * (len(found) != 1)}"
    print(f"freed namespace {args.namespace}: {tensors}, {sum(one.bytes for one in found):,} bytes of values")
    return EXIT_OK


def _connect(args: argparse.Namespace) -> ParameterServer:
    files = {"tls_ca": args.tls_ca, "tls_cert": args.tls_cert, "tls_key": args.tls_key}
    return connect(args.addresses, timeout=args.timeout, token_file=args.token_file, **files)


def _as_json(one: Listed) -> dict[str, Any]:
    spec = one.spec
    return {
        "namespace": one.namespace,
        "run": one.namespace,  # the former name
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "apply": spec.apply,
        "group": spec.group.removeprefix(f"{_MARK}{one.namespace}/"),
        "optimizer": {"name": type(spec.optimizer).__name__, **vars(spec.optimizer)},
        "version": one.version,
        "bytes": one.bytes,
        "changed_s_ago": one.changed,
    }
