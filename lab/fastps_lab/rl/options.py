"""The options of ``fastps-lab rl``, and the algorithm that they choose."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from typing import Any

from fastps.commands.kit import CommandError, at_least
from fastps.commands.kit.parser import Parser
from fastps.rl.algorithm import Algorithm
from fastps_lab.rl.settings import ALGORITHMS, defaults, parsed, settings_of, summary

__all__ = ["algorithm_of", "parser"]

#: Worker processes unless an option says another number.
_WORKERS = 2
#: Options that some algorithms have, and the setting that tells which.
_OWN = {
    "lr": "lr",
    "steps": "steps",
    "is_async": "sync",
    "normalize": "normalize",
    "pairs": "pairs",
    "sigma": "sigma",
    "samples": "samples",
    "elites": "elites",
    "replay": "replay",
    "actors": "actors",
    "learners": "replay",
    "role": "role",
}

_EPILOG = """\
exit codes: 0 the frames were played; 1 failed, the last line says why; 2 wrong usage; 130 stopped by Ctrl-C
(128 + signal number). Every process that the command starts ends with it. The --out folder gets curve.png,
run.jsonl (evaluations, events, and the result as the last line), model.safetensors (the last policy),
best.safetensors (the one with the best evaluation), training.safetensors (for --resume) and the workers'
logs. fastps-lab rl play FILE plays episodes of a saved policy; fastps-lab rl compare draws several
algorithms."""


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fastps-lab rl",
        description="Train a policy with several worker processes that share one model; or play a saved one.",
        epilog=f"{_EPILOG}\n\nsettings of --set and their defaults:\n{_settings()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "algorithm",
        choices=tuple(ALGORITHMS),
        help="synchronous REINFORCE, asynchronous actor-critic, trust region policy optimization, evolution "
        "strategies, cross-entropy method, or deep Q-learning",
    )
    parser.add_argument(
        "--env", default="CartPole-v1", metavar="NAME", help="Gymnasium environment (CartPole-v1)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="number of worker processes (2)")
    parser.add_argument(
        "--frames", type=int, default=200_000, metavar="N", help="frames of all workers together (200000)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of model and episodes; give each machine its own (0)",
    )
    parser.add_argument("--lr", type=float, metavar="R", help=_for("lr", "learning rate", *_stepping()))
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=_for("steps", "steps per update, or of a rollout", "naive", "a3c", "trpo", "gorila"),
    )
    parser.add_argument(
        "--async",
        dest="is_async",
        action="store_true",
        help="naive: update without waiting for other workers",
    )
    parser.add_argument(
        "--pairs", type=int, metavar="N", help=_for("pairs", "pairs of episodes per version", "es")
    )
    parser.add_argument(
        "--sigma", type=float, metavar="X", help=_for("sigma", "standard deviation of the noise", "es", "cem")
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help=_for("samples", "candidates per version", "cem")
    )
    parser.add_argument(
        "--elites",
        type=int,
        metavar="N",
        help=_for("elites", "candidates that define the next version", "cem"),
    )
    parser.add_argument(
        "--normalize", action="store_true", help="naive, a3c: normalize observations by mean and variance"
    )
    _add_gorila(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any setting of the algorithm, see below; may be repeated; help lists them with their meanings",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--servers", metavar="ADDRESSES", help="use these servers: host:port,host:port")
    where.add_argument(
        "--shards",
        type=int,
        default=1,
        metavar="N",
        help="number of server shards to start (1); 0 uses a shared store",
    )
    parser.add_argument(
        "--out", default="fastps-rl", metavar="DIR", help="folder for all files (./fastps-rl)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the training of the --out folder, up to --frames in all",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object as the last line, and everything else to stderr",
    )
    return parser


def _for(name: str, text: str, *algorithms: str) -> str:
    """The help of an option that sets one setting of these algorithms."""
    of = "" if len(algorithms) == len(ALGORITHMS) else f"{', '.join(algorithms)}: "
    return f"{of}{text} ({defaults(name, *algorithms)})"


def _stepping() -> list[str]:
    """The algorithms whose steps have a learning rate."""
    return [name for name in ALGORITHMS if "lr" in settings_of(name)]


def _settings() -> str:
    """The settings of each algorithm, and their defaults."""
    return "\n".join(
        textwrap.fill(f"  {name:<7} {summary(name)}", 108, subsequent_indent=" " * 10) for name in ALGORITHMS
    )


def _add_gorila(parser: argparse.ArgumentParser) -> None:
    """Adds the options of Gorila."""
    parser.add_argument(
        "--replay", choices=("local", "global"), help="gorila: of each worker, or one on the servers (local)"
    )
    parser.add_argument(
        "--actors", type=int, metavar="N", help="gorila: actors of a global replay, at most N at a time (1)"
    )
    parser.add_argument(
        "--learners", type=int, metavar="N", help="gorila: learners of a global replay to start (1)"
    )
    parser.add_argument(
        "--role",
        choices=("actor", "learner"),
        help="gorila: start --workers of this role, for other machines",
    )


def algorithm_of(args: argparse.Namespace) -> Algorithm:
    """The algorithm with the options that were given; sets the number of workers that they mean."""
    base = ALGORITHMS[args.algorithm]
    fields = {field.name for field in dataclasses.fields(base)}
    for name, setting in _OWN.items():
        if _is_given(getattr(args, name)) and setting not in fields:
            raise CommandError(f"{_option(name)} is not an option of fastps-lab rl {args.algorithm}")
    if args.algorithm == "gorila":
        _choose_workers(args)
    args.workers = _WORKERS if args.workers is None else args.workers
    chosen: dict[str, Any] = parsed(args.algorithm, args.set)
    for name, setting in _OWN.items():
        if name != "learners" and _is_given(getattr(args, name)):
            if setting in chosen:
                raise CommandError(f"{setting} is given twice, by {_option(name)} and by --set")
            chosen[setting] = False if name == "is_async" else getattr(args, name)
    return dataclasses.replace(base, **chosen)


def _option(name: str) -> str:
    """The option whose value has this name."""
    return "--" + {"is_async": "async"}.get(name, name)


def _choose_workers(args: argparse.Namespace) -> None:
    """Chooses a global replay for actors and learners, and sets the number of workers."""
    if (args.actors, args.learners, args.role) != (None, None, None):
        if args.replay == "local":
            raise CommandError("--actors, --learners and --role need --replay global")
        args.replay = "global"
    if args.replay == "global" and args.role is None:
        if args.workers is not None:
            raise CommandError("a global replay has --actors and --learners instead of --workers")
        learners = 1 if args.learners is None else at_least(1, "learners", args.learners)
        args.workers = at_least(1, "actors", 1 if args.actors is None else args.actors) + learners
    elif args.learners is not None:
        raise CommandError("--learners is for all roles; with --role give the number of --workers")


def _is_given(value: object) -> bool:
    """Returns whether an option was given; 0 is a value, though it equals False."""
    return value is not None and value is not False
