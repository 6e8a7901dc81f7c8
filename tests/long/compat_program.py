"""Calls every verb of the fastps that is imported, and prints the results as JSON for `compat.py`.

    python compat_program.py STAGE ADDRESSES FOLDER

It uses only names that every version since 0.1 has. A new one belongs here once a release has it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import fastps
import fastps.checkpoint
import fastps.data
from fastps.optimize import minimize

LONG = 258_048 + 1  # a whole slice, and one element
RULES = {
    "sgd": fastps.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": fastps.Adagrad(lr=0.1),
    "rmsprop": fastps.RMSprop(lr=0.01, centered=True),
    "adadelta": fastps.Adadelta(),
    "adam": fastps.Adam(lr=0.01, amsgrad=True),
    "adamw": fastps.AdamW(lr=0.01),
    "ftrl": fastps.Ftrl(),
    "average": fastps.Average(),
}
SHAPES = {
    "scalar": (),
    "empty": (0, 3),
    "long": (LONG,),
    "table": (500, 8),
    "lock_free": (64,),
    "double": (10,),
}
CODECS = {"float32": fastps.Float32(), "bfloat16": fastps.BFloat16(), "int8": fastps.Int8()}


def normal(shape: tuple[int, ...], seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def digest(value: Any) -> Any:
    """Arrays by their bytes; the rest unchanged."""
    if isinstance(value, dict):
        return {str(key): digest(part) for key, part in sorted(value.items())}
    array = np.asarray(value)
    return f"{array.dtype}{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def everything(ps: fastps.ParameterServer) -> dict[str, Any]:
    """Values and optimizer states of all tensors, with their versions and specifications."""
    names = sorted(ps.names())
    versions, specs = ps.versions(names), [ps.spec(name) for name in names]
    return {
        spec.name: [
            digest(ps.pull(spec.name)),
            digest(ps.state(spec.name)),
            versions[spec.name],
            [spec.dtype, spec.apply, spec.group, type(spec.optimizer).__name__],
        ]
        for spec in specs
    }


def register(ps: fastps.ParameterServer) -> None:
    for k, (name, rule) in enumerate(RULES.items()):
        ps.register(name, normal((33,), k), optimizer=rule)
    for k, (name, shape) in enumerate(SHAPES.items()):
        values = normal(shape, 20 + k)
        dtype = np.float64 if name == "double" else np.float32
        ps.register(
            name,
            values.astype(dtype),
            optimizer=fastps.SGD(lr=0.5),
            apply="hogwild" if name == "lock_free" else "exact",
        )


def push(ps: fastps.ParameterServer, seed: int) -> list[Any]:
    """Dense and sparse pushes in every codec; the receipts."""
    receipts = []
    for codec in CODECS.values():
        grads = {name: normal((33,), seed + k) for k, name in enumerate(RULES)} | {
            "long": normal((LONG,), seed)
        }
        receipts += [receipt.version for receipt in ps.push(grads, codec=codec, lr=0.05).values()]
    for name in ("scalar", "empty", "lock_free", "double"):
        grad = normal(SHAPES[name], seed).astype(np.float64 if name == "double" else np.float32)
        receipts.append(ps.push(name, grad).version)
    rows = fastps.Sparse([7, 3, 499], normal((3, 8), seed))
    receipts += [ps.push("table", rows).version, ps.assign("table", rows).version]
    receipts.append(ps.assign("scalar", np.float32(seed)).version)
    values, receipt, versions = ps.push_pull("sgd", normal((33,), seed))
    receipts += [digest(values), receipt.version, versions["sgd"]]
    _, base = ps.pull("adam", versions=True)
    receipts.append(ps.push("adam", normal((33,), seed), based_on=base).staleness)
    receipts.append(ps.push_async({"adam": normal((33,), seed)}).result(timeout=60)["adam"].version)
    bound = ps.bind({"adamw": normal((33,), seed)}, codec=fastps.OneBit())
    receipts.append(ps.push(bound)["adamw"].version)
    return [*receipts, digest(ps.pull("table", indices=[499, 3, 3]))]


def work(ps: fastps.ParameterServer) -> dict[str, Any]:
    """A worker in each mode, and samples."""
    shape, params = (64,), {}
    modes = {
        "async": fastps.Async(max_staleness=8),
        "local": fastps.Local(push_every=2, pull_every=2, lr=0.1),
        "bounded": fastps.Bounded(staleness=1),
        "sync": fastps.Sync(workers=1, deterministic=True),
        "warm": fastps.WarmStart(steps=1, then=fastps.Async()),
    }
    for k, (name, mode) in enumerate(modes.items()):
        weights = f"weights of {name}"
        ps.register(weights, normal(shape, k), optimizer=fastps.SGD(lr=0.1), group=name)
        options = {"codec": fastps.OneBit()} if name != "warm" else {}
        with fastps.Worker(
            ps, {weights: np.zeros(shape, np.float32)}, mode=mode, rank=0, **options
        ) as worker:
            for seed in range(3):
                worker.step({weights: normal(shape, seed)})
            worker.flush()
        params[name] = digest(ps.pull(weights))
    portions = fastps.data.Portions(ps, n=10, size=4, name="samples")
    params["samples"] = [part.tolist() for part in portions]
    return params


def solve(ps: fastps.ParameterServer) -> list[Any]:
    """L-BFGS on the vectors of the shards."""
    ps.register("solution", np.zeros(8), optimizer=fastps.SGD(lr=1.0))
    targets = normal((20, 8), 3).astype(np.float64)

    def loss(params: Any, samples: Any) -> tuple[float, dict[str, Any]]:
        apart = params["solution"] - targets[samples]
        return float((apart**2).sum()), {"solution": 2 * apart.sum(axis=0)}

    result = minimize(ps, ["solution"], loss, samples=20, max_iterations=5)
    return [result.nit, digest(ps.pull("solution"))]


def worker_of(ps: fastps.ParameterServer) -> fastps.Worker:
    """A worker that has residuals and a part of a sum."""
    params = {"adam": np.zeros(33, np.float32)}
    return fastps.Worker(ps, params, mode=fastps.Async(), codec=fastps.OneBit(), accumulate=2)


def train(ps: fastps.ParameterServer, _: Path) -> Any:
    register(ps)
    got = {"pushes": push(ps, 1), "work": work(ps), "solve": solve(ps), "state": everything(ps)}
    ps.register("gone", np.zeros(3, np.float32), optimizer=fastps.SGD())
    ps.unregister("gone")
    try:
        ps.pull("gone")
    except fastps.UnknownTensorError as error:
        return got | {"refusal": error.tensor}
    raise AssertionError("a tensor that was removed was pulled")


def log(ps: fastps.ParameterServer, _: Path) -> Any:
    """Pushes that are in the log, but in no snapshot; the state after them."""
    grads = {name: normal((33,), 5) for name in RULES} | {"long": normal((LONG,), 5)}
    for codec in CODECS.values():
        ps.push(grads, codec=codec)
    rows = fastps.Sparse([7, 3, 499], normal((3, 8), 5))
    ps.push("table", rows)
    ps.assign("table", rows)
    return {"state": everything(ps)}


def look(ps: fastps.ParameterServer, _: Path) -> Any:
    return {"state": everything(ps)}


def save(ps: fastps.ParameterServer, folder: Path) -> Any:
    """Writes a checkpoint and the state of a worker, then takes one more step."""
    with worker_of(ps) as worker:
        for seed in range(3):
            worker.step({"adam": normal((33,), seed)})
        worker.save(folder / "worker.npz")
        fastps.checkpoint.save(ps, folder / "model.safetensors")
        worker.step({"adam": normal((33,), 9)})
        return {"state": everything(ps)["adam"][:2]}


def load(ps: fastps.ParameterServer, folder: Path) -> Any:
    """Reads them into other servers, and takes the same step."""
    fastps.checkpoint.load(ps, folder / "model.safetensors")
    with worker_of(ps) as worker:
        worker.load(folder / "worker.npz")
        worker.step({"adam": normal((33,), 9)})
        return {"state": everything(ps)["adam"][:2]}


if __name__ == "__main__":
    stage, addresses, folder = sys.argv[1:]
    with fastps.connect(addresses, timeout=60.0, ack="logged" if stage == "log" else "applied") as ps:
        print(json.dumps(globals()[stage](ps, Path(folder))))
