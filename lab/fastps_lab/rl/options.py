"""The options of ``fastps-lab rl``, and the algorithm that they choose."""

from __future__ import annotations

import argparse
from typing import Any

from fastps.commands.kit import CommandError, at_least
from fastps.commands.kit.parser import Parser
from fastps.rl.a3c import A3C
from fastps.rl.algorithm import Algorithm
from fastps.rl.cem import CEM
from fastps.rl.evolution import EvolutionStrategies
from fastps.rl.gorila import Gorila
from fastps.rl.naive import Naive

__all__ = ["algorithm_of", "parser"]

#: Worker processes unless an option says another number.
_WORKERS = 2

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
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "algorithm",
        choices=("naive", "a3c", "es", "cem", "gorila"),
        help="synchronous REINFORCE, asynchronous actor-critic, evolution strategies, cross-entropy method, "
        "or deep Q-learning",
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
    parser.add_argument("--lr", type=float, metavar="R", help="learning rate (default by algorithm)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="naive, a3c, gorila: steps per update (80, 20, 2)"
    )
    parser.add_argument(
        "--async",
        dest="is_async",
        action="store_true",
        help="naive: update without waiting for other workers",
    )
    parser.add_argument("--pairs", type=int, metavar="N", help="es: pairs of episodes per version (16)")
    parser.add_argument(
        "--sigma", type=float, metavar="X", help="es, cem: standard deviation of the noise (0.1, 2)"
    )
    parser.add_argument("--samples", type=int, metavar="N", help="cem: candidates per version (100)")
    parser.add_argument(
        "--elites", type=int, metavar="N", help="cem: candidates that define the next version (5)"
    )
    parser.add_argument(
        "--normalize", action="store_true", help="naive, a3c: normalize observations by mean and variance"
    )
    _add_gorila(parser)
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
    kinds: dict[str, tuple[type[Algorithm], dict[str, Any], set[str]]] = {
        "naive": (Naive, {}, {"steps", "is_async", "normalize"}),
        "a3c": (A3C, {"steps": 20}, {"steps", "normalize"}),
        "es": (EvolutionStrategies, {}, {"pairs", "sigma"}),
        "cem": (CEM, {}, {"samples", "elites", "sigma"}),
        "gorila": (Gorila, {}, {"steps", "replay", "actors", "learners", "role"}),
    }
    kind, chosen, own = kinds[args.algorithm]
    for name in sorted(set[str]().union(*(options for _, _, options in kinds.values()))):
        if _is_given(getattr(args, name)) and name not in own:
            option = {"is_async": "async"}.get(name, name)
            raise CommandError(f"--{option} is not an option of fastps-lab rl {args.algorithm}")
    if args.is_async:
        chosen["sync"] = False
    if args.algorithm == "gorila":
        _choose_workers(args)
    args.workers = _WORKERS if args.workers is None else args.workers
    for name in (own - {"is_async", "learners"}) | {"lr"}:
        if _is_given(getattr(args, name)):
            chosen[name] = getattr(args, name)
    return kind(**chosen)


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
