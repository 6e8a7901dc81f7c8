"""Several runs on one server: separate names, listed and freed; a worker that continues one says so."""

from __future__ import annotations

import json
import logging
import pickle
import re
import time

import numpy as np
import pytest
from torch import nn

import fastps
import fastps.checkpoint
import fastps.torch
from fastps._shared.text import ago
from fastps.commands import cli

ONES = np.ones(4, np.float32)


def listed(server, capfd):
    """The tensors that `fastps ls` lists."""
    capfd.readouterr()
    assert cli.main(["ls", server.addresses, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def filled(ps, value, group="default"):
    ps.register("w", np.full(4, value, np.float32), fastps.SGD(lr=1.0), group=group)


@pytest.fixture
def runs(server):
    """Clients of run a, of run b, and of none."""
    clients = [fastps.connect(server.addresses, namespace=name) for name in ("a", "b", None)]
    yield clients
    for client in clients:
        client.close()


def test_each_run_has_names_of_its_own(runs):
    a, b, none = runs
    for value, ps in enumerate(runs):
        filled(ps, value)
    a.push("w", ONES)
    assert [ps.pull("w")[0] for ps in runs] == [-1, 1, 2]
    assert a.names() == b.names() == ["w"]
    assert none.names() == ["run:a/w", "run:b/w", "w"]
    assert (none.pull("run:b/w") == b.pull("w")).all()
    assert (a.namespace, none.namespace) == ("a", None)
    assert a.spec("w") == b.spec("w") == none.spec("w")
    assert a.another().names() == ["w"]
    with pickle.loads(pickle.dumps(b)) as copied:
        assert (copied.namespace, copied.names()) == ("b", ["w"])
    a.unregister("w")
    with pytest.raises(fastps.UnknownTensorError) as missing:
        a.pull("w")
    assert missing.value.tensor == "w"
    assert none.names() == ["run:b/w", "w"]


def test_rm_needs_a_namespace(server):
    assert cli.main(["rm", server.addresses]) == 2


def test_groups_and_portions_are_a_run_s(runs):
    """Of one name in two runs: another mode, other samples."""
    a, b, _ = runs
    for ps, mode, n in [(a, fastps.Bounded(1), 10), (b, fastps.Async(), 20)]:
        filled(ps, 0, group="g")
        with fastps.Worker(ps, {"w": ONES}, mode) as worker:
            worker.step({"w": ONES})
            assert sum(len(indices) for indices in fastps.data.Portions(ps, n=n, size=5)) == n
            assert worker.params["w"].tolist() == [-1.0] * 4


def test_names_of_runs_are_checked(server):
    for name in ("", "a/b", "run:a", "a b", "ä", "x" * 65):
        with pytest.raises(fastps.ConfigError, match=r"a-z, A-Z, 0-9"):
            fastps.connect(server.addresses, namespace=name)


def test_runs_are_listed_and_freed(runs, server, capfd):
    a, b, none = runs
    filled(a, 0)
    a.push("w", ONES)
    b.register("table", np.zeros((3, 2), np.float32), fastps.Adam(lr=0.5), group="g")
    filled(none, 0)
    assert cli.main(["ls", server.addresses]) == 0
    out = capfd.readouterr().out
    lines = [re.sub(r" +\d s ago$", " now", line).split() for line in out.splitlines()]
    assert lines == [
        ["NAMESPACE", "TENSOR", "SHAPE", "DTYPE", "OPTIMIZER", "VERSION", "BYTES", "LAST", "CHANGE"],
        ["-", "w", "4", "float32", "SGD", "1", "16", "now"],
        ["a", "w", "4", "float32", "SGD", "2", "16", "now"],
        ["b", "table", "3x2", "float32", "Adam", "1", "24", "now"],
    ]
    assert cli.main(["ls", server.addresses, "--namespace", "b", "--json"]) == 0
    (one,) = json.loads(capfd.readouterr().out)
    assert (one["name"], one["group"], one["optimizer"]["lr"]) == ("table", "g", 0.5)
    assert cli.main(["rm", server.addresses, "--namespace", "a"]) == 0
    assert capfd.readouterr().out == "freed namespace a: 1 tensor, 16 bytes of values\n"
    assert none.names() == ["run:b/table", "w"]
    assert cli.main(["rm", server.addresses, "--namespace", "a"]) == 1
    assert "no namespace 'a'" in capfd.readouterr().err


def test_a_cut_of_a_run_is_saved_exported_and_loaded(tmp_path, capfd):
    """By the full name of its group; another run, and another group of the run, are not in the cut."""
    data, file = tmp_path / "data", tmp_path / "model.safetensors"
    with fastps.serve(shards=2, data_dir=data) as server:
        with (
            fastps.connect(server.addresses, namespace="exp1") as a,
            fastps.connect(server.addresses, namespace="exp2") as b,
        ):
            model = nn.Linear(2, 1)
            named = model.named_parameters()
            fastps.torch.ParameterServerOptimizer(named, a, fastps.SGD(lr=1.0)).close()
            filled(b, 4)
            kept = a.pull("weight")
            for group in ("exp1/default", "run:exp3/default"):
                assert cli.main(["checkpoint", "save", server.addresses, f"--consistent={group}"]) == 1
                assert f'no tensor of group "{group}" is registered' in capfd.readouterr().err
            assert cli.main(["checkpoint", "save", server.addresses, "--consistent=run:exp1/default"]) == 0
            a.push("weight", np.ones((1, 2), np.float32))
        assert cli.main(["checkpoint", "list", str(data)]) == 0
        assert 'a cut over group "run:exp1/default"' in capfd.readouterr().out
        assert cli.main(["checkpoint", "export", str(data), str(file), "--consistent"]) == 0
    with pytest.raises(fastps.ConfigError, match='prefix="run:exp1/"'):
        fastps.torch.load(model, file)
    fastps.torch.load(model, file, prefix="run:exp1/")
    assert (model.weight.detach().numpy() == kept).all()


def test_a_worker_that_continues_a_run_says_so(runs, caplog, tmp_path):
    a, _, none = runs
    caplog.set_level(logging.INFO, "fastps")
    for ps, what in [(a, "namespace a"), (none, "a model that was trained before")]:
        filled(ps, 0)
        with fastps.Worker(ps, {"w": ONES}, fastps.Async()) as first:
            assert not caplog.records
            first.step({"w": ONES})
            with fastps.Worker(ps, {"w": ONES}, fastps.Async(), name="b"):  # beside another one
                assert [record.levelname for record in caplog.records] == ["INFO"]
            first.step({"w": ONES})
        caplog.clear()
        with fastps.Worker(ps, {"w": ONES}, fastps.Async()):
            pass
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert re.fullmatch(rf"continuing {what}: 2 updates, last change \d+ s ago", record.getMessage())
        caplog.clear()
    fastps.checkpoint.save(none, tmp_path / "w")
    with fastps.Store() as store:
        filled(store, 0)
        store.assign("w", ONES)  # a change, but no step
        fastps.Worker(store, {"w": ONES}, fastps.Async()).close()
        assert not caplog.records
        fastps.checkpoint.load(store, tmp_path / "w")
        fastps.Worker(store, {"w": ONES}, fastps.Async()).close()
    assert "continuing a model that was trained before: 2 updates" in caplog.text


def test_another_model_under_the_same_names_names_the_run_and_the_ways_out(runs, server):
    """And each of them works."""
    a, b, none = runs
    for ps in (a, b):
        named = nn.Linear(3 if ps is a else 5, 1).named_parameters()
        fastps.torch.ParameterServerOptimizer(named, ps, fastps.SGD(lr=0.1)).close()

    def make(ps, **options):
        named = nn.Linear(5, 1).named_parameters()
        fastps.torch.ParameterServerOptimizer(named, ps, fastps.SGD(lr=0.1), **options).close()

    with pytest.raises(
        fastps.ConfigError, match=r"in namespace a: .*prefix=.*namespace=.*rm ADDRESSES --namespace a"
    ) as refused:
        make(a)
    assert refused.value.tensor == "weight"
    make(a, prefix="other.")
    assert cli.main(["rm", server.addresses, "--namespace", "a"]) == 0
    make(a)
    for name in ("weight", "bias"):
        none.register(name, ONES, fastps.SGD(lr=0.1))
    with pytest.raises(fastps.ConfigError, match=r"ps.unregister") as refused:
        make(none)
    assert "fastps rm" not in str(refused.value)  # which frees only runs
    for name in ("weight", "bias"):
        none.unregister(name)
    make(none)


def test_runs_survive_a_restart(tmp_path):
    for start in range(2):
        with (
            fastps.serve(data_dir=tmp_path / "data") as server,
            fastps.connect(server.addresses, namespace="a", ack="logged") as ps,
        ):
            if start == 0:
                filled(ps, 3)
            ps.push("w", ONES)
            assert ps.pull("w").tolist() == [2.0 - start] * 4
            assert ps.names() == ["w"]


def test_the_last_change_is_of_the_server_s_life(tmp_path, capfd):
    """A pull or a look is no change; a restarted server does not know of earlier ones."""
    for start in range(2):
        with (
            fastps.serve(shards=2, data_dir=tmp_path / "data") as server,
            fastps.connect(server.addresses, namespace="a") as a,
            fastps.connect(server.addresses) as ps,
        ):
            if start == 1:
                assert [one["changed_s_ago"] for one in listed(server, capfd)] == [None, None]
                continue
            filled(a, 3)
            ps.register("table", np.zeros((200_000, 3), np.float32), fastps.SGD(lr=1.0))
            time.sleep(2.0)
            a.pull("w")
            ps.push("table", fastps.Sparse(np.array([199_999]), np.ones((1, 3), np.float32)))
            new, old = listed(server, capfd)
            assert (new["namespace"], old["namespace"]) == (None, "a")
            new, old = new["changed_s_ago"], old["changed_s_ago"]
            assert new < old
            assert 0.5 < old < 60  # to about a second
            (mine,) = a._native.last_changes(["w"], None)
            assert mine == pytest.approx(old, abs=5)
    assert [ago(s) for s in (0.2, 59, 90, 3600 * 3, 86400 * 2)] == [
        "0 s ago",
        "59 s ago",
        "2 min ago",
        "3 h ago",
        "2 d ago",
    ]
