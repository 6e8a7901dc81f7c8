"""The environment variables of fastps: each with what it sets, in one table.

docs/reference/environment.md shows it. Importing fastps warns of variables that the table lacks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from fastps._shared.text import meant

__all__ = ["VARIABLES", "Variable", "warn_of_unknown"]

_PREFIX = "FASTPS_"
_WARNED = "FASTPS_WARNED_OF"


class Variable(NamedTuple):
    """Its name without the prefix, and what it sets, in Markdown."""

    name: str
    meaning: str

    def __str__(self) -> str:
        return _PREFIX + self.name


def _option(name: str, option: str, meaning: str) -> Variable:
    return Variable(name, f"`--{option}`: {meaning}")


VARIABLES: dict[str, tuple[Variable, ...]] = {
    "Every process": (
        Variable("ISA", "`scalar`, `avx2`, `avx512` or `neon` instead of the best that the CPU has"),
    ),
    "Workers": (
        Variable(
            "ADDRESSES", "addresses of the servers; `fastps run` sets it for the workers that it starts"
        ),
        Variable("TOKEN_FILE", "file of the token that `fastps.connect` and commands show"),
        Variable("RANK", "number of this worker, from 0; set by `fastps run`"),
        Variable("WORKERS", "number of workers; set by `fastps run`"),
    ),
    "Servers": (
        Variable("LOG", "log level: `off`, `error`, `warn`, `info` (default), `debug` or `trace`"),
        _option("LOG_FORMAT", "log-format", "`text` (default), or `json`: one object a line"),
        _option("CONFIG", "config", "file of settings (TOML) that neither options nor variables give"),
        _option("SHARDS", "shards", "number of shards in this process (1)"),
        _option("LISTEN", "listen", "addresses to listen on (`127.0.0.1:7070`)"),
        _option("LISTEN_UNIX", "listen-unix", "paths of Unix sockets to listen on, too"),
        _option("CLUSTER", "cluster", "addresses of all shards of the cluster, in order"),
        _option("ADVERTISE", "advertise", "address at which others reach this process"),
        _option("MEMORY_LIMIT", "memory-limit", "memory for tensors, readers and connections"),
        _option("LEASE_MS", "lease-ms", "milliseconds that a client may be silent (10000)"),
        _option("REFUSE_WORKER", "refuse-worker", "names of clients that are refused"),
        _option("WEB", "web", "`HOST:PORT` of metrics and health, or `off` (127.0.0.1:7069, if it is free)"),
        _option("WEB_HOST", "web-host", "more names by which `--web` is asked"),
        _option("SPIN_US", "spin-us", "microseconds that a thread polls before it sleeps (200)"),
        _option("TLS_CERT", "tls-cert", "file of the server's certificate"),
        _option("TLS_KEY", "tls-key", "file of its private key"),
        _option("TLS_CA", "tls-ca", "file of the CAs that must have signed the clients' certificates"),
        _option("TLS_CRL", "tls-crl", "file of lists of revoked client certificates"),
        _option(
            "CERTIFICATE_ROLE", "certificate-role", "role of client certificates that name none (`reader`)"
        ),
        _option("AUDIT", "audit", "file for the audit: one JSON line for each event"),
        _option("TOKENS", "tokens", "file of the tokens that callers must show"),
        _option(
            "SERVER_TOKEN_FILE", "server-token-file", "file of the token that this server shows to the others"
        ),
        _option("SERVER_DATA_DIR", "data-dir", "folder for the log and the snapshots"),
        _option("SNAPSHOT_EVERY", "snapshot-every", "seconds between snapshots (300)"),
        _option(
            "SNAPSHOT_AFTER", "snapshot-after", "size of the log, in sizes of the state, for a snapshot (4)"
        ),
        _option("KEEP", "keep", "number of snapshots to keep (2)"),
        _option("KEEP_FOR", "keep-for", "seconds during which every snapshot is kept (0)"),
        _option("KEEP_HISTORY", "keep-history", "bytes that each shard keeps to be rewound (0)"),
        _option("COPY_TO", "copy-to", "URL to which each snapshot is copied"),
        _option(
            "COPY_BYTES_PER_SECOND",
            "copy-bytes-per-second",
            "bytes of the log that are copied in a second at most",
        ),
        _option("COPY_LOG", "copy-log", "age in seconds at which a piece of the log is copied there, too"),
        _option("OWNER_LEASE", "owner-lease", "seconds after which a silent server loses its shards"),
        _option("TAKE_OVER", "take-over", "URL of the copies of a shard that is taken over"),
        _option("SHARD", "shard", "index of that shard"),
    ),
    "Commands and examples": (
        Variable("TRACEBACK", "`1`: commands show tracebacks instead of one line"),
        Variable(
            "DATA_DIR",
            "folder with data sets (`mnist/`, `cifar10/`) for `fastps-lab repro`, examples and tests; no "
            "server uses it",
        ),
    ),
    "Internal": (
        Variable("LIFELINE", "`stdin`: a server stops when its standard input ends; set by commands"),
        Variable(
            "WARNED_OF", "names of variables that a process has been warned of, for those that it starts"
        ),
        Variable("DEMO_SERVER", "program that `fastps demo` starts as its server, in tests"),
        Variable("FAILPOINT", "place where a build for tests kills the process or fails"),
        Variable("MUTANT", "seeded fault of a build of `make mutants`"),
    ),
    "Tests and benchmarks": (
        Variable("CLIENTS", "number of idle clients"),
        Variable("CUTS", "number of connections to cut"),
        Variable("KILLS", "number of kills"),
        Variable("PROCESSES", "number of processes that share 300 clients of one shard"),
        Variable("SEED", "seed of the moments of the kills"),
        Variable("SOAK", "number of steps through connections that stutter"),
        Variable("STATES", "number of states of each setting of the owner's model"),
        Variable("KILLED_CLIENT", "what a client that will be killed does; set by its test"),
        Variable("NIGHTLY", "`1`: tests that run long, too; `make nightly` sets it"),
        Variable("SECOND_ORDER", "`1`: all sizes and kills of batch optimizers"),
        Variable("GRPCURL", "`1`: builds `grpcurl` and reads refusals with it"),
        Variable("REQUIRE_ISA", "instruction sets whose absence fails tests instead of skipping them"),
        Variable("REQUIRE_MIRI", "`1`: `make miri` fails where Miri is missing"),
        Variable("REQUIRE_WASM", "`1`: `make live` fails where the compiler for WebAssembly is missing"),
        Variable("WHEEL", "the wheel under test"),
        Variable("LAST", "the folder of the last release for `make compat`"),
        Variable("LIVE_MODULE", "the WebAssembly module under test"),
        Variable("REGENERATE", "`1`: tests of generated files write them"),
        Variable("WRITE_VECTORS", "`1`: the test of the live page writes its vectors"),
        Variable("REHEARSE_GPU", "`1`: tests for a GPU run without one"),
        Variable("GPU_VERDICTS", "file for the verdicts of tests on a GPU"),
    ),
}


def warn_of_unknown(environment: MutableMapping[str, str] = os.environ) -> None:
    """Warns, by the logger ``"fastps"``, of each variable that looks like one of these and is not.

    Notes the names in the environment, so that the processes of this one do not repeat the warning.
    """
    known = {str(variable) for group in VARIABLES.values() for variable in group}
    warned = environment.get(_WARNED, "").split()
    unknown = sorted({name for name in environment if name.startswith(_PREFIX)} - known - {*warned})
    if not unknown:
        return
    environment[_WARNED] = " ".join([*warned, *unknown])
    import json  # these are slow to import, and rarely needed
    import logging
    from datetime import UTC, datetime

    names = [name.removeprefix(_PREFIX) for name in known]
    for name in unknown:
        hint = meant(name.removeprefix(_PREFIX), names, _PREFIX + "{}")
        text = f"the environment variable {name} is unknown{hint}"
        if _is_server_with_json(environment):
            now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            line = {"timestamp": now, "level": "WARN", "message": text, "target": "fastps"}
            print(json.dumps(line), file=sys.stderr)
        else:
            logging.getLogger("fastps").warning("%s", text)


def _is_server_with_json(environment: Mapping[str, str]) -> bool:
    """Whether this process is ``fastps serve``, all of whose lines are to be JSON."""
    program, *arguments = sys.argv or [""]
    if not program.endswith("fastps-server") and arguments[:1] != ["serve"]:
        return False
    given = " ".join(arguments).replace("--log-format ", "--log-format=")
    return "--log-format=json" in given or environment.get(_PREFIX + "LOG_FORMAT") == "json"
