"""Arguments of a wrong type, shape or range: every call refuses them by an error of fastps, and goes on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
import fastps.checkpoint
from cases import case
from fastps.data import Portions
from fastps.optimize import Vectors

SGD = fastps.SGD(lr=0.5)
ONES = np.ones(2, np.float32)
WRONG: list[Any] = [
    *(3, -1, 2**70, 10**400, 1.5, -0.5, math.nan, math.inf, 1j, True, np.True_),
    *("", "x", "\ud800", "a\0b", b"x", None, object(), float, lambda: 3),
    *((), [], [3], ["w", 3], {}, {3: ONES}, {"w": None}, {"w": "x"}, {"w"}),
    *(np.zeros(2), np.zeros(0, np.float32), np.array(["a"]), np.array([None, 1])),
    np.ones((2, 2), np.float32),
]


def is_text(value: object) -> bool:
    return isinstance(value, str) and "\ud800" not in value


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    """Names, one or several."""
    return is_text(value) or (hasattr(value, "__iter__") and not isinstance(value, (str, bytes)))


def is_flag(value: object) -> bool:
    return isinstance(value, (bool, np.bool_))


KINDS: list[tuple[Callable[[Any], bool], str]] = [
    (
        is_text,
        "name group note address ack transport namespace space advertise copy_to certificate_role take_over",
    ),
    (is_text, "to_mark tls_server_name folder out_folder path tls_ca tls_key tls_cert token_file tokens"),
    (is_text, "tls_crl audit data_dir server_token_file"),
    (is_number, "timeout scale lease keep_for loss to shards spin_us keep first_element sequence n"),
    (is_number, "size seed copy_log copy_bytes_per_second owner_lease shard"),
    (is_flag, "check_finite shared versions norms local insecure accept_loss verify copy"),
    (is_list, "names listen cluster refuse_worker vectors"),
    (lambda value: is_number(value) or (isinstance(value, Mapping) and not value), "lr"),  # or rates by name
    (lambda value: isinstance(value, Mapping), "state"),
    (lambda value: isinstance(value, fastps.Versions), "based_on"),
    (lambda value: isinstance(value, fastps.ErrorFeedback), "feedback"),
    (lambda value: isinstance(value, str) and value in ("values", "average"), "view"),
]
#: What an argument may be; anything else must be refused. All may be None where that is the default.
MAY_BE = {name: may_be for may_be, names in KINDS for name in names.split()}


def check(call: Callable[..., Any], given: Callable[[], dict[str, Any]]) -> None:
    """Calls with each wrong value of each argument."""
    for name, parameter in inspect.signature(call).parameters.items():
        may_be = MAY_BE.get(name, lambda _: True)
        for value in WRONG:
            with case(getattr(call, "__qualname__", call), name, type(value).__name__, repr(value)[:40]):
                error, made = None, None
                try:
                    made = call(**{**given(), name: value})
                except fastps.FastpsError as raised:
                    error = raised
                assert type(error) is not fastps.FastpsError, error  # which stands for a bug in fastps
                if error is None:
                    is_default = value is None and parameter.default is None
                    assert is_default or may_be(value), "it was not refused"
                getattr(made, "close", getattr(made, "stop", lambda: None))()


def verbs(ps: fastps.ParameterServer) -> None:
    """Checks the verbs of a store or a client."""
    ps.register("w", ONES, SGD, average=fastps.EMA(0.5))
    ps.register("rows", np.ones((4, 2), np.float32), fastps.SGD(lr=0.5, momentum=0.9))
    made = iter(range(10**6))
    check(ps.register, lambda: {"name": f"new {next(made)}", "array": ONES, "optimizer": SGD})
    check(ps.unregister, lambda: {"name": "none"})
    check(ps.wait_for, lambda: {"names": "w", "timeout": 0.1})
    check(ps.versions, lambda: {"names": "w"})
    for push in (ps.push, ps.push_async, ps.push_pull):
        check(push, lambda: {"name": "w", "grad": np.zeros_like(ONES)})
    check(ps.bind, lambda: {"grads": {"w": ONES}})
    check(ps.pull, lambda: {"names": "w"})
    check(ps.pull, lambda: {"names": ["rows"], "indices": {"rows": [1]}})
    check(ps.assign, lambda: {"name": "w", "array": ONES})
    check(ps.load_state, lambda: {"name": "rows", "state": ps.state("rows")})
    for other in (ps.names, ps.stats, ps.another):
        check(other, dict)
    for of_one in (ps.spec, ps.state):
        check(of_one, lambda: {"name": "rows"})

    def vectors(space: Any, names: Any, vectors: Any, keep_for: Any, timeout: Any = None) -> Vectors:
        return Vectors(ps, names, vectors, space=space, keep_for=keep_for, timeout=timeout)

    def portions(n: Any, size: Any, seed: Any, name: Any, timeout: Any = None) -> Portions:
        return Portions(ps, n, size, seed, name, timeout=timeout)

    check(vectors, lambda: {"space": "s", "names": ["w"], "vectors": ["g"], "keep_for": 1.0})
    check(portions, lambda: {"n": 4, "size": 2, "seed": 0, "name": "train"})
    np.testing.assert_array_equal(ps.pull("w"), ONES)


def test_verbs_of_a_store() -> None:
    with fastps.Store() as store:
        verbs(store)


def test_verbs_of_a_client() -> None:
    with fastps.serve(shards=2) as server, fastps.connect(server, timeout=20) as ps:
        verbs(ps)


def test_stores_servers_and_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(fastps.Store, dict)
    check(fastps.Store.open, lambda: {"address": "x"})
    check(fastps.serve, dict)
    with fastps.serve() as server:
        check(fastps.connect, lambda: {"addresses": server.addresses, "timeout": 0.5})
    with fastps.Store(shared=True) as store:
        check(store.view, lambda: {"name": "none"})


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is no file, though the system takes it for an open one."""
    monkeypatch.chdir(tmp_path)
    data, store = tmp_path / "data", fastps.Store()
    with fastps.serve(data_dir=data, keep_history=1 << 20) as server, fastps.connect(server) as ps:
        ps.register("w", ONES, SGD)
    check(fastps.history, lambda: {"folder": data})
    check(fastps.rewind, lambda: {"folder": data, "to": 1})
    check(lambda out_folder=None: fastps.rewind(data, out_folder, to=1), dict)
    store.register("w", ONES, SGD)
    with fastps.Worker(store, {"w": ONES}) as worker:
        calls: list[Callable[[Any], object]] = [
            worker.save,
            worker.load,
            lambda path: fastps.checkpoint.save(store, path),
            lambda path: fastps.checkpoint.load(store, path),
        ]
        for wrong in WRONG:
            if not isinstance(wrong, str) or not wrong or "\0" in wrong:
                for call in calls:
                    with case(repr(wrong)[:40]), pytest.raises(fastps.ConfigError, match="path"):
                        call(wrong)


def test_codecs_and_workers() -> None:
    codec, store = fastps.Int8(), fastps.Store()
    store.register("w", ONES, SGD)
    check(codec.encode, lambda: {"array": ONES})
    check(codec.decode, lambda: {"body": codec.encode(ONES), "n": 2})
    check(lambda name: fastps.codecs.Codec.named(name), lambda: {"name": "int8"})
    check(lambda state: fastps.ErrorFeedback().load_state_dict(state), lambda: {"state": {}})
    check(fastps.Worker, lambda: {"ps": store, "params": {"w": ONES.copy()}})
    with fastps.Worker(store, {"w": ONES}) as worker:
        check(worker.step, lambda: {"grads": {"w": np.zeros_like(ONES)}})
        right = worker.state_dict()
        for state in (*WRONG, {"step": 1}, {**right, "sum": 3}, {**right, "step": "x"}):
            with case(repr(state)[:60]), pytest.raises(fastps.ConfigError):
                worker.load_state_dict(state)


def test_no_number_is_a_bool() -> None:
    for make in (
        lambda: fastps.SGD(lr=True),
        lambda: fastps.Adam(eps=np.True_),  # type: ignore[arg-type]
        lambda: fastps.EMA(0.5, every=True),
        lambda: fastps.Int8(seed=True),
    ):
        with pytest.raises(fastps.ConfigError, match="True"):
            make()
    assert fastps.Int8(stochastic=np.True_).stochastic  # type: ignore[arg-type]


def test_results_are_mappings_of_names() -> None:
    wrong: Any
    with fastps.Store() as store:
        store.register("w", ONES, SGD)
        receipts, versions = store.push({"w": ONES}), store.versions()
        for wrong in (3, None, b"w", "\ud800", ("w",), 1.5):
            with case(wrong):
                assert wrong not in versions
                assert wrong not in receipts
                assert receipts.get(wrong) is None
                for at in (versions.__getitem__, versions.slices, receipts.__getitem__):
                    with pytest.raises(KeyError):
                        at(wrong)


def test_a_wait_ends_whatever_its_timeout() -> None:
    """NaN seconds are over neither before nor after any time."""
    timeout: Any
    with fastps.Store() as store:
        for timeout in (math.nan, -1.0, "1"):
            with case(timeout), pytest.raises(fastps.ConfigError, match="invalid timeout"):
                store.wait_for("w", timeout=timeout)


def test_an_error_about_a_file_whose_name_is_no_utf8() -> None:
    error = fastps.ConfigError("cannot read \udcff.pt", got="\ud800")
    assert (error.message, error.got) == ("cannot read \\udcff.pt", "\\ud800")
