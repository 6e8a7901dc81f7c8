"""Options of ``fastps run``."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from pathlib import Path

from fastps._shared.addresses import VARIABLE
from fastps._shared.process import EXIT_USAGE, CommandError, signals_raise
from fastps.commands.run.door import kill
from fastps.commands.run.launch import Launch, Plan
from fastps.commands.run.output import Output

__all__ = ["add_arguments", "execute"]

USAGE = """\
fastps run -n WORKERS [options] SCRIPT.py [ARGUMENTS]
       fastps run -n WORKERS [options] -- COMMAND [ARGUMENTS]
       fastps run -n WORKERS --nnodes M --node-rank K --servers ADDRESSES [options] SCRIPT.py [ARGUMENTS]
       fastps run --servers-only [options] -- COMMAND [ARGUMENTS]
       fastps run kill RANK [PROCESS]"""

EPILOG = """\
Each worker gets FASTPS_ADDRESSES, which fastps.connect() reads, FASTPS_RANK, FASTPS_WORKERS and RANK. The
exit code is 0 if every worker has ended with 0; else that of the first worker that has used up its restarts
(128 + n after signal n); 1 if a server without --data-dir has ended; 130 after Ctrl-C. However the launcher
ends, its servers and workers end, too. fastps run kill RANK kills one worker of a run on this machine;
PROCESS is that of the launcher, if several run."""

#: Options that a script seldom has itself.
_OWN = (
    "-n",
    "--workers",
    "--nnodes",
    "--node-rank",
    "--shards",
    "--servers",
    "--restart",
    "--stagger",
    "--torch-env",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fastps run``."""
    parser.usage, parser.epilog = USAGE, EPILOG
    parser.add_argument("-n", "--workers", type=_positive, metavar="WORKERS", help="number of workers (1)")
    parser.add_argument(
        "--nnodes",
        type=_positive,
        metavar="M",
        help="number of machines that run this command, each with the same -n and --servers (1)",
    )
    parser.add_argument(
        "--node-rank",
        type=_count,
        metavar="K",
        help="this machine's number, from 0: its workers have the ranks from K x WORKERS on",
    )
    parser.add_argument("--shards", type=_positive, metavar="N", help="number of servers to start (1)")
    parser.add_argument(
        "--servers",
        metavar="ADDRESSES",
        help="use these servers, host:port,host:port, instead of starting some (default: those in "
        "FASTPS_ADDRESSES, if it is set and neither --shards nor --data-dir is given)",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="the servers keep their state here, start from it, and are started again if they end",
    )
    parser.add_argument(
        "--restart",
        type=_count,
        default=0,
        metavar="N",
        help="start each dead worker again, up to N times (0)",
    )
    parser.add_argument(
        "--stagger", type=_seconds, default=0.0, metavar="S", help="seconds between the starts of workers (0)"
    )
    parser.add_argument(
        "--torch-env",
        action="store_true",
        help="also set WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: with these, accelerate and the "
        "trainers of Hugging Face start an all-reduce group",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="log starts and ends, a JSON object per line"
    )
    parser.add_argument(
        "--servers-only",
        action="store_true",
        help="start servers and run COMMAND once, such as another launcher, with FASTPS_ADDRESSES",
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT.py", help="script and its arguments, or kill RANK"
    )


def execute(args: argparse.Namespace) -> int:
    """Runs servers and workers; returns the exit code."""
    if args.script[:1] == ["kill"]:
        return kill(args.script[1:])
    plan, output = _plan(args), Output(args.json)
    for word in args.script[1:] if args.script[0] != "--" else []:
        if word.partition("=")[0] in _OWN:
            output.say(f"{args.script[0]} gets {word}: options of fastps run come before the script")
    with signals_raise():
        return Launch(plan, output).run()


def _plan(args: argparse.Namespace) -> Plan:
    own = {"--shards": args.shards, "--data-dir": args.data_dir}
    given = [option for option, value in own.items() if value is not None]
    addresses = args.servers
    if addresses is not None and (given or args.servers_only):
        other = given[0] if given else "--servers-only"
        raise UsageError(
            f"--servers uses running servers, and {other} is for servers to start: give one of them"
        )
    for option, value in {
        "-n": args.workers,
        "--nnodes": args.nnodes,
        "--restart": args.restart,
        "--torch-env": args.torch_env,
    }.items():
        if args.servers_only and value:
            raise UsageError(f"{option} is for workers, and --servers-only starts none: give one of them")
    if addresses is None and not given and not args.servers_only:
        addresses = os.environ.get(VARIABLE, "").strip() or None
    nodes = _nodes(args, addresses)
    return Plan(
        command=_command(args.script),
        workers=None if args.servers_only else args.workers or 1,
        nodes=nodes,
        node=args.node_rank or 0,
        addresses=addresses,
        shards=args.shards or 1,
        data_dir=args.data_dir,
        restarts=args.restart,
        stagger=args.stagger,
        torch_env=args.torch_env,
    )


def _nodes(args: argparse.Namespace, addresses: str | None) -> int:
    """The number of machines, from options that agree."""
    nodes: int = args.nnodes or 1
    if args.node_rank is not None and args.node_rank >= nodes:
        raise UsageError(f"--node-rank {args.node_rank} is not below --nnodes {nodes}: machines count from 0")
    if nodes == 1:
        return nodes
    if args.node_rank is None:
        raise UsageError(f"--nnodes {nodes} needs --node-rank, this machine's number from 0 to {nodes - 1}")
    if args.torch_env:
        raise UsageError("--torch-env describes a group on one machine, and --nnodes several: use torchrun")
    if addresses is None:
        raise UsageError(
            f"--nnodes {nodes} needs servers that every machine reaches: start them with fastps serve, and "
            "give their addresses with --servers"
        )
    return nodes


def _command(given: list[str]) -> list[str]:
    """The command of a worker: scripts and modules of Python run in this interpreter."""
    command = given[1:] if given[:1] == ["--"] else given
    if not command:
        raise UsageError("nothing to run: expected a script or, after --, a command")
    if command[0] == "-m":
        return [sys.executable, *command]
    if command[0].endswith(".py"):
        if not Path(command[0]).is_file():
            raise CommandError(
                f"there is no script {command[0]} in {Path.cwd()}: expected a path from there; "
                "fastps examples --to examples copies those of the package"
            )
        return [sys.executable, *command]
    if shutil.which(command[0]) is None:
        raise CommandError(
            f"cannot run {command[0]}: expected a script NAME.py or a program on the PATH; "
            "programs of packages can be run as -m MODULE, torchrun as -m torch.distributed.run"
        )
    return command


class UsageError(CommandError):
    """Options contradict each other."""

    exit_code = EXIT_USAGE


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return value


def _seconds(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got {text}")
    return value
