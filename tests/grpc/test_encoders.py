"""The encoders that other tests rely on: golden digests, vectors, and the library's own bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import pytest
from encoders import FOURBIT, INT8, ONEBIT
from samples import PLAIN, Float32, normal

import fastps

VECTORS = json.loads((Path(__file__).resolve().parents[1] / "vectors" / "codecs.json").read_text())


def number(case: dict[str, Any], key: str) -> int | None:
    return int(case[key], 16) if key in case else None


def encoded(name: str, case: dict[str, Any], values: Float32) -> bytes:
    first, sequence = number(case, "first_element") or 0, number(case, "sequence") or 0
    codec = VECTORS["codecs"][name.removesuffix("_stochastic")]
    return encoders.encode(codec, values, seed=number(case, "seed"), first=first, sequence=sequence)


@pytest.mark.parametrize("name", VECTORS["golden"]["bodies"])
def test_encoders_give_the_golden_digests(name: str) -> None:
    case = VECTORS["golden"]["bodies"][name]
    values = encoders.golden_input()

    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()[:32]

    assert digest(values.tobytes()) == VECTORS["golden"]["input_sha256"] == "63e0afea80970880b9e253abf4fa9964"
    body = encoded(name, case, values)
    codec = VECTORS["codecs"][name.removesuffix("_stochastic")]
    decoded = encoders.decode(codec, body, values.size)
    assert (len(body), digest(body)) == (case["bytes"], case["sha256"])
    assert digest(decoded.tobytes()) == case["decoded_sha256"]
    published = {
        "int8": "7575b6f2b8df2440eb672e754af62fba",
        "onebit": "2123c88f841979d5413d7841b9ecdbda",
        "fourbit": "ff608333824787ef77aea0d794d909d2",
    }
    assert published.get(name, case["sha256"]) == case["sha256"]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: f"{case['codec']}, {case['name']}")
def test_encoders_give_the_vectors(case: dict[str, Any]) -> None:
    values = np.frombuffer(bytes.fromhex(case["input"]), "<f4")
    if "residual" in case:
        values = values + np.frombuffer(bytes.fromhex(case["residual"]), "<f4")
    body = encoded(case["codec"], case, values)
    decoded = encoders.decode(VECTORS["codecs"][case["codec"]], body, case["n"])
    assert body.hex() == case["body"]
    assert decoded.tobytes().hex() == case["decoded"]


def test_philox_gives_the_known_answers() -> None:
    def words(key: int, counter: int, high: int) -> str:
        return " ".join(f"{w:08x}" for w in encoders.philox(key, np.array([counter], np.uint64), high)[0])

    ones = 2**64 - 1
    assert words(0, 0, 0) == "6627e8d5 e169c58d bc57ac4c 9b00dbd8"
    assert words(ones, ones, ones) == "408f276d 41c83b0e a20bc7c6 6d5451fd"
    pi = words(0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E)
    assert pi == "d16cfe09 94fdcceb 5001e420 24126ea1"


def test_crc32c_gives_the_known_answer() -> None:
    assert encoders.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1023, 1025, 4097, 70_001])
def test_encoders_give_what_the_library_gives(n: int) -> None:
    seed, first, sequence = 0xFEDC_BA98_7654_3210, encoders.SLICE_LEN, (1 << 33) + 5
    values = normal((n,), n) * np.float32(2.0) ** np.random.default_rng(n).integers(-120, 100, n)
    values = values.astype(np.float32)
    for codec, ours in [*PLAIN, (ONEBIT, fastps.OneBit()), (FOURBIT, fastps.FourBit())]:
        assert ours.encode(values) == encoders.encode(codec, values)
    drawn = fastps.Int8(stochastic=True, seed=seed).encode(values, first_element=first, sequence=sequence)
    assert drawn == encoders.encode(INT8, values, seed=seed, first=first, sequence=sequence)
