"""The byte contract from Python: golden digests and vectors on every instruction set, and refused input.

`python tests/store/test_codecs.py` prints digests and vectors, on the instruction set in `FASTPS_ISA`.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import fastps
from instruction_sets import ISAS, printed_on

VECTORS = json.loads((Path(__file__).resolve().parents[1] / "vectors/codecs.json").read_text())
CODECS = [
    fastps.Float32(),
    fastps.BFloat16(),
    fastps.Int8(),
    fastps.Int8(stochastic=True, seed=3),
    fastps.OneBit(),
]


def golden_input(n=5000):
    """The input of "golden" in tests/vectors/codecs.json: exact in every language."""
    i = np.arange(n, dtype=np.uint64)
    u = ((2654435761 * i + 12345) % 2**32).astype(np.uint32).view(np.int32)
    x = u.astype(np.float32) * np.float32(2.0**-31)
    return x * np.exp2(((i // 64) % 7).astype(np.float32) - 3).astype(np.float32)


def digest(data):
    return hashlib.sha256(data).hexdigest()[:32]


def test_golden_digests():
    x = golden_input()
    assert digest(x.tobytes()) == "63e0afea80970880b9e253abf4fa9964"
    body = fastps.Int8().encode(x)
    assert (len(body), digest(body)) == (5079, "7575b6f2b8df2440eb672e754af62fba")
    assert digest(fastps.Int8().decode(body, 5000).tobytes()) == "54bf2fcb21cce4d0354d6789d00f8466"
    body = fastps.OneBit().encode(x)
    assert (len(body), digest(body)) == (665, "2123c88f841979d5413d7841b9ecdbda")
    assert fastps.Float32().encode(x) == x.tobytes()


def made(name, case):
    """The codec of a golden body or a vector, and what its push is numbered by."""
    where = {key: int(case[key], 16) for key in ("first_element", "sequence") if key in case}
    if "seed" in case:
        return fastps.Int8(stochastic=True, seed=int(case["seed"], 16)), where
    plain = {"float32": fastps.Float32, "bfloat16": fastps.BFloat16, "int8": fastps.Int8}
    return (plain | {"onebit": fastps.OneBit, "fourbit": fastps.FourBit})[name](), where


def golden_bodies():
    """The content of `VECTORS` under "golden", "bodies", as this build makes it."""
    x = golden_input()
    bodies = {}
    for name, case in VECTORS["golden"]["bodies"].items():
        codec, where = made(name, case)
        body = codec.encode(x, **where)
        decoded = digest(codec.decode(body, x.size).tobytes())
        bodies[name] = case | {"bytes": len(body), "sha256": digest(body), "decoded_sha256": decoded}
    return bodies


def vectors():
    """The content of `VECTORS` under "cases", as this build makes it."""
    cases = []
    for case in VECTORS["cases"]:
        codec, where = made(case["codec"], case)
        x = np.frombuffer(bytes.fromhex(case["input"]), "<f4")
        got = dict(case)
        if "residual" in case:
            residual = np.frombuffer(bytearray.fromhex(case["residual"]), "<f4")
            body = codec.encode(x, residual, **where)
            if "residual_after" in case:
                got["residual_after"] = residual.tobytes().hex()
        else:
            body = codec.encode(x, **where)
        decoded = codec.decode(body, case["n"])
        cases.append(got | {"body": body.hex(), "decoded": decoded.tobytes().hex()})
    return cases


def test_golden_bodies_and_vectors():
    assert golden_bodies() == VECTORS["golden"]["bodies"]
    assert vectors() == VECTORS["cases"]


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_gives_the_golden_bodies_and_vectors(isa):
    made_there = printed_on(isa, __file__)
    assert made_there["bodies"] == VECTORS["golden"]["bodies"]
    assert made_there["cases"] == VECTORS["cases"]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 63, 64, 65, 1023, 1024, 1025, 5000])
def test_residual_is_what_the_body_does_not_say(codec, n, rng):
    x = rng.standard_normal(n, dtype=np.float32)
    residual = rng.standard_normal(n, dtype=np.float32)
    v = x + residual
    body = codec.encode(x, residual, first_element=8, sequence=5)
    decoded = codec.decode(body, n)
    assert decoded.shape == (n,)
    np.testing.assert_array_equal(residual, v - decoded)
    assert codec.encode(v, first_element=8, sequence=5) == body


def test_stochastic_rounding_depends_on_seed_element_and_push():
    x = golden_input()
    codec = fastps.Int8(stochastic=True, seed=1)
    first = codec.encode(x)
    assert codec.encode(x) == first
    assert codec.encode(x, sequence=1) != first
    assert codec.encode(x, first_element=8) != first
    assert fastps.Int8(stochastic=True, seed=2).encode(x) != first
    with pytest.raises(fastps.ConfigError, match="multiple of 8"):
        codec.encode(x, first_element=7)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_non_finite_leaves_the_residual(codec):
    residual = np.ones(3, np.float32)
    for bad in (np.nan, np.inf):
        with pytest.raises(fastps.NonFiniteError, match="index 1"):
            codec.encode(np.array([0, bad, 0], np.float32), residual)
    huge = np.full(3, np.finfo(np.float32).max)
    with pytest.raises(fastps.NonFiniteError):
        codec.encode(huge, huge.copy())
    np.testing.assert_array_equal(residual, np.ones(3, np.float32))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_decode_refuses_other_lengths(codec):
    body = codec.encode(golden_input(100))
    assert len(codec.decode(bytearray(body), 100)) == 100
    for wrong, n in ((body[:-1], 100), (body + b"\0", 100), (body, 110), (body, 90), (b"", 1), (body, 2**60)):
        with pytest.raises(fastps.FrameError):
            codec.decode(wrong, n)
    for n in (-1, 1.5, 2**64):
        with pytest.raises(fastps.ConfigError, match="invalid n"):
            codec.decode(body, n)


@pytest.mark.parametrize("name", ["first_element", "sequence"])
def test_encode_refuses_negative_numbers(name):
    with pytest.raises(fastps.ConfigError, match=name):
        fastps.Int8(stochastic=True).encode(golden_input(64), **{name: -8})


def test_decode_refuses_what_no_encoder_writes():
    with pytest.raises(fastps.FastpsError):
        fastps.Float32().decode(np.array([np.nan], np.float32).tobytes(), 1)
    body = bytearray(fastps.Int8().encode(golden_input(64)))
    body[1] = 0x80  # -128
    with pytest.raises(fastps.FastpsError):
        fastps.Int8().decode(bytes(body), 64)


def test_settings():
    for make in (
        lambda: fastps.Int8(block=32),
        lambda: fastps.Int8(block="64"),
        lambda: fastps.OneBit(block=64),
        lambda: fastps.Int8(seed=-1),
        lambda: fastps.Int8(stochastic="yes"),
    ):
        with pytest.raises(fastps.ConfigError) as caught:
            make()
        assert caught.value.expected
    assert fastps.Int8() == fastps.Int8(block=64, stochastic=False, seed=0)
    with pytest.raises(AttributeError):
        fastps.Int8().seed = 3


def test_residual_must_be_writable_memory_of_its_own():
    x = np.ones(4, np.float32)
    with pytest.raises(fastps.ConfigError, match="overlap"):
        fastps.OneBit().encode(x, x)
    with pytest.raises(fastps.ShapeError):
        fastps.OneBit().encode(x, np.zeros(3, np.float32))
    read_only = np.zeros(4, np.float32)
    read_only.flags.writeable = False
    with pytest.raises(fastps.ConfigError, match="read-only"):
        fastps.OneBit().encode(x, read_only)


if __name__ == "__main__":
    json.dump({"bodies": golden_bodies(), "cases": vectors()}, sys.stdout)
