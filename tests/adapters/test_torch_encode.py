"""Encoders of plain torch operations: the bytes of the contract, whatever a gradient's dtype."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fastps
from fastps.torch import encode

VECTORS = json.loads((Path(__file__).resolve().parents[1] / "vectors" / "codecs.json").read_text())
CODECS = [fastps.BFloat16(), fastps.Int8(), fastps.Int8(stochastic=True, seed=2**63 + 5), fastps.OneBit()]
LENGTHS = [0, 1, *range(63, 66), *range(1023, 1026), *range(encode.SLICE - 1, encode.SLICE + 2)]
LARGEST = np.finfo(np.float32).max


def made(name, case):
    """The codec of a golden body or a vector, and what its push is numbered by."""
    where = {key: int(case[key], 16) for key in ("first_element", "sequence") if key in case}
    if "seed" in case:
        return fastps.Int8(stochastic=True, seed=int(case["seed"], 16)), where
    return fastps.codecs.Codec.named(name), where


def body_of(codec, values, residual=None, **where):
    residuals = None if residual is None else {"w": residual}
    return encode.encode(codec, {"w": values}, residuals, **where)["w"]


def of_library(codec, values, residual, sequence):
    """The bodies of the slices as the library makes them; the residual becomes the rounding error."""
    parts = [slice(at, at + encode.SLICE) for at in range(0, values.size, encode.SLICE)]
    where = [{"first_element": part.start, "sequence": sequence} for part in parts]
    return b"".join(
        codec.encode(values[part], residual[part], **how) for part, how in zip(parts, where, strict=True)
    )


def text(tensor):
    return tensor.numpy().tobytes().hex()


def test_vectors_and_golden_bodies():
    for case in VECTORS["cases"]:
        if case["codec"] == "float32":
            continue
        codec, where = made(case["codec"], case)
        values = torch.tensor(np.frombuffer(bytes.fromhex(case["input"]), "<f4"))
        residual = torch.tensor(
            np.frombuffer(bytes.fromhex(case.get("residual", "00" * values.nbytes)), "<f4")
        )
        body = body_of(codec, values, residual if "residual" in case else None, **where)
        assert (text(body), text(encode.decode(codec, body, case["n"]))) == (case["body"], case["decoded"])
        assert text(residual) == case.get("residual_after", text(residual))

    i = np.arange(VECTORS["golden"]["n"], dtype=np.uint64)
    u = ((2654435761 * i + 12345) % 2**32).astype(np.uint32).view(np.int32).astype(np.float32)
    values = torch.from_numpy(np.ldexp(u, -31 + ((i // 64) % 7).astype(int) - 3).astype(np.float32))
    for name, case in VECTORS["golden"]["bodies"].items():
        if name != "float32":
            codec, where = made(name, case)
            body = body_of(codec, values, **where)
            for data, key in ((body, "sha256"), (encode.decode(codec, body, len(i)), "decoded_sha256")):
                assert hashlib.sha256(data.numpy()).hexdigest()[:32] == case[key], name


def random_case(rng, n):
    """Values of all magnitudes, and some that are hard to round."""
    values = rng.standard_normal(n, dtype=np.float32) * np.exp2(
        rng.integers(-149, 127, -(-n // 64)).repeat(64)[:n]
    )
    odd = np.array([0.0, -0.0, 1e-45, -1e-40, 2.0**-95, -(2.0**-95), 2.0**-96, LARGEST, -LARGEST, 0.5, 1.5])
    at = rng.integers(0, n, n // 8)
    values[at] = rng.choice(odd, at.size)
    if rng.random() < 0.3:
        values *= 2.0**-100  # blocks that are zero
    return np.clip(values, -LARGEST, LARGEST).astype(np.float32)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_random_cases_are_encoded_as_by_the_library(codec, rng):
    for case in range(250):
        n, dtype = int(rng.integers(1, 3000)), (torch.float32, torch.float16, torch.bfloat16)[case % 3]
        values = torch.from_numpy(random_case(rng, n)).to(dtype).nan_to_num()
        wide = values.to(torch.float32).numpy()
        rest = random_case(rng, n) / 2 * (np.abs(wide) < LARGEST / 2) * (case % 4 > 0)
        residual, expected = torch.tensor(rest), rest.copy()
        body = body_of(codec, values, residual, sequence=case)
        assert text(body) == of_library(codec, wide, expected, case).hex()
        assert text(residual) == expected.tobytes().hex()
        assert text(encode.decode(codec, body, n)) == codec.decode(body.numpy(), n).tobytes().hex()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_bodies_begin_at_slices(codec, rng):
    lengths = [*LENGTHS, 17 * encode.SLICE + 9]  # more slices than are encoded together
    for n in lengths:
        values = torch.from_numpy(rng.standard_normal(n, dtype=np.float32))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)[: 1 if n == lengths[-1] else 3]:
            given = values.to(dtype)
            residual, expected = torch.zeros(n), np.zeros(n, np.float32)
            body = body_of(codec, given, residual, sequence=n)
            assert text(body) == of_library(codec, given.float().numpy(), expected, n).hex()
            assert len(body) == encode.body_len(codec, n)
            assert torch.equal(given.float() - encode.decode(codec, body, n), residual)


def test_a_list_is_encoded_in_one_call_and_in_place():
    grads = {"a": torch.ones(3, 5).T, "b": torch.tensor(-2.0), "c": torch.zeros(0)}
    negated = torch.ones(2, dtype=torch.complex64).conj().imag
    out = encode.encode(fastps.Int8(), {**grads, "d": negated})
    again = encode.encode(
        fastps.Int8(), {**grads, "d": negated}, out={n: torch.full_like(b, 9) for n, b in out.items()}
    )
    assert {n: b.tolist() for n, b in again.items()} == {n: b.tolist() for n, b in out.items()}
    assert [b.numel() for b in out.values()] == [16, 2, 0, 3]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_no_body_of_a_value_that_is_not_finite_is_accepted(codec):
    for bad in (torch.nan, torch.inf, -torch.inf):
        values, residual = torch.ones(2000), torch.full((2000,), 0.25)
        values[1500] = bad
        body = body_of(codec, values, residual)
        with pytest.raises((fastps.FrameError, fastps.NonFiniteError)):
            codec.decode(body.numpy(), 2000)
        assert residual.isfinite().all()
        assert residual[1500] == 0.25


def test_what_cannot_be_encoded_is_refused():
    grad = torch.ones(4)
    for wrong in (grad.to(torch.int32), grad.to(torch.complex64), grad.double(), grad.to_sparse()):
        with pytest.raises(fastps.DTypeError, match=r"b.*float32, float16 or bfloat16"):
            encode.encode(fastps.Int8(), {"a": grad, "b": wrong})
    for how in (
        {"residuals": {"a": grad.double()}},
        {"residuals": {"a": torch.ones(2, 2)}},
        {"out": {"a": grad}},
    ):
        with pytest.raises(fastps.ConfigError, match="does not fit"):
            encode.encode(fastps.Int8(), {"a": grad}, **how)
    with pytest.raises(fastps.ConfigError, match="invalid codec"):
        encode.encode(fastps.Float32(), {"a": grad})
