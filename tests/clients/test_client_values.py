"""A client of another language computes what the native client does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from clients.driver import Driver, packed, unpacked
from faults.shards import Shards
from reference_rounding import nearest, widen

SLICE = 63 * 4096
SHAPES = {"scalar": (), "empty": (0,), "slice": (SLICE,), "beyond": (SLICE + 1,), "large": (600_000,)}
CODECS = {
    "float32": fastps.Float32(),
    "bfloat16": fastps.BFloat16(),
    "int8": fastps.Int8(),
    "stochastic": fastps.Int8(stochastic=True, seed=7),
    "fourbit": fastps.FourBit(),
    "onebit": fastps.OneBit(),
}


def options(ca: Any, kind: str) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Of the server, of a driver and of the native client."""
    if kind == "plain":
        return [], {}, {}
    server = ca.mutual | {"certificate_role": "server"} if kind == "mutual" else ca.server
    with Path(server["tls_cert"]).open("a") as certificates:  # shards trust each other by its issuer
        certificates.write(Path(ca.file).read_text())
    client = ca.client if kind == "mutual" else ca.trust
    names = {"ca": "tls_ca", "cert": "tls_cert", "key": "tls_key"}
    driver = {name: client[own] for name, own in names.items() if own in client}
    return [f"--{name.replace('_', '-')}={file}" for name, file in server.items()], driver, client


@pytest.mark.parametrize("kind", ["plain", "tls", "mutual"])
def test_values_are_those_of_the_native_client(
    clusters: Callable[..., Shards],
    drivers: Callable[..., Driver],
    ca: Any,
    rng: np.random.Generator,
    kind: str,
) -> None:
    server, tls, native = options(ca, kind)
    cluster = clusters(*server)
    driver = drivers(cluster.addresses, **({"tls": tls} if tls else {}))
    shapes = list(SHAPES) if kind == "plain" else ["large"]
    compare(driver, ",".join(cluster.addresses), native, rng, shapes)


def test_many_tensors_are_registered_together(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver]
) -> None:
    cluster = clusters()
    driver, names = drivers(cluster.addresses), [f"w{k:03}" for k in range(300)]
    values = np.arange(7, dtype=np.float32)
    spec = {"shape": [7], "group": "default", "optimizer": "sgd", "settings": {"lr": 1.0}}

    def fields(*names: str) -> dict[str, Any]:
        return {"tensors": list(names), "tensor": spec, "values": packed(values)}

    with fastps.connect(",".join(cluster.addresses)) as ps:
        ps.register("w100", np.zeros(3, np.float32), optimizer=fastps.SGD(lr=1.0))
        for wrong, tensor, kind in ((names, "w100", "precondition"), ([*names, "w007"], "w007", "config")):
            error = driver.refused("register_all", **fields(*wrong))
            assert (error["kind"], error["tensor"]) == (kind, tensor), error
            assert ps.names() == ["w100"]
        ps.unregister("w100")
        driver.do("register_all", **fields(*names))
        driver.do("register_all", **fields(*names, "more"))
        driver.do("register_all", **fields())
        assert ps.names() == ["more", *names]
        pulled = ps.pull(names)
        assert all(pulled[name].tobytes() == values.tobytes() for name in names)


def compare(
    driver: Driver, addresses: str, native: dict[str, str], rng: np.random.Generator, shapes: list[str]
) -> None:
    """The same calls by both clients, each on its own tensors."""
    with fastps.connect(addresses, transport="tcp", **native) as ps:
        for name in shapes:
            shape = SHAPES[name]
            for codec, ours in CODECS.items():
                values = rng.standard_normal(shape).astype(np.float32)
                theirs, own = f"go {name} {codec}", f"py {name} {codec}"
                driver.register(theirs, values, "adagrad", lr=0.1)
                ps.register(own, values, optimizer=fastps.Adagrad(lr=0.1))
                grad = np.zeros(shape, np.float32)
                bound = ps.bind({own: grad}, codec=ours) if codec == "onebit" else None
                for step in range(2):
                    grad[...] = rng.standard_normal(shape) * 10.0 ** (step - 1)
                    feedback = {"feedback": theirs} if codec == "onebit" else {}
                    answer = driver.push(theirs, grad, codec=codec, **feedback)
                    assert "error" not in answer, answer["error"]
                    receipts = ps.push(bound) if bound else {own: ps.push(own, grad, codec=ours)}
                    assert answer["receipts"][theirs]["Version"] == receipts[own].version
                assert driver.pull(theirs).tobytes() == ps.pull(own).tobytes(), (name, codec)
                if bound is not None:
                    saved = driver.do("residuals", feedback=theirs)["values"][theirs]
                    assert unpacked(saved).tobytes() == bound.feedback.state_dict()[own].tobytes()


def test_push_pull_rows_and_settings_are_those_of_the_native_client(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver], rng: np.random.Generator
) -> None:
    cluster = clusters()
    driver = drivers(cluster.addresses)
    shape = (3 * SLICE // 1000, 1000)  # rows that straddle the borders of slices
    values = rng.standard_normal(shape).astype(np.float32)
    with fastps.connect(",".join(cluster.addresses)) as ps:
        driver.register("go", values, "adagrad", lr=0.1)
        ps.register("py", values, optimizer=fastps.Adagrad(lr=0.1))
        dense = rng.standard_normal(shape).astype(np.float32)
        pulled = driver.do(
            "push_pull", gradients=[{"tensor": "go", "values": packed(dense)}], lr=0.5, scale=0.25, keep="v"
        )
        theirs = ps.push_pull({"py": dense}, lr=0.5, scale=0.25)[0]["py"]
        assert unpacked(pulled["values"]["go"]).tobytes() == theirs.tobytes()
        assert pulled["versions"]["go"] == [2, 2, 2]
        rows = np.array([700, 3, 258, 3, 516, 257])
        for codec in ("float32", "bfloat16", "int8"):
            grad = rng.standard_normal((rows.size, 1000)).astype(np.float32)
            sparse = {"tensor": "go", "values": packed(grad), "rows": rows.tolist()}
            receipt = driver.do("push", gradients=[sparse], codec=codec, based_on="v")["receipts"]["go"]
            assert (receipt["Staleness"], receipt["Duplicate"]) == (0, False)
            ps.push("py", fastps.Sparse(rows, grad), codec=CODECS[codec])
        assert driver.pull("go").tobytes() == ps.pull("py").tobytes()
        some = driver.do("pull_rows", tensors=["go"], rows=rows.tolist())
        assert unpacked(some["values"]["go"]).tobytes() == ps.pull("py")[rows].tobytes()
        # Pushes of others since the base are staleness.
        ps.push("go", dense)
        based = driver.do("push", gradients=[{"tensor": "go", "values": packed(dense)}], based_on="v")
        assert based["receipts"]["go"]["Staleness"] == 1


def test_bfloat16_tensors_are_registered(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver], rng: np.random.Generator
) -> None:
    """With values that NumPy rounds to the same bits, and equal to a registration by the native client."""
    cluster = clusters()
    driver = drivers(cluster.addresses)
    with fastps.connect(",".join(cluster.addresses)) as ps:
        for shape in ((SLICE + 1001,), (3,), (0,)):
            values = rng.standard_normal(shape).astype(np.float32)
            values[:3] = [np.finfo(np.float32).max, -0.0, 1e-40][: values.size]
            spec = {"name": f"{shape}", "shape": shape, "optimizer": "sgd", "settings": {"lr": 0.5}}
            fields = {"tensor": spec | {"bfloat16": True}, "values": packed(values)}
            driver.do("register", **fields)
            expected = widen(nearest(values))
            for got in (driver.pull(spec["name"]), ps.pull(spec["name"])):
                assert got.tobytes() == expected.tobytes()
            # The same specification: it is there.
            ps.register(spec["name"], values, fastps.SGD(lr=0.5), dtype="bfloat16")
            error = driver.refused("register", tensor=spec, values=packed(values))
            assert error["kind"] == "precondition", error
        error = driver.refused(
            "register", **fields | {"tensor": spec | {"bfloat16": True, "hogwild": True, "name": "h"}}
        )
        assert (error["kind"], error["tensor"]) == ("dtype", "h"), error


def test_bfloat16_tensors_are_read_and_pushed_to(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver], rng: np.random.Generator
) -> None:
    cluster = clusters()
    driver = drivers(cluster.addresses)
    with fastps.connect(",".join(cluster.addresses)) as ps:
        for shape in ((SLICE + 1001,), (3,), (0,), (40, 7)):
            name, values = f"half {shape}", rng.standard_normal(shape).astype(np.float32)
            ps.register(name, values, fastps.SGD(lr=0.5), dtype="bfloat16")
            assert driver.pull(name).tobytes() == ps.pull(name).tobytes()
            grad = rng.standard_normal(shape).astype(np.float32)
            for codec in ("float32", "int8"):
                before = ps.pull(name)
                driver.do("push", gradients=[{"tensor": name, "values": packed(grad)}], codec=codec)
                assert driver.pull(name).tobytes() == ps.pull(name).tobytes()
                assert grad.size == 0 or (ps.pull(name) != before).any()
            pulled = driver.do("push_pull", gradients=[{"tensor": name, "values": packed(grad)}])
            assert unpacked(pulled["values"][name]).tobytes() == ps.pull(name).tobytes()
        rows = [39, 0, 7]
        some = driver.do("pull_rows", tensors=["half (40, 7)"], rows=rows)["values"]["half (40, 7)"]
        assert unpacked(some).tobytes() == ps.pull("half (40, 7)")[rows].tobytes()
        ps.register("double", np.zeros(2), fastps.SGD())
        error = driver.refused("pull", tensors=["double"])
        assert (error["kind"], error["tensor"]) == ("dtype", "double"), error


def test_tensors_are_listed_counted_and_removed(
    clusters: Callable[..., Shards], drivers: Callable[..., Driver]
) -> None:
    cluster = clusters()
    driver = drivers(cluster.addresses)
    for name in ("b", "a"):
        driver.register(name, np.zeros(600_000))
    assert driver.do("names")["names"] == ["a", "b"]
    with fastps.connect(",".join(cluster.addresses)) as ps:
        used = [shard["counters"]["memory_used"] for shard in ps.stats()["shards"]]
        shards = driver.do("stats")["shards"]
        assert [shard.get("shard", 0) for shard in shards] == [0, 1]
        assert f"pid {driver.process.pid}" in {session["name"] for session in shards[0]["sessions"]}
        assert shards[1]["counters"]["memory_used"] > 0
        driver.do("unregister", tensors=["a"])
        assert ps.names() == driver.do("names")["names"] == ["b"]
        left = [shard["counters"]["memory_used"] for shard in ps.stats()["shards"]]
        assert all(now < before for now, before in zip(left, used, strict=True)), (used, left)
    for op in ("unregister", "pull"):
        error = driver.refused(op, tensors=["a"])
        assert (error["kind"], error["code"], error["tensor"]) == ("unknown_tensor", "NotFound", "a"), error
