"""``fastps-lab rl play``: episodes of a saved policy."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence

from fastps.commands.kit import EXIT_OK, CommandError, at_least, signals_raise
from fastps.commands.kit.parser import Parser
from fastps.errors import ConfigError
from fastps.rl.playing.making import by_name
from fastps.rl.policy import load

__all__ = ["main", "parser"]


def main(arguments: Sequence[str]) -> int:
    """``fastps-lab rl play``: the exit code."""
    args = parser().parse_args(arguments)
    stream = sys.stderr if args.json else sys.stdout
    try:
        with signals_raise():
            episodes, seed = at_least(1, "episodes", args.episodes), at_least(0, "seed", args.seed)
            policy = load(args.file, None if args.env is None else functools.partial(by_name, args.env))
            returns = []
            for episode in range(seed, seed + episodes):
                returns += policy.play(1, episode)
                print(f"seed {episode}: return {returns[-1]:g}", file=stream, flush=True)
    except OSError as error:
        raise CommandError(f"{args.file}: {error.strerror}; name a file of fastps-lab rl") from error
    except (ConfigError, ImportError) as error:
        raise CommandError(str(error)) from error
    mean = sum(returns) / len(returns)
    print(f"mean return {mean:.1f} of {episodes} episodes; trained for {policy.frames:,} frames", file=stream)
    if args.json:
        shown = {"environment": args.env or policy.environment, "frames": policy.frames}
        print(json.dumps({"mean_return": mean, "returns": returns, **shown}))
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fastps-lab rl play",
        description="Play episodes by the most probable actions of a saved policy, and print their returns.",
    )
    parser.add_argument("file", metavar="FILE", help="such as fastps-rl/best.safetensors")
    parser.add_argument("--env", metavar="NAME", help="Gymnasium environment (the one that FILE names)")
    parser.add_argument("--episodes", type=int, default=10, metavar="N", help="episodes to play (10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the first episode (0)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object as the last line, and everything else to stderr",
    )
    return parser
