"""The command line: ``fastps demo | serve | status | checkpoint | doctor | torture`` and ``fastps-server``.

Exit codes: 0 success; 1 failure, told in one line that names the fix; 2 wrong usage; 3 (``demo``) pushes
and versions do not reconcile; 130 stopped by Ctrl-C; 128 + n stopped by signal n; 141 nobody reads the
output any more. ``FASTPS_TRACEBACK=1`` shows tracebacks instead of the one line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fastps._shared.process import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    CommandError,
    Interrupted,
    attach_server,
)


def main(argv: Sequence[str] | None = None) -> int:
    """``fastps``: run one subcommand; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: _run(arguments))


def server() -> int:
    """``fastps-server``: the same as ``fastps serve``."""
    return _guarded(lambda: _serve(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["serve"]:  # its options are defined once, in Rust
        return _serve(arguments[1:])
    if arguments[:1] == ["checkpoint"]:  # as its are
        return _checkpoint(arguments[1:])
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.version:
        import fastps

        print(f"fastps {fastps.__version__}")
        return EXIT_OK
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    execute: Callable[[argparse.Namespace], int] = args.execute
    return execute(args)


def _parser() -> argparse.ArgumentParser:
    from fastps import doctor
    from fastps.demo import command
    from fastps.torture import command as torture

    parser = argparse.ArgumentParser(
        prog="fastps", description="A parameter server: sharded, asynchronous, fast."
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a classifier by Downpour SGD on this machine: servers, workers, a kill, a picture",
        description="Start shard servers and workers on this machine, train a classifier on handwritten\n"
        "digits by Downpour SGD, kill a worker half-way, start a late one, and show that training goes on.",
    )
    command.add_arguments(demo)
    demo.set_defaults(execute=command.execute)
    commands.add_parser(
        "serve", help="run shard servers (fastps serve --help lists its options)", add_help=False
    )
    commands.add_parser(
        "checkpoint",
        help="save, list, verify, restore, export, upload or fetch what servers keep (... --help)",
        add_help=False,
    )
    status = commands.add_parser("status", help="numbers of a running cluster")
    status.add_argument("addresses", metavar="ADDRESSES", help="host:port of each shard, separated by commas")
    status.add_argument(
        "--timeout", type=float, default=5.0, metavar="S", help="seconds to wait for an answer (5)"
    )
    status.add_argument("--json", action="store_true", help="print one JSON object")
    tls = status.add_argument_group("TLS")
    tls.add_argument("--tls-ca", metavar="FILE", help="the CA that has signed the servers' certificates")
    tls.add_argument("--tls-cert", metavar="FILE", help="a certificate for servers that ask for one")
    tls.add_argument("--tls-key", metavar="FILE", help="its private key")
    status.set_defaults(execute=_status)
    physician = commands.add_parser(
        "doctor",
        help="is this machine fit: instruction sets, tearing, memory, wake-ups, loopback, limits",
        description="Look at this machine and measure its parts for about ten seconds; warn of what would\n"
        "surprise. Exit code 1 if a lane of a vector tears, else 0.",
    )
    doctor.add_arguments(physician)
    physician.set_defaults(execute=doctor.execute)
    torturer = commands.add_parser(
        "torture",
        help="own servers and clients under faults: is anything lost, counted twice, late or untold",
        description="Start servers and clients on this machine, kill, stop, cut and flood them, and check\n"
        "what every client was told against what the servers hold.",
    )
    torture.add_arguments(torturer)
    torturer.set_defaults(execute=torture.execute)
    return parser


def _serve(arguments: list[str]) -> int:
    """Run the Rust command line; it returns when the server has stopped."""
    from fastps import _fastps

    attach_server()
    return int(_fastps.serve_cli(arguments))


def _checkpoint(arguments: list[str]) -> int:
    """Run the Rust command line on data directories, or have servers write there."""
    from fastps import _fastps

    return int(_fastps.checkpoint_cli(arguments))


def _status(args: argparse.Namespace) -> int:
    """Print what the shards say about themselves."""
    import fastps

    tls = {"tls_ca": args.tls_ca, "tls_cert": args.tls_cert, "tls_key": args.tls_key}
    with fastps.connect(args.addresses, timeout=args.timeout, **tls) as ps:
        stats = {"shards": ps.stats()["shards"]}  # of the client only what this command did
    if args.json:
        print(json.dumps(stats, default=str))
    else:
        print("\n".join(_lines(stats)))
    return EXIT_OK


def _lines(value: Any, indent: str = "") -> list[str]:
    """Nested dictionaries and lists as indented ``name: value`` lines."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    lines: list[str] = []
    for name, item in items:
        if isinstance(item, (dict, list, tuple)) and item:
            lines += [f"{indent}{name}:", *_lines(item, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {item}")
    return lines


def _guarded(action: Callable[[], int]) -> int:
    """Run a subcommand; turn what it raises into one line on standard error and an exit code."""
    if sys.stdout is None:  # closed, as by >&-: what is printed goes nowhere
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 until the end
    try:
        code = _exit_code(action)
        sys.stdout.flush()
        return code
    except Interrupted as stop:
        print(f"fastps: stopped by signal {stop.exit_code - 128}", file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        print("fastps: stopped by Ctrl-C", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone: end quietly
        return 128 + 13
    except Exception as error:
        if os.environ.get("FASTPS_TRACEBACK") == "1":
            raise
        text = " ".join(str(error).split())
        print(f"fastps: {text or type(error).__name__}", file=sys.stderr)
        return error.exit_code if isinstance(error, CommandError) else EXIT_FAILED
    finally:
        _drop_output()


def _exit_code(action: Callable[[], int]) -> int:
    try:
        return action()
    except SystemExit as end:  # argparse's, after --help or a wrong option
        return int(end.code or EXIT_OK)


def _drop_output() -> None:
    """What cannot be written goes nowhere: the interpreter would try again at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
