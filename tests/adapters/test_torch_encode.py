"""Encoders of plain torch operations: the bytes of the contract, whatever a gradient's dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastps
from fastps.torch import encode
from torch_bodies import CODECS, body_of, check_random_cases, check_vectors, of_library, text

LENGTHS = [0, 1, *range(63, 66), *range(1023, 1026), *range(encode.SLICE - 1, encode.SLICE + 2)]


def test_vectors_and_golden_bodies():
    check_vectors("cpu")


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_random_cases_are_encoded_as_by_the_library(codec, rng):
    check_random_cases(codec, rng, "cpu")


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
        {"residuals": {"a": grad.to("meta")}},
        {"out": {"a": grad}},
    ):
        with pytest.raises(fastps.ConfigError, match="does not fit"):
            encode.encode(fastps.Int8(), {"a": grad}, **how)
    with pytest.raises(fastps.ConfigError, match="invalid codec"):
        encode.encode(fastps.Float32(), {"a": grad})
