"""Checks of the encoders of plain torch operations, on whatever device: their bytes are the contract's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

import fastps
from fastps.torch import encode

VECTORS = json.loads((Path(__file__).resolve().parent / "vectors" / "codecs.json").read_text())
CODECS = [
    fastps.BFloat16(),
    fastps.Int8(),
    fastps.Int8(stochastic=True, seed=2**63 + 5),
    fastps.FourBit(),
    fastps.OneBit(),
]
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
    return tensor.cpu().numpy().tobytes().hex()


def check_vectors(device):
    """All vectors of the codecs and the golden bodies."""
    for case in VECTORS["cases"]:
        if case["codec"] == "float32":
            continue
        codec, where = made(case["codec"], case)
        values = torch.tensor(np.frombuffer(bytes.fromhex(case["input"]), "<f4"), device=device)
        residual = torch.tensor(
            np.frombuffer(bytes.fromhex(case.get("residual", "00" * values.nbytes)), "<f4"), device=device
        )
        body = body_of(codec, values, residual if "residual" in case else None, **where)
        assert (text(body), text(encode.decode(codec, body, case["n"]))) == (case["body"], case["decoded"])
        assert text(residual) == case.get("residual_after", text(residual))

    i = np.arange(VECTORS["golden"]["n"], dtype=np.uint64)
    u = ((2654435761 * i + 12345) % 2**32).astype(np.uint32).view(np.int32).astype(np.float32)
    values = np.ldexp(u, -31 + ((i // 64) % 7).astype(int) - 3).astype(np.float32)
    values = torch.from_numpy(values).to(device)
    for name, case in VECTORS["golden"]["bodies"].items():
        if name != "float32":
            codec, where = made(name, case)
            body = body_of(codec, values, **where)
            for data, key in ((body, "sha256"), (encode.decode(codec, body, len(i)), "decoded_sha256")):
                assert hashlib.sha256(data.cpu().numpy()).hexdigest()[:32] == case[key], name


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


def check_random_cases(codec, rng, device, cases=250):
    """Cases of all magnitudes and dtypes, as the library encodes them."""
    for case in range(cases):
        n, dtype = int(rng.integers(1, 3000)), (torch.float32, torch.float16, torch.bfloat16)[case % 3]
        values = torch.from_numpy(random_case(rng, n)).to(dtype).nan_to_num().to(device)
        wide = values.to("cpu", torch.float32).numpy()
        rest = random_case(rng, n) / 2 * (np.abs(wide) < LARGEST / 2) * (case % 4 > 0)
        residual, expected = torch.tensor(rest, device=device), rest.copy()
        body = body_of(codec, values, residual, sequence=case)
        assert text(body) == of_library(codec, wide, expected, case).hex()
        assert text(residual) == expected.tobytes().hex()
        assert text(encode.decode(codec, body, n)) == codec.decode(body.cpu().numpy(), n).tobytes().hex()
