"""Optimizers, codecs and slices against plain C loops that do the same work, in the same run.

    python benchmarks/kernels.py [--quick] [--only large,codecs,...] [--output benchmarks/README.md]

The C references are in `reference/` and built here; before any timing, they must give the same bits as
fastps. The Rust program `rust/core/benches/kernels.rs` times what Python's overhead would hide. All variants
alternate within each round; a ratio is the median of the rounds' ratios. Tables go to standard output and,
between the markers of their section, into `--output`. torch and NumPy are measured if torch is installed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Runner, Turns, machine, readable, runner, table, write_between_markers
from kernel.parity import CODECS, check_all, normal
from kernel.peers import RULES, Floats, Rule, torch_module, torch_step, torchao_step
from kernel.references import Reference, RustBench, build_rust

import fastps

CACHED = 1 << 20


class Bench(NamedTuple):
    """Common inputs of every section."""

    c: Reference
    rust: RustBench
    torch: Any
    rounds: int
    seconds_per_turn: float
    # Floats of arrays that fit into no cache.
    large: int

    def turns(self, runners: dict[str, Runner]) -> Turns:
        """Measures."""
        return Turns(runners, self.rounds, self.seconds_per_turn)


def reached(value: float, target: float, at_least: bool = False) -> list[str]:
    """Cells of a target: measured value, target, verdict."""
    good = value >= target if at_least else value <= target
    return [f"{value:.2f}", f"{'>=' if at_least else '<='} {target:g}", "yes" if good else "**no**"]


TARGET = ["target", "reached"]


def per_element(turns: Turns, name: str, n: int) -> str:
    """Nanoseconds for each element."""
    return f"{turns.time(name) / n:.3f}" if name in turns else ""


def count(n: int) -> str:
    """`1048576` -> `1M`."""
    return f"{n >> 20}M" if n % (1 << 20) == 0 else f"{n:,}"


def limits(bench: Bench) -> list[str]:
    """Limits that memory sets."""
    rows = []
    for n in (bench.large, CACHED):
        gradient, target = normal(n), bench.c.memory(n)
        huge, word = np.ones(n, np.float32), np.zeros(1, np.uint32)
        for threads in (1, 2):
            c = functools.partial(bench.c.runner, n=n, read=gradient, scalars=(-1e-3,), threads=threads)
            runners = {"memcpy": c("copy", target), "SGD": c("sgd", target), "huge": c("sgd", huge)}
            if threads == 1:
                runners["read"] = c("read_only", word)
            turns = bench.turns(runners)
            sizes = {"read": 4, "memcpy": 8, "SGD": 12, "huge": 12}
            speeds = [f"{b * n / turns.time(name):.0f}" if name in turns else "" for name, b in sizes.items()]
            rows.append([count(n), str(threads), *speeds])
    columns = ["floats", "threads", "read (4)", "memcpy (8)", "SGD (12)", "SGD on huge pages (12)"]
    return table(columns, rows)


def optimizers(size: str, threads: int) -> Callable[[Bench], list[str]]:
    """Every optimizer: one push of one tensor."""

    def section(bench: Bench) -> list[str]:
        n = CACHED if size == "cached" else bench.large
        rows = []
        for name, rule in RULES.items():
            turns = bench.turns(dict(optimizer_runners(bench, rule, n, threads)))
            variants = ["C", "fastps", "checked", *(["fused", "foreach", "numpy"] if bench.torch else [])]
            figures = [per_element(turns, variant, n) for variant in variants]
            rows.append([name, *figures, *reached(1 / turns.ratio("fastps", "C"), 0.97, True)])
            for peer, target in PEERS.get((name, size, threads), {}).items():
                if peer in turns:
                    speed = 1 / turns.ratio("fastps", peer)
                    rows.append(
                        [f"{name} / torch {peer}", *[""] * len(figures), *reached(speed, target, True)]
                    )
            if name == "SGD" and threads == 1:
                ratio = turns.ratio("checked", "fastps")
                target = 1.15 if size == "cached" else 1.5
                rows.append(["SGD, time checked / unchecked", *[""] * len(figures), *reached(ratio, target)])
                floor = 1 + turns.ratio("read", "fastps")
                label = "SGD, the same if C read the gradient before the step"
                rows.append([label, *[""] * len(figures), f"{floor:.2f}", "", ""])
        peers = ["torch fused", "torch foreach", "NumPy"] if bench.torch else []
        return table(["optimizer", "C", "fastps", "checked", *peers, "speed / C", *TARGET], rows)

    return section


# Speed against a peer that was asked for.
PEERS = {
    ("RMSprop", "large", 1): {"foreach": 8.0},
    ("Adadelta", "large", 1): {"foreach": 11.0},
    ("Adam", "cached", 1): {"fused": 1.7},
}


def optimizer_runners(bench: Bench, rule: Rule, n: int, threads: int) -> Iterator[tuple[str, Runner]]:
    """The same step in all variants; all read one gradient."""
    gradient = normal(n)
    for name, check_finite in [("fastps", False), ("checked", True)]:
        store = fastps.Store(threads=threads, check_finite=check_finite)
        store.register("w", np.zeros(n, np.float32), optimizer=rule.settings)
        yield name, runner(functools.partial(store.push, store.bind({"w": gradient})))
    arrays = [bench.c.memory(n) for _ in range(1 + rule.slots)]
    scalars = rule.scalars(10)
    yield "C", bench.c.runner(rule.kernel, *arrays, n=n, read=gradient, scalars=scalars, threads=threads)
    if rule.kernel == "sgd" and threads == 1:
        yield "read", bench.c.runner("read_only", np.zeros(1, np.uint32), n=n, read=gradient)
    if not bench.torch:
        return
    if rule.fused:
        yield "fused", runner(torch_step(bench.torch, rule, [gradient], threads, fused=True))
    yield "foreach", runner(torch_step(bench.torch, rule, [gradient], threads, foreach=True))
    if threads == 1:
        p, *state = (np.zeros(n, np.float32) for _ in range(1 + rule.slots))
        yield "numpy", runner(functools.partial(rule.numpy, p, state, gradient))


def codecs(bench: Bench) -> list[str]:
    """Encoding and decoding: kernels from Rust, and calls from Python with their checks and new arrays."""
    rows = []
    for n in (bench.large, CACHED):
        target = 1.1 if n == CACHED else 1.05
        values, out = normal(n), bench.c.memory(n)
        for name, codec in CODECS.items():
            body, residual = codec.encode(values), bench.c.memory(n)
            body_of_c, residual_of_python = np.frombuffer(body, np.uint8).copy(), np.zeros(n, np.float32)
            # Ordinary memory, as the Rust program has it: huge pages are worth a fifth from DRAM.
            ordinary = bench.c.memory(n, values)
            c = functools.partial(bench.c.runner, n=n)
            works = {
                "encode": (
                    c(f"{name}_encode", body_of_c, read=ordinary),
                    functools.partial(codec.encode, values),
                ),
                "feedback": (
                    c(f"{name}_feedback", body_of_c, residual, read=ordinary),
                    functools.partial(codec.encode, values, residual_of_python),
                ),
                "decode": (
                    c(f"{name}_decode", out, read=np.frombuffer(body, np.uint8)),
                    functools.partial(codec.decode, body, n),
                ),
            }
            for work, (reference, python) in works.items():
                rust = bench.rust.runner(f"{work}-{name}", n)
                turns = bench.turns({"C": reference, "Rust": rust, "Python": runner(python)})
                figures = [per_element(turns, variant, n) for variant in ("C", "Rust", "Python")]
                what = f"{name} {work}" if work != "feedback" else f"{name} encode with error feedback"
                rows.append([count(n), what, *figures, *reached(turns.ratio("Rust", "C"), target)])
    return table(["floats", "work", "C", "Rust", "Python", "Rust / C", *TARGET], rows)


def encoded(bench: Bench) -> list[str]:
    """Bodies applied as a server applies them: checked, then decoded and stepped in one pass."""
    rows = []
    for n in (bench.large, CACHED):
        names = ("float32", "int8", "onebit")
        turns = bench.turns({name: bench.rust.runner(f"apply-{name}", n) for name in names})
        figures = [per_element(turns, name, n) for name in names]
        for name in names[1:]:
            rows.append([count(n), name, *figures, *reached(turns.ratio(name, "float32"), 1.0)])
    return table(["floats", "body", *("float32", "int8", "onebit"), "body / float32", *TARGET], rows)


def bfloat16(bench: Bench) -> list[str]:
    """Steps of tensors with bfloat16 values, beside float32 ones, C with the same rounding, and torchao."""
    rows = []
    for n in (bench.large, CACHED):
        for name in ("SGD", "AdamW"):
            rule, gradient = RULES[name], normal(n)
            runners = {
                dtype: stored(rule.settings, gradient, dtype=dtype) for dtype in ("float32", "bfloat16")
            }
            arrays = [np.zeros(n, np.uint16), *(bench.c.memory(n) for _ in range(rule.slots))]
            scalars = (*rule.scalars(10), 9.0)
            runners["C"] = bench.c.runner(
                f"{rule.kernel}_bfloat16", *arrays, n=n, read=gradient, scalars=scalars
            )
            if name == "AdamW" and bench.torch and (step := torchao_step(bench.torch, gradient)):
                runners["torchao"] = runner(step)
            turns = bench.turns(runners)
            figures = [per_element(turns, variant, n) for variant in ("float32", "bfloat16", "C", "torchao")]
            label = [count(n), name, *figures]
            limit = {"SGD": 0.9, "AdamW": 1.1}[name]
            time = turns.ratio("bfloat16", "float32")
            verdict = reached(time, limit) if n == bench.large else [f"{time:.2f}", "", ""]
            rows.append([*label, "time / float32", *verdict])
            for peer, target in (("C", 0.9), ("torchao", 10.0)):
                if peer in turns:
                    speed = 1 / turns.ratio("bfloat16", peer)
                    rows.append([""] * len(label) + [f"speed / {peer}", *reached(speed, target, True)])
    return table(["floats", "optimizer", "float32", "bfloat16", "C", "torchao", "ratio", "", *TARGET], rows)


def averages(bench: Bench) -> list[str]:
    """Steps that also keep an average of the values, beside AdamW without one."""
    rows = []
    for n in (bench.large, CACHED):
        gradient, adamw = normal(n), RULES["AdamW"].settings
        runners = {
            "AdamW": stored(adamw, gradient),
            "EMA": stored(adamw, gradient, average=fastps.EMA(decay=0.999)),
            "free": stored(fastps.ScheduleFreeAdamW(lr=1e-3), gradient),
        }
        turns = bench.turns(runners)
        for name, label in (("EMA", "AdamW with EMA"), ("free", "ScheduleFreeAdamW")):
            time = turns.ratio(name, "AdamW")
            verdict = reached(time, 1.45) if name == "EMA" else [f"{time:.2f}", "", ""]
            rows.append(
                [count(n), label, per_element(turns, "AdamW", n), per_element(turns, name, n), *verdict]
            )
    return table(["floats", "step", "AdamW", "with the average", "time / AdamW", *TARGET], rows)


def stored(settings: fastps.Optimizer, gradient: Floats, **spec: Any) -> Runner:
    """A push of one tensor by one thread."""
    store = fastps.Store(threads=1, check_finite=False)
    store.register("w", np.zeros(gradient.size, np.float32), settings, **spec)
    return runner(functools.partial(store.push, store.bind({"w": gradient})))


def contention(bench: Bench) -> list[str]:
    """Two threads that push into one vector."""
    rows = []
    for n, target in [(1000, 1.3), (1 << 14, 1.15), (1 << 16, 1.15), (258_048, 1.15)]:
        runners = {"one": bench.rust.runner("meet-1", n), "two": bench.rust.runner("meet-2", n)}
        rows.append(contended(bench, n, "Rust", runners, target))
        if n > 1000:
            runners = {"one": from_python(n, 1), "two": from_python(n, 2)}
            rows.append(contended(bench, n, "Python", runners, target))
    for n in (CACHED, bench.large):
        runners = {"one": bench.rust.runner("private-2", n), "two": bench.rust.runner("meet-2", n)}
        rows.append(contended(bench, n, "Rust, against private vectors", runners, 1.1))
    return table(["floats", "from", "reference", "two threads, one vector", "ratio", *TARGET], rows)


def racing(bench: Bench) -> list[str]:
    """One and two threads that push into one vector, without a lock and with it."""
    cases = {"one, lock": "meet-1", "one, racing": "race-1", "two, lock": "meet-2", "two, racing": "race-2"}
    rows = []
    for n in (1000, 1 << 14, 1 << 16, 258_048, CACHED):
        turns = bench.turns({name: bench.rust.runner(case, n) for name, case in cases.items()})
        ratios = [f"{turns.ratio(f'{k}, racing', f'{k}, lock'):.2f}" for k in ("one", "two")]
        rows.append([count(n), *(per_element(turns, name, n) for name in cases), *ratios])
    return table(["floats", *cases, "one, racing / lock", "two, racing / lock"], rows)


def contended(bench: Bench, n: int, what: str, runners: dict[str, Runner], target: float) -> list[str]:
    """One row: nanoseconds per element of one update, all threads together."""
    turns = bench.turns(runners)
    figures = [per_element(turns, variant, n) for variant in ("one", "two")]
    return [count(n), what, *figures, *reached(turns.ratio("two", "one"), target)]


def from_python(n: int, threads: int) -> Runner:
    """The same number of pushes by one thread or shared by two; nanoseconds of one."""
    first = fastps.Store(threads=1, check_finite=False)
    first.register("w", np.zeros(n, np.float32), optimizer=fastps.SGD(lr=1e-3))
    clients = [first, *(first.another() for _ in range(threads - 1))]
    pushes = max(2, (1 << 23) // n)

    def work(client: fastps.ParameterServer, barrier: threading.Barrier, times: list[int]) -> None:
        bound = client.bind({"w": normal(n)})
        barrier.wait()
        times.append(time.perf_counter_ns())
        for _ in range(pushes // threads):
            client.push(bound)
        times.append(time.perf_counter_ns())

    def repetition() -> int:
        barrier, times = threading.Barrier(threads), list[int]()
        workers = [threading.Thread(target=work, args=(client, barrier, times)) for client in clients]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return (max(times) - min(times)) // pushes

    return lambda repetitions: [repetition() for _ in range(repetitions)]


def pulls(bench: Bench) -> list[str]:
    """`pull` into an array of the caller."""
    rows = []
    for n in (bench.large, CACHED):
        store = fastps.Store(threads=1)
        store.register("w", normal(n), optimizer=fastps.SGD())
        out, source = np.zeros(n, np.float32), bench.c.memory(n, 1.0)
        runners = {
            "memcpy": bench.c.runner("copy", out, n=n, read=source),
            "pull": runner(functools.partial(store.pull, "w", out=out)),
        }
        turns = bench.turns(runners)
        figures = [per_element(turns, name, n) for name in runners]
        rows.append([count(n), *figures, *reached(1 / turns.ratio("pull", "memcpy"), 1.0, True)])
    return table(["floats", "memcpy", "pull(out=)", "speed / memcpy", *TARGET], rows)


def registration(bench: Bench) -> list[str]:
    """Cost of a tensor before its first push: memory is taken, filled and touched once."""
    rows = []
    values, gradient = normal(bench.large), normal(bench.large, 1)
    for name, arrays in [("SGD", 1), ("Adam", 3)]:
        times: dict[str, list[int]] = {"C": [], "register": [], "first": [], "later": []}
        for _ in range(bench.rounds):
            start = time.perf_counter_ns()
            memory = [bench.c.memory(bench.large, values if k == 0 else 0.0) for k in range(arrays)]
            times["C"].append(time.perf_counter_ns() - start)
            del memory
            with fastps.Store(threads=1, check_finite=False) as store:
                for step in ("register", "first", "later"):
                    start = time.perf_counter_ns()
                    if step == "register":
                        store.register("w", values, optimizer=RULES[name].settings)
                    else:
                        store.push("w", gradient)
                    times[step].append(time.perf_counter_ns() - start)
        rows.append(
            [f"{count(bench.large)}, {name}", *(readable(statistics.median(t)) for t in times.values())]
        )
    return table(["floats, optimizer", "C", "register", "first push", "second push"], rows)


def small(bench: Bench) -> list[str]:
    """Many small tensors in one push, and one."""
    rows = []
    for name, optimizer in [("SGD", RULES["SGD"]), ("Adam", RULES["Adam"])]:
        for tensors in (100, 1):
            runners = dict(small_runners(bench, optimizer, tensors))
            turns = bench.turns(runners)
            for variant in runners:
                goal = SMALL.get((name, tensors, variant))
                took = turns.time(variant)
                target = reached(took / 1e3, goal)[1:] if goal else ["", ""]
                rows.append([f"{tensors} x 1,000, {name}", variant, readable(took), *target])
    return table(["tensors", "pushed as", "one push", *TARGET], rows)


# Microseconds that were asked for.
SMALL = {
    ("SGD", 100, "bound list"): 5.0,
    ("Adam", 100, "bound list"): 20.0,
    ("SGD", 100, "bound list, checked"): 7.0,
    ("Adam", 100, "bound list, checked"): 22.0,
    ("SGD", 100, "dict of NumPy arrays"): 15.0,
    ("SGD", 100, "dict of torch tensors"): 15.0,
    ("SGD", 1, "bound list"): 1.0,
    ("SGD", 1, "array"): 1.0,
}


def small_runners(bench: Bench, rule: Rule, tensors: int) -> Iterator[tuple[str, Runner]]:
    """`tensors` tensors of 1,000 floats, without the finite check; and only their arithmetic."""
    gradients = {f"layer.{k}.weight": normal(1000, k) for k in range(tensors)}
    stores = [fastps.Store(check_finite=check) for check in (False, True)]
    for store in stores:
        for name, gradient in gradients.items():
            store.register(name, np.zeros_like(gradient), optimizer=rule.settings)
    store, checked = stores
    arrays = [[bench.c.memory(1000) for _ in range(1 + rule.slots)] for _ in gradients]
    yield "C", bench.c.list_runner(rule.kernel, arrays, list(gradients.values()), rule.scalars(10))
    yield "bound list, from Rust", bench.rust.runner(f"{rule.kernel}-{tensors}", 1000)
    yield "bound list", runner(functools.partial(store.push, store.bind(gradients)))
    yield "bound list, checked", runner(functools.partial(checked.push, checked.bind(gradients)))
    yield "dict of NumPy arrays", runner(functools.partial(store.push, gradients))
    if tensors == 1:
        [(name, gradient)] = gradients.items()
        yield "array", runner(functools.partial(store.push, name, gradient))
    if bench.torch:
        as_torch = {name: bench.torch.from_numpy(gradient) for name, gradient in gradients.items()}
        yield "dict of torch tensors", runner(functools.partial(store.push, as_torch))
        listed = list(gradients.values())
        yield "torch.optim, fused", runner(torch_step(bench.torch, rule, listed, 1, fused=True))
        yield "torch.optim, foreach", runner(torch_step(bench.torch, rule, listed, 1, foreach=True))


def vectors(bench: Bench) -> list[str]:
    """Operations on vectors beside a tensor, and a block of inner products against the same one by one."""
    rows = []
    for n, bits in itertools.product((bench.large // 4, CACHED), (32, 64)):
        for work, reference in vector_references(bench, n, bits):
            turns = bench.turns({"C": reference, "Rust": bench.rust.runner(f"vector{bits}-{work}", n)})
            figures = [per_element(turns, variant, n) for variant in ("C", "Rust")]
            speed = 1 / turns.ratio("Rust", "C")
            rows.append([count(n), f"{work}, float{bits}", *figures, *reached(speed, 0.95, True)])
    for n in (bench.large // 16, CACHED):
        names = {"single": "vector32-single", "block": "vector32-block"}
        turns = bench.turns({variant: bench.rust.runner(case, n) for variant, case in names.items()})
        figures = [per_element(turns, variant, n) for variant in names]
        speed = 1 / turns.ratio("block", "single")
        rows.append([count(n), "3 x 21 products, one by one", *figures, *reached(speed, 2.0, True)])
    return table(["floats", "operation or reference", "C or one by one", "Rust", "speed", *TARGET], rows)


def vector_references(bench: Bench, n: int, bits: int) -> Iterator[tuple[str, Runner]]:
    """Each operation on vectors of `n` elements, in C."""
    words = n * bits // 32
    x, y, to = (bench.c.memory(words) for _ in range(3))
    for seed, vector in enumerate((x, y)):
        vector.array.view(f"float{bits}")[:] = normal(n, seed)
    high, low, out = bench.c.memory(2 * n), bench.c.memory(2 * n), bench.c.memory(2)
    runner = functools.partial(bench.c.runner, n=n)
    yield "dot", runner(f"dot{bits}", out, x, read=y)
    yield "max", runner(f"max_abs{bits}", out, read=x)
    yield "axpy", runner(f"axpy{bits}", to, read=x, scalars=(1e-3,))
    yield "combine", runner(f"combine{bits}", to, x, read=y, scalars=(0.5, 0.25, 0.125))
    yield "multiply", runner(f"multiply{bits}", to, x, read=y)
    yield "portion", runner(f"add_portion{bits}", high, low, out, read=y, scalars=(2.0**20,))
    yield "sum", runner(f"end_sum{bits}", to, high, read=low, scalars=(2.0**-20,))


SECTIONS: dict[str, Callable[[Bench], list[str]]] = {
    "limits": limits,
    "large": optimizers("large", 1),
    "threads": optimizers("large", 2),
    "cached": optimizers("cached", 1),
    "codecs": codecs,
    "encoded": encoded,
    "bfloat16": bfloat16,
    "averages": averages,
    "contention": contention,
    "racing": racing,
    "pulls": pulls,
    "registration": registration,
    "small": small,
    "vectors": vectors,
}


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description="Optimizers, codecs and slices against plain C loops.")
    parser.add_argument(
        "--quick", action="store_true", help="16M floats for 64M, less time: for a first look"
    )
    parser.add_argument("--only", metavar="SECTION,...", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the tables between FILE's markers")
    arguments = parser.parse_args()
    sections = arguments.only.split(",") if arguments.only else list(SECTIONS)
    # Threads that wait must not spin while another variant is measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    rounds, seconds, large = (3, 0.02, 1 << 24) if arguments.quick else (5, 0.15, 1 << 26)
    header = [f"`{' '.join(['python', 'benchmarks/kernels.py', *sys.argv[1:]])}`", "", *machine(), ""]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rust = RustBench(build_rust())
        stack.callback(rust.close)
        bench = Bench(Reference(folder), rust, torch_module(), rounds, seconds, large)
        check_all(bench.c)
        for name in sections:
            start = time.monotonic()
            lines = [*header, *SECTIONS[name](bench)]
            print(f"\n## {name}, {time.monotonic() - start:.0f} s\n\n" + "\n".join(lines), flush=True)
            if arguments.output:
                write_between_markers(arguments.output, f"kernels {name}", lines)


if __name__ == "__main__":
    main()
