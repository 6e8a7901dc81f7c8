"""The ``rl`` subcommand: its live line, and the files that it writes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from fastps.commands.kit import EXIT_OK, CommandError, percentile, signals_raise, tensor_file
from fastps.errors import ConfigError
from fastps.rl.algorithm import Algorithm
from fastps.rl.training.run import Run
from fastps.rl.training.train import Training
from fastps_lab.rl import compare, play
from fastps_lab.rl.options import algorithm_of, parser
from fastps_lab.rl.settings import listing

__all__ = ["main", "parser"]

#: Seconds between two states of the live line in a terminal; elsewhere lines come less often.
_LINE_EVERY = 0.5
_PLAIN_EVERY = 5.0


def main(arguments: Sequence[str]) -> int:
    """``fastps-lab rl``: the exit code."""
    if arguments[:1] == ["play"]:
        return play.main(arguments[1:])
    if arguments[:1] == ["compare"]:
        return compare.main(arguments[1:])
    args = parser().parse_args(arguments)
    if "help" in args.set:
        print(listing(args.algorithm))
        return EXIT_OK
    try:
        algorithm = algorithm_of(args)
        with signals_raise():
            return _execute(algorithm, args)
    except ConfigError as error:
        raise CommandError(str(error)) from error


def _execute(algorithm: Algorithm, args: argparse.Namespace) -> int:
    stream = sys.stderr if args.json else sys.stdout
    out = Path(args.out)
    training = Training(
        algorithm, args.env, args.workers, args.frames, args.seed, args.shards, True,
        servers=args.servers, folder=out if _can_save(stream) else None, resume=args.resume, logs=out,
    )  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not args.resume:
            for old in (*out.glob("worker-*.log"), out / "run.jsonl", out / "curve.png"):
                old.unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror}; choose a folder that can be written") from error
    view = _View(stream, out / "run.jsonl")
    try:
        with training:
            try:
                while training.poll():
                    view.show(training.run)
                training.finish()
            except BaseException:
                training.stop()
                raise
    finally:
        run = training.run
        view.end(run)
        if run.frames and not training.fetched:
            print("the model is not saved: the servers did not answer", file=stream)
        elif run.frames:
            title = f"fastps-lab rl {args.algorithm}: {args.env}, {args.workers} workers, seed {args.seed}"
            _draw(run, title, out, stream)
    if training.unsaved is not None:
        raise CommandError(f"the model is not saved in {out}: {training.unsaved}")
    print(_closing(run), file=stream, flush=True)
    if args.json:
        print(json.dumps(run.as_json()), flush=True)
    return EXIT_OK


def _can_save(stream: TextIO) -> bool:
    """Returns whether the package for models in files is installed."""
    if not tensor_file.is_available():
        print("for the model as a file: pip install safetensors", file=stream)
        return False
    return True


def _draw(run: Run, title: str, out: Path, stream: TextIO) -> None:
    """Draws the picture, if the package for it is installed."""
    try:
        from fastps_lab.rl.plot import draw

        draw(run, title, out / "curve.png")
    except ImportError:
        print("for the picture: pip install matplotlib", file=stream)
    for log in out.glob("worker-*.log"):
        if log.stat().st_size == 0:
            log.unlink()
    print(f"model, picture and numbers are in {out}", file=stream)


def _line(run: Run) -> str:
    """The state of a run in one line."""
    staleness = percentile(run.staleness, 0.5)
    greedy = f"{run.curve[-1].mean_return:.1f}" if run.curve else "-"
    training = "-" if run.training_return is None else f"{run.training_return:.1f}"
    return (
        f"{run.seconds:6.1f} s  {run.frames:>9,} frames  {run.frames_per_second:>7,.0f} frames/s  "
        f"{run.updates:>7,} updates  staleness {'-' if staleness is None else staleness}  "
        f"return {training} training, {greedy} greedy"
    )


def _closing(run: Run) -> str:
    best = "-" if run.best_return is None else f"{run.best_return:.1f}"
    if run.threshold is None:
        solved = "the environment defines no return at which it is solved"
    else:
        training, greedily = (
            "never" if frames is None else f"after {frames:,} frames"
            for frames in (run.solved_at, run.solved_greedily_at)
        )
        solved = f"mean of {run.threshold:g} over 100 episodes: {training} in training, {greedily} greedily"
    return f"{run.frames:,} frames in {run.seconds:.1f} s; best mean return {best}; {solved}"


class _View:
    """The live line, and the file of what happened.

    Args:
        stream: Where the line goes: it is overwritten in a terminal, and repeated elsewhere.
        path: The file, one JSON object a line.
    """

    def __init__(self, stream: TextIO, path: Path) -> None:
        self._stream, self._file = stream, path.open("a")
        self._live = stream.isatty()
        self._points = self._messages = 0
        self._due = 0.0

    def show(self, run: Run) -> None:
        """Shows the present state, if the last one is old enough."""
        self._note(run)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + (_LINE_EVERY if self._live else _PLAIN_EVERY)
            print(f"\r{_line(run)}\x1b[K" if self._live else _line(run), file=self._stream, flush=True,
                  end="" if self._live else "\n")  # fmt: skip

    def end(self, run: Run) -> None:
        """Shows the last state, and writes the result."""
        self._due = 0.0
        self.show(run)
        if self._live:
            print(file=self._stream)
        self._write({"event": "end", **run.as_json()})
        self._file.close()

    def _note(self, run: Run) -> None:
        for message in run.messages[self._messages :]:
            print(f"\r{message}\x1b[K" if self._live else message, file=self._stream)
            self._write({"event": "message", "seconds": run.seconds, "text": message})
        for point in run.curve[self._points :]:
            self._write({"event": "point", **point._asdict()})
        self._messages, self._points = len(run.messages), len(run.curve)

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()
