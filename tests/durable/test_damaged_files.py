"""Damaged files: each reader gives one error with file, tensor, expected and got, and changes nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import nn

import fastps
import fastps.checkpoint
import fastps.torch

RULE = fastps.Adam(lr=0.1)


def entry(first, last, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def file_of(header, values, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(values)


#: Bytes, and what the error says: its tensor, and parts of its text.
DAMAGES = {
    "empty": (b"", None, "0 bytes of something else"),
    "a pickle": (b"\x80\x04K\x01." * 9, None, "expected a safetensors file"),
    "text": (b"these are no tensors, but some text", None, "expected a safetensors file"),
    "absurd length": (file_of({"a": entry(0, 8)}, 8, 1 << 60), None, "expected a safetensors file"),
    "long header": (file_of({"a": entry(0, 8)}, 8, 5000), None, "expected a header of 5000 bytes"),
    "no JSON": (file_of(b"{]", 0), None, "expected a header of names"),
    "no UTF-8": (file_of(b'{"\xff": 1}', 0), None, "expected a header of names"),
    "deep JSON": (file_of(b'{"a":' + b"[" * 100_000, 0), None, "expected a header of names"),
    "a list": (file_of(b"{}", 0).replace(b"{}", b"[]"), None, "expected a safetensors file"),
    "no offsets": (file_of({"a": {"dtype": "F32", "shape": [2]}}, 8), "a", "two offsets"),
    "one offset": (file_of({"a": {**entry(0, 8), "data_offsets": [0]}}, 8), "a", "two offsets"),
    "negative": (file_of({"a": entry(-8, 0)}, 8), "a", "from byte 0, got from byte -8"),
    "enormous": (file_of({"a": entry(0, 1 << 70)}, 8), "a", "expected 8 bytes"),
    "overlap": (file_of({"a": entry(0, 8), "b": entry(4, 12)}, 12), "b", "from byte 8, got from byte 4"),
    "hole": (file_of({"a": entry(0, 8), "b": entry(12, 20)}, 20), "b", "from byte 8, got from byte 12"),
    "truncated": (file_of({"a": entry(0, 8), "b": entry(8, 16)}, 13), "b", "up to byte 16, got 13 bytes"),
    "too long": (file_of({"a": entry(0, 8)}, 11), None, "expected 8 bytes of values, got 11"),
    "shape": (file_of({"a": entry(0, 8, shape=[3])}, 8), "a", r"expected 12 bytes for F32\[3\], got 8"),
    "shape of 2^80": (file_of({"a": entry(0, 8, shape=[1 << 40] * 2)}, 8), "a", "got 8 bytes"),
    "empty of 2^62 rows": (file_of({"a": entry(0, 0, shape=[0, 1 << 62])}, 0), "a", r"got \(0, 46116"),
    "65 dimensions": (file_of({"a": entry(0, 4, shape=[1] * 65)}, 4), "a", "a shape that NumPy takes"),
    "infinite offset": (file_of({"a": entry(0, float("inf"))}, 8), "a", "got OverflowError"),
    "a number of 3,000 digits": (file_of({"a": entry(0, 10**3000)}, 8), "a", "expected 8 bytes"),
    "dtype": (file_of({"a": entry(0, 8, "X9")}, 8), "a", "expected float32, float64 or bfloat16, got X9"),
    "metadata": (file_of({"__metadata__": {"fastps": 7}, "a": entry(0, 8)}, 8), None, "a safetensors file"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_each_damage_is_one_error(store, tmp_path, kind):
    path = tmp_path / "model.safetensors"
    content, tensor, text = DAMAGES[kind]
    path.write_bytes(content)
    model = nn.Linear(2, 1)
    for verify in (True, False):
        for read in (
            lambda: fastps.checkpoint.load(store, path, fastps.SGD(), verify=verify),  # noqa: B023
            lambda: fastps.torch.load(model, path, verify=verify),  # noqa: B023
        ):
            with pytest.raises(fastps.DamagedFileError, match=text) as caught:
                read()
            assert str(path) in str(caught.value)
            assert caught.value.tensor == tensor
            assert caught.value.expected
            assert caught.value.got
    assert store.names() == []


@pytest.fixture
def saved(tmp_path):
    """A file of `fastps.checkpoint.save`."""
    path = tmp_path / "model.safetensors"
    with fastps.Store() as store:
        store.register("w", np.arange(6, dtype=np.float32).reshape(2, 3), optimizer=RULE)
        store.register("s", np.float32(3), optimizer=RULE)
        store.register("none", np.zeros((0, 3), np.float32), optimizer=RULE)
        store.register("d", np.ones(3), optimizer=fastps.SGD(lr=0.5))
        store.push({"w": np.ones((2, 3), np.float32), "s": np.float32(1), "d": np.ones(3)})
        fastps.checkpoint.save(store, path)
    return path


def flip(path, at, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def test_a_flipped_bit_of_values_names_its_tensor(store, saved):
    whole = saved.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    for name in ("w", "s", "d", "w.exp_avg_sq"):
        first, last = header[name]["data_offsets"]
        for at in (first, last - 1):
            saved.write_bytes(whole)
            flip(saved, 8 + length + at)
            with pytest.raises(fastps.DamagedFileError, match=r"SHA-256.*verify=False") as caught:
                fastps.checkpoint.load(store, saved)
            assert caught.value.tensor == name
            assert store.names() == []
    fastps.checkpoint.load(store, saved, verify=False)
    assert store.names() == ["d", "none", "s", "w"]


def test_whichever_bit_flips_nothing_wrong_is_loaded(saved):
    """Also of shapes, names, optimizers and digests; other bits mean nothing."""
    whole = saved.read_bytes()
    rng = random.Random(1)
    with fastps.Store() as right:
        fastps.checkpoint.load(right, saved)
        for at in rng.sample(range(len(whole)), 200):
            saved.write_bytes(whole)
            flip(saved, at, rng.randrange(8))
            with fastps.Store() as store:
                try:
                    fastps.checkpoint.load(store, saved)
                except fastps.DamagedFileError:
                    assert store.names() == []
                else:
                    assert [store.spec(name) for name in right.names()] == [*map(right.spec, right.names())]
                    np.testing.assert_equal(store.pull(store.names()), right.pull(right.names()))
                    np.testing.assert_equal(store.state("w"), right.state("w"))
                saved.write_bytes(whole[:at])
                with fastps.Store() as store, pytest.raises(fastps.DamagedFileError):
                    fastps.checkpoint.load(store, saved)


def test_files_without_digests_load(store, saved):
    with safe_open(saved, "numpy") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, saved, {"fastps": about["fastps"]})
    assert fastps.checkpoint.load(store, saved) == ["d", "none", "s", "w"]


def test_an_export_has_the_digests(store, tmp_path):
    """Written by Rust, verified by Python."""
    data, path = tmp_path / "data", tmp_path / "model.safetensors"
    with fastps.serve(data_dir=data) as server, fastps.connect(server.address_list) as ps:
        ps.register("w", np.ones((2, 150_000), np.float32), optimizer=RULE)
        ps.register("s", np.float32(3), optimizer=RULE)
        ps.register("d", np.ones(3), optimizer=fastps.SGD(lr=0.5))
        ps.push("w", np.ones((2, 150_000), np.float32))
    command = [sys.executable, "-m", "fastps", "checkpoint", "export", str(data), str(path), "--state"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    first, last = json.loads(whole[8 : 8 + length])["w.exp_avg"]["data_offsets"]
    fastps.checkpoint.load(store, path, fastps.SGD())
    with fastps.Store() as other:
        for at in (first, last - 1):
            path.write_bytes(whole)
            flip(path, 8 + length + at, 3)
            with pytest.raises(fastps.DamagedFileError, match=r'"w\.exp_avg"'):
                fastps.checkpoint.load(other, path, fastps.SGD())
        assert other.names() == []


# -- torch ---------------------------------------------------------------------------------------------------


def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 1))


def resumed(path, **options):
    model = build()
    with fastps.Store() as store:
        optimizer = fastps.torch.ParameterServerOptimizer(model.named_parameters(), store, RULE)
        return fastps.torch.resume(model, optimizer, path, **options)


@pytest.fixture
def run(tmp_path):
    """A file of `fastps.torch.save`."""
    path, model = tmp_path / "run.pt", build()
    with fastps.Store() as store:
        optimizer = fastps.torch.ParameterServerOptimizer(model.named_parameters(), store, RULE)
        model(torch.ones(3, 20)).sum().backward()
        optimizer.step()
        fastps.torch.save(model, optimizer, path, epoch=1)
    return path


def test_a_flipped_bit_of_a_run_names_its_tensor(run):
    content = run.read_bytes()
    weight = torch.load(run)["model"]["0.weight"].numpy().tobytes()
    flip(run, content.index(weight) + 17, 2)
    for read in (resumed, lambda path: fastps.torch.load(build(), path)):
        with pytest.raises(fastps.DamagedFileError, match=r"SHA-256.*verify=False") as caught:
            read(run)
        assert str(run) in str(caught.value)
        assert caught.value.tensor == "model.0.weight"
    assert resumed(run, verify=False) == {"epoch": 1}
    fastps.torch.load(build(), run, verify=False)


def test_a_flipped_bit_of_another_file_of_torch_is_found(tmp_path):
    """By the checksums of the archive."""
    path, model = tmp_path / "plain.pt", build()
    torch.save(model.state_dict(), path)
    fastps.torch.load(build(), path)
    flip(path, path.read_bytes().index(model[0].weight.detach().numpy().tobytes()))
    with pytest.raises(fastps.DamagedFileError, match=r"checksum of .*/data/"):
        fastps.torch.load(build(), path)


def test_whatever_happens_to_a_run_is_found(run):
    """Any bit flips, or the file ends anywhere; bits between the archive's members mean nothing."""
    whole = run.read_bytes()
    expected = {key: value.clone() for key, value in torch.load(run)["model"].items()}
    rng = random.Random(1)
    for at in rng.sample(range(len(whole)), 60):
        run.write_bytes(whole)
        flip(run, at, rng.randrange(8))
        model = build()
        try:
            fastps.torch.load(model, run)
            assert resumed(run) == {"epoch": 1}
        except fastps.DamagedFileError as error:
            assert str(run) in str(error)  # noqa: PT017
        else:
            assert all(torch.equal(value, expected[key]) for key, value in model.named_parameters())
        run.write_bytes(whole[:at])
        for read in (resumed, lambda path: fastps.torch.load(build(), path)):
            with pytest.raises(fastps.DamagedFileError):
                read(run)


@pytest.mark.parametrize(
    "content", [1, [1], {}, {"model": 1, "optimizer": 2}, {"model": {}, "optimizer": {}}]
)
def test_another_file_of_torch_is_no_checkpoint(tmp_path, content):
    path = tmp_path / "other.pt"
    torch.save(content, path)
    with pytest.raises(fastps.DamagedFileError, match=r"expected state dicts.*fastps\.torch\.save"):
        resumed(path)


def test_damaged_checkpoints_of_torch_distributed(store, tmp_path):
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    fastps.torch.to_store(store, model, optimizer)
    fastps.torch.save_distributed(store, model, optimizer, tmp_path)
    before = store.versions()
    for file in tmp_path.iterdir():
        whole = file.read_bytes()
        for content in (b"", whole[: len(whole) // 2], b"no tensors" * 5):
            file.write_bytes(content)
            with pytest.raises(fastps.DamagedFileError, match=str(tmp_path)):
                fastps.torch.load_distributed(store, model, optimizer, tmp_path)
        file.write_bytes(whole)
    assert store.versions() == before
    fastps.torch.load_distributed(store, model, optimizer, tmp_path)
