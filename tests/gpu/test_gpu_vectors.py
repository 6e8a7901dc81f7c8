"""A GPU encodes gradients into the bytes that a CPU makes, on any stream."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from pretended_gpu import REHEARSAL
from torch_bodies import CODECS, body_of, check_random_cases, check_vectors, text


def test_vectors_and_golden_bodies(device):
    check_vectors(device)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_random_cases(device, codec):
    check_random_cases(codec, np.random.default_rng(5), device, 25 if REHEARSAL else 250)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_two_streams_that_race(device, codec):
    """Each encodes what it has just computed, of which the other one may reuse no memory."""
    n = 3_000 if REHEARSAL else 3_000_000
    start = [torch.randn(n, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    expected = [[text(body_of(codec, values * 2.0**k)) for k in range(5)] for values in start]
    values, found = [one.to(device) for one in start], [[], []]
    streams = [contextlib.nullcontext() if REHEARSAL else torch.cuda.Stream() for _ in values]
    if not REHEARSAL:
        torch.cuda.synchronize()
    for k in range(5):
        for which, stream in enumerate(streams):
            with stream if REHEARSAL else torch.cuda.stream(stream):
                found[which].append(body_of(codec, values[which] * 2.0**k))
    if not REHEARSAL:
        torch.cuda.synchronize()
    assert [[text(body) for body in bodies] for bodies in found] == expected
