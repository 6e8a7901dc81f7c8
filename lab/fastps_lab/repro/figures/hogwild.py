"""Speed against threads with locks and without, on sparse and dense data, and the updates that races lose."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastps_lab.repro.claim import Claim, Figures, Setting, Verdict
from fastps_lab.repro.figures.training.racing import (
    BATCH,
    WIDTH,
    Examples,
    Race,
    a9a,
    apart,
    made_up,
    movielens,
    overlap,
    race,
    sparsity,
)

__all__ = ["CLAIMS", "judge", "measure", "predicted"]

THREADS = (1, 2, 4)
#: `apply` of a tensor, and its name in the picture.
LOCKS = {"hogwild": "no lock", "exact": "a lock a slice"}
#: Pushes of a run, and runs, of which the fastest counts.
SIZES = {True: (300, 2), False: (2000, 7)}
#: Points, in percent, by which races may lose more than predicted: for threads that are interrupted.
MARGIN = 2.0
#: Gain of two threads that share nothing, below which the machine is too busy to show speeds.
FREE = 1.5
COLORS = {"sparse": "#2166ac", "dense": "#b2182b"}
STYLES = {"hogwild": "o-", "exact": "s--"}
#: Lighter where pushes lock.
SHADES = {"hogwild": COLORS, "exact": {"sparse": "#67a9cf", "dense": "#ef8a62"}}


def measure(setting: Setting) -> Figures:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    pushes, repeats = SIZES[setting.quick]
    (seed,) = setting.seeds(1)
    sets = _examples(setting, seed)
    speeds: dict[str, Any] = {kind: {how: {} for how in LOCKS} for kind in sets}
    lost: dict[str, Any] = {kind: {how: {} for how in LOCKS} for kind in sets}
    free = {str(threads): 0.0 for threads in THREADS}
    for _ in range(repeats):  # in turns, so that other work on the machine slows all of them
        for threads in THREADS:
            key = str(threads)
            free[key] = max(free[key], apart(threads))
            for kind, examples in sets.items():
                for how in LOCKS:
                    speed, share = race(examples, Race(how, threads, pushes))  # type: ignore[arg-type]
                    speeds[kind][how][key] = max(speeds[kind][how].get(key, 0.0), speed)
                    lost[kind][how][key] = max(lost[kind][how].get(key, 0.0), 100 * share)
    names = "random coordinates, 2 of 5,000 and 14 of 123" if setting.quick else "MovieLens and a9a"
    return {
        "data": names,
        "settings": f"{names}: {pushes:,} pushes of the coordinates of {BATCH} examples, {WIDTH} numbers "
        "each, to one tensor of a store in this process, from Python threads; the fastest, and the largest "
        f"loss, of {repeats} runs; load before: {load:.1f}",
        "seeds": [seed],
        "sparsity": {kind: sparsity(examples) for kind, examples in sets.items()},
        "overlap": {kind: overlap(examples) for kind, examples in sets.items()},
        "speeds": speeds,
        "lost": lost,
        "free": free,
    }


def _examples(setting: Setting, seed: int) -> dict[str, Examples]:
    if setting.quick:
        return {"sparse": made_up(5_000, 2, 6400, seed), "dense": made_up(123, 14, 6400, seed)}
    folder = Path(setting.dataset_dir or ".")
    return {"sparse": movielens(folder, seed), "dense": a9a(folder, seed)}


def predicted(numbers: Figures, kind: str, threads: int) -> float:
    """Largest share of the updates that races lose, in percent: those of coordinates that a push of another
    thread has, too.
    """
    return 100.0 * float(1 - (1 - numbers["overlap"][kind]) ** (threads - 1))


def gain(speeds: dict[str, float], threads: int) -> float:
    """Speed of several threads over that of one."""
    return speeds[str(threads)] / speeds["1"]


def judge(numbers: Figures) -> Verdict:
    lost = numbers["lost"]
    kept = all(share == 0 for kind in COLORS for share in lost[kind]["exact"].values())
    within = all(
        lost[kind]["hogwild"][str(threads)] <= predicted(numbers, kind, threads) + MARGIN
        for kind in COLORS
        for threads in THREADS
    )
    ups = {kind: gain(numbers["speeds"][kind]["hogwild"], 2) for kind in COLORS}
    free = gain(numbers["free"], 2)
    text = f"with locks {'nothing' if kept else 'some updates'} lost; without at most "
    text += ", ".join(
        f"{lost[kind]['hogwild'][str(THREADS[-1])]:.2f} % ({kind}, predicted at most "
        f"{predicted(numbers, kind, THREADS[-1]):.0f} %)"
        for kind in COLORS
    )
    text += f" with {THREADS[-1]} threads; 2 threads without locks {ups['sparse']:.2f} x (sparse) and "
    text += f"{ups['dense']:.2f} x (dense), 2 that share nothing {free:.2f} x"
    return Verdict(kept and within, text)


def caption(numbers: Figures) -> str:
    words = []
    for kind in COLORS:
        of = numbers["sparsity"][kind]
        words.append(
            f"{kind}: omega {of['omega']:.0f}, delta {of['delta']:.3f}, rho {of['rho']:.3f}; a push shares "
            f"{100 * numbers['overlap'][kind]:.0f} % of its coordinates with another"
        )
    busy = gain(numbers["free"], 2) < FREE
    return (
        f"{'Measured on a busy machine: the speeds show its load. ' if busy else ''}"
        f"{'. '.join(words)}. Grey: threads that share nothing. Dotted: largest loss that the sparsity "
        "predicts. Between two pushes a thread holds Python's lock, which bounds the gain of threads; the "
        "claim hogwild of `fastps-lab repro` measures the estimators, whose threads never do."
    )


def rows(numbers: Figures) -> Iterator[Sequence[Any]]:
    yield "data", "apply", "threads", "pushes per second", "updates lost (%)", "predicted at most (%)"
    for kind in COLORS:
        for how in LOCKS:
            for threads in THREADS:
                key, bound = str(threads), predicted(numbers, kind, threads) if how == "hogwild" else 0.0
                yield (
                    kind,
                    how,
                    threads,
                    numbers["speeds"][kind][how][key],
                    numbers["lost"][kind][how][key],
                    bound,
                )


def draw(numbers: Figures, figure: Any) -> None:
    figure.set_size_inches(11, 4.6)
    left, right = figure.subplots(1, 2)
    free = [gain(numbers["free"], threads) for threads in THREADS]
    left.plot(THREADS, free, color="#999999", lw=1, label="sharing nothing")
    for kind, color in COLORS.items():
        for how, style in STYLES.items():
            speeds = [gain(numbers["speeds"][kind][how], threads) for threads in THREADS]
            shade, label = SHADES[how][kind], f"{kind}, {LOCKS[how]}"
            left.plot(THREADS, speeds, style, ms=4, color=shade, label=label)
            lost = [numbers["lost"][kind][how][str(threads)] for threads in THREADS]
            right.plot(THREADS, lost, style, ms=4, color=shade, label=label)
        bound = [predicted(numbers, kind, threads) for threads in THREADS]
        right.plot(THREADS, bound, ":", color=color, label=f"{kind}, predicted at most")
    left.set_ylabel("speed, of one thread's")
    right.set_ylabel("updates lost (%)")
    right.set_yscale("symlog", linthresh=0.1)
    for axes in (left, right):
        axes.set_xlabel("threads")
        axes.set_xticks(THREADS)
        axes.legend(fontsize=8)


CLAIMS = [
    Claim(
        name="figures/hogwild",
        says="Threads without locks lose at most the updates that the sparsity of the data predicts.",
        source="Niu, Recht, Re, Wright, NIPS 2011, figures 3 and 4",
        note=f"at most {THREADS[-1]} threads instead of 10; pushes of {BATCH} examples to a store instead "
        "of steps of one; the losses of races are counted, too",
        threshold="with locks no update is lost, without them at most what the sparsity predicts; speeds are "
        "shown and not judged, because other programs and Python's lock bound them",
        measure=measure,
        judge=judge,
        caption=caption,
        rows=rows,
        draw=draw,
        minutes=(0.1, 2.0),
        needs=("movielens-latest-small", "a9a"),
        clock="wall",
    ),
]
