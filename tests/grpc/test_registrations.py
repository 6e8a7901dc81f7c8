"""Many tensors in one registration: few calls and syncs, whole or absent, found out before the first."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from between import between
from foreign_client import ForeignClient, Refused, Stubs
from test_earlier_server import earlier

import fastps

STEPS = "Register", "Reserve", "Seal", "Commit"
MANY = 1000


def layers(count: int = MANY, size: int = 3, prefix: str = "w") -> dict[str, np.ndarray[Any, Any]]:
    return {f"{prefix}{k:05}": np.full(size, k, np.float32) for k in range(count)}


def check(ps: fastps.ParameterServer, wanted: dict[str, Any]) -> None:
    """All are there, whole, and registered once."""
    values, versions = ps.pull(list(wanted)), ps.versions(list(wanted))
    for name, value in wanted.items():
        assert values[name].tobytes() == value.tobytes(), name
        assert versions[name] == 1, name


def counting(calls: Counter[str], change: Callable[[str, bytes], bytes] | None = None) -> Any:
    def count(method: str, answer: bytes) -> bytes:
        calls[method.rpartition("/")[2]] += 1
        return change(method, answer) if change else answer

    return count


def test_a_thousand_take_four_calls() -> None:
    calls: Counter[str] = Counter()
    with (
        fastps.serve() as server,
        between(server.addresses, change=counting(calls)) as address,
        fastps.connect(address) as ps,
    ):
        wanted = layers() | {"big": np.arange(300_000, dtype=np.float32)}
        ps.register(wanted, optimizer=fastps.SGD(lr=1.0))
        assert {step: calls[step] for step in STEPS} == dict.fromkeys(STEPS, 1)
        check(ps, wanted)
        ps.register(wanted, optimizer=fastps.SGD(lr=1.0))
        assert calls["Register"] == 2
        assert calls["Reserve"] == 1


def test_an_earlier_server_gets_one_tensor_at_a_time(stubs: Stubs) -> None:
    calls: Counter[str] = Counter()
    with (
        fastps.serve() as server,
        between(server.addresses, change=counting(calls, earlier(stubs, "registrations"))) as address,
        fastps.connect(address) as ps,
    ):
        wanted = layers(20)
        ps.register("w00015", np.zeros(4, np.float32), fastps.SGD(lr=1.0))
        with pytest.raises(fastps.ConfigError, match="20 tensors of this call, 1 are registered") as refused:
            ps.register(wanted, optimizer=fastps.SGD(lr=1.0))
        assert refused.value.tensor == "w00015"
        assert ps.names() == ["w00015"]
        ps.unregister("w00015")
        ps.register(wanted, optimizer=fastps.SGD(lr=1.0))
        assert {step: calls[step] for step in STEPS} == dict.fromkeys(STEPS, 21)
        check(ps, wanted)


@pytest.mark.parametrize("ack", ["applied", "logged"])
def test_a_log_syncs_three_times_at_most(tmp_path: Path, ack: Any) -> None:
    with (
        fastps.serve(shards=2, data_dir=tmp_path) as server,
        fastps.connect(server.addresses, ack=ack) as ps,
    ):
        ps.register("first", np.zeros(1, np.float32), fastps.SGD(lr=1.0))

        def syncs() -> list[int]:
            return [int(shard["counters"]["log_syncs"]) for shard in ps.stats()["shards"]]

        before, wanted = syncs(), layers()
        ps.register(wanted, optimizer=fastps.SGD(lr=1.0))
        made = [now - then for now, then in zip(syncs(), before, strict=True)]
        assert all(1 <= one <= 3 for one in made), made
        check(ps, wanted)
    with (
        fastps.serve(shards=2, data_dir=tmp_path) as server,
        fastps.connect(server.addresses) as ps,
    ):
        assert ps.names() == ["first", *sorted(wanted)]
        check(ps, wanted)


def test_pages_and_optimizers_by_name() -> None:
    with fastps.serve(shards=3) as server, fastps.connect(server.addresses) as ps:
        wanted = layers(4096 + 5, 1)
        rules: dict[str, fastps.Optimizer] = {
            name: fastps.Adam(lr=0.1) if k % 2 else fastps.SGD(lr=0.5) for k, name in enumerate(wanted)
        }
        ps.register(wanted, optimizer=rules, group="pages")
        check(ps, wanted)
        for name in ("w00000", "w00001", "w04096", "w04100"):
            spec = ps.spec(name)
            assert (spec.optimizer, spec.group) == (rules[name], "pages")
        counters = [shard["counters"] for shard in ps.stats()["shards"]]
        assert [int(one["reservations"]) for one in counters] == [0, 0, 0]
        ps.register({}, optimizer=fastps.SGD(lr=1.0))


def bad(wanted: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**wanted, name: value}


@pytest.mark.parametrize("where", ["servers", "store", "shared"])
def test_what_is_wrong_is_found_before_the_first(where: str) -> None:
    with fastps.serve(shards=2) as server:
        remote = where == "servers"
        ps = fastps.connect(server.addresses) if remote else fastps.Store(shared=where == "shared")
        with ps:
            apply: Any = "hogwild" if where == "shared" else "exact"
            ps.register("w00700", np.zeros(4, np.float32), fastps.SGD(lr=1.0), apply)
            wanted = layers()
            mine = bad(wanted, "w00700", np.zeros(4, np.float32))
            sgd, long = fastps.SGD(lr=1.0), "x" * 1025
            nan, whole = np.full(3, np.nan, np.float32), np.zeros(3, np.int32)
            for name, values, rule, error in (
                ("w00700", wanted, sgd, fastps.ConfigError),  # another shape is there
                ("w00699", bad(mine, "w00699", np.zeros(3)), fastps.Adam(), fastps.DTypeError),
                ("w00699", bad(mine, "w00699", whole), sgd, fastps.DTypeError),
                ("w00699", bad(mine, "w00699", nan), sgd, fastps.NonFiniteError),
                (long, bad(mine, long, np.zeros(3, np.float32)), sgd, fastps.ConfigError),
            ):
                with pytest.raises(error) as refused:
                    ps.register(values, optimizer=rule, apply=apply)
                assert refused.value.tensor in (name, None), str(refused.value)
                assert ps.names() == ["w00700"], str(refused.value)
            ps.register(mine, optimizer=fastps.SGD(lr=1.0), apply=apply)
            assert len(ps.names()) == MANY


def test_what_does_not_fit_leaves_nothing() -> None:
    with fastps.serve(shards=2, memory_limit=256 << 20) as server, fastps.connect(server.addresses) as ps:
        wanted = layers(100) | {"large": np.zeros(40 << 20, np.float32)}
        none = "101 tensors of this call, 0 are registered"
        with pytest.raises(fastps.CapacityError, match=none) as refused:
            ps.register(wanted, optimizer=fastps.SGD(lr=1.0))
        assert refused.value.tensor == "large"
        assert ps.names() == []
        counters = [shard["counters"] for shard in ps.stats()["shards"]]
        assert [int(one["reservations"]) for one in counters] == [0, 0]
        del wanted["large"]
        ps.register(wanted, optimizer=fastps.SGD(lr=1.0))
        check(ps, wanted)


def test_clients_that_register_the_same_at_once() -> None:
    with fastps.serve(shards=2) as server:
        wanted = layers(600)
        names, failed = list(wanted), []

        def register(k: int) -> None:
            order = names[k * 100 :] + names[: k * 100]
            with fastps.connect(server.addresses) as ps:
                try:
                    ps.register({name: wanted[name] for name in order}, optimizer=fastps.SGD(lr=1.0))
                    check(ps, wanted)
                except BaseException as error:
                    failed.append(error)
                    raise

        threads = [threading.Thread(target=register, args=(k,)) for k in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []


def test_bad_messages_change_nothing(stubs: Stubs) -> None:
    """From a stub: two fields, repeated names, too many, unknown reservations."""
    pb = stubs.pb
    with fastps.serve() as server, ForeignClient(stubs, server.address_list) as foreign:
        client = foreign.client

        def spec(name: str) -> Any:
            return foreign.spec(name, (3,))

        def refused(call: str, request: Any, text: str) -> None:
            with pytest.raises(Refused, match=text):
                foreign.call(0, call, request)

        def register(*specs: Any, **fields: Any) -> Any:
            return pb.RegisterRequest(client=client, specs=specs, **fields)

        refused("Register", register(spec("a"), spec=spec("b")), "both spec and specs")
        refused("Register", register(spec("a"), spec("b"), spec("a")), "named twice")
        refused("Register", register(*(spec(f"t{k}") for k in range(4097))), "too many tensors")
        wide = foreign.spec("wide", (1 << 36,))
        refused("Register", register(spec("a"), wide), "too many slices")
        assert foreign.names() == []
        many = pb.ReserveRequest(client=client, reservations=[pb.Reservation(reservation=7, spec=spec("a"))])
        refused("Reserve", many, "ran out")
        both = pb.ReserveRequest(client=client, reservation=7, reservations=[pb.Reservation(reservation=7)])
        refused("Reserve", both, "both reservation and reservations")
        refused("Seal", pb.SealRequest(reservations=list(range(1, 16_386))), "too many tensors")
        refused("Commit", pb.CommitRequest(client=client, reservation=1, reservations=[2]), "both")
        sealed = foreign.call(0, "Seal", pb.SealRequest(reservations=[7, 8]))
        assert (sealed.refused.reservation, sealed.refused.refusal.kind) == (7, "lease")
        places = foreign.call(0, "Register", register(spec("a"), spec("b"))).outcomes
        commit = pb.CommitRequest(client=client, reservations=[one.reservation for one in places])
        committed = foreign.call(0, "Commit", commit)
        assert committed.refused.reservation == places[0].reservation
        assert committed.refused.refusal.kind == "precondition"
        assert foreign.names() == []
