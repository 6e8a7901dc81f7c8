"""The command line: ``fastps demo | sandblaster | rl | serve | status | ls | rm | checkpoint | doctor |
torture | repro | live``, and ``fastps-server``.

Exit codes: 0 success; 1 failure, explained in one line that names the fix; 2 wrong usage; 3 (``demo``)
pushes and versions do not reconcile; 130 stopped by Ctrl-C; 128 + n stopped by signal n; 141 the reader of
the output is gone. ``FASTPS_TRACEBACK=1`` shows tracebacks instead of the one line.
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
    """``fastps``: runs a subcommand; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: _run(arguments))


def server() -> int:
    """``fastps-server``: the same as ``fastps serve``."""
    return _guarded(lambda: _serve(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["serve"]:  # its options are defined once, in Rust
        return _serve(arguments[1:])
    if arguments[:1] == ["checkpoint"]:  # so are its options
        return _checkpoint(arguments[1:])
    if arguments[:1] == ["rl"]:  # imports torch
        from fastps.rl.training import command

        return command.main(arguments[1:])
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
    from fastps import doctor, runs
    from fastps.demo import command
    from fastps.live import command as live
    from fastps.repro import command as repro
    from fastps.sandblaster import command as sandblaster
    from fastps.torture import command as torture

    parser = argparse.ArgumentParser(
        prog="fastps", description="A parameter server: sharded, asynchronous, fast."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a classifier by Downpour SGD on this machine, with a worker killed half-way",
        description="Start shard servers and workers on this machine, train a classifier on handwritten\n"
        "digits by Downpour SGD, kill a worker half-way, start a late one, and show that training goes on.",
    )
    command.add_arguments(demo)
    demo.set_defaults(execute=command.execute)
    blaster = commands.add_parser(
        "sandblaster",
        help="minimize a loss by L-BFGS and conjugate gradients, with replica processes",
        description="Minimize a classifier's loss over all samples by batch optimizers. Replica processes\n"
        "compute portions, and idle ones compute slow portions again; the result depends on neither.",
    )
    sandblaster.add_arguments(blaster)
    blaster.set_defaults(execute=sandblaster.execute)
    commands.add_parser(
        "serve", help="run shard servers (fastps serve --help lists its options)", add_help=False
    )
    commands.add_parser(
        "checkpoint",
        help="save, list, verify, restore, export, upload or fetch snapshots (... --help)",
        add_help=False,
    )
    commands.add_parser(
        "rl",
        help="train a policy by reinforcement learning (fastps rl --help lists its options)",
        add_help=False,
    )
    status = commands.add_parser("status", help="show counters and open spaces of a running cluster")
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
    lister = commands.add_parser("ls", help="list the tensors of a running cluster, by run")
    runs.add_arguments(lister)
    lister.add_argument("--run", metavar="NAME", help="only those of this run")
    lister.add_argument("--json", action="store_true", help="print one JSON list")
    lister.set_defaults(execute=runs.ls)
    remover = commands.add_parser("rm", help="free the tensors of a run")
    runs.add_arguments(remover)
    remover.add_argument("--run", metavar="NAME", required=True, help="the run")
    remover.set_defaults(execute=runs.rm)
    physician = commands.add_parser(
        "doctor",
        help="check this machine: instruction sets, tearing, memory, wake-ups, loopback, limits",
        description="Examine this machine and measure its parts for about ten seconds; warn about problems.\n"
        "Exit code 1 if a lane of a vector tears, else 0.",
    )
    doctor.add_arguments(physician)
    physician.set_defaults(execute=doctor.execute)
    torturer = commands.add_parser(
        "torture",
        help="inject faults into servers and clients, and check that nothing is lost or counted twice",
        description="Start servers and clients on this machine, kill, stop, cut and flood them, and compare\n"
        "the answers to every client with the servers' state.",
    )
    torture.add_arguments(torturer)
    torturer.set_defaults(execute=torture.execute)
    reproducer = commands.add_parser(
        "repro",
        help="check published claims about distributed training by runs of the real store",
        description="Check claims of papers, and ours, by simulated runs of the real store; print what was\n"
        "measured beside the threshold and the paper's figure, and draw pictures.",
    )
    repro.add_arguments(reproducer)
    reproducer.set_defaults(execute=repro.execute)
    viewer = commands.add_parser(
        "live",
        help="watch servers and workers train, on a page in the browser",
        description="Start shard servers and workers on this machine and serve a page that shows them:\n"
        "stale gradients, waiting, codecs, and what happens when one is killed. The page also runs the same\n"
        "parameter server inside the browser.",
    )
    live.add_arguments(viewer)
    viewer.set_defaults(execute=live.execute)
    return parser


def _serve(arguments: list[str]) -> int:
    """Runs the server's command line, in Rust; returns when the server has stopped."""
    from fastps import _fastps

    attach_server()
    return int(_fastps.serve_cli(arguments))


def _checkpoint(arguments: list[str]) -> int:
    """Runs the command line for checkpoints, in Rust."""
    from fastps import _fastps

    return int(_fastps.checkpoint_cli(arguments))


def _status(args: argparse.Namespace) -> int:
    """Prints the counters of all shards, and the open spaces of vectors."""
    import fastps
    from fastps import _fastps

    tls = {"tls_ca": args.tls_ca, "tls_cert": args.tls_cert, "tls_key": args.tls_key}
    with fastps.connect(args.addresses, timeout=args.timeout, **tls) as ps:
        fields = ("name", "number", "tensors", "vectors", "coordinator")
        spaces = [
            dict(zip(fields, space, strict=True)) for space in _fastps.VectorSpaces(ps._native).list(None)
        ]
        # Not the client's counters, which are of this command.
        stats = {"shards": ps.stats()["shards"], "spaces": spaces}
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
    """Runs a subcommand; turns an exception into one line on standard error and an exit code."""
    if sys.stdout is None:  # closed, as by >&-: discards the output
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
    except BrokenPipeError:  # the reader of the output is gone
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
    except SystemExit as end:  # from argparse, after --help or a wrong option
        return int(end.code or EXIT_OK)


def _drop_output() -> None:
    """Discards output that cannot be written, which the interpreter would report when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
