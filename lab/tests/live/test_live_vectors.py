"""The WebAssembly of the live page is fresh: it gives the same bits as the native build."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest

pytest.importorskip("wasmtime", reason="wasmtime is not installed")

from module import Module

VECTORS = Path(__file__).resolve().parents[3] / "tests/vectors/live.json"
#: As in `rust/live/src/vectors.rs`, whose test compares the native build with the same file.
UPDATES, EVENTS = 40, 200


def test_runs_have_the_bits_of_the_native_build():
    runs = json.loads(VECTORS.read_text())
    assert len(runs) >= 200
    module = Module()
    for k, one in enumerate(runs):
        module.give([math.nan if number is None else number for number in one["settings"]])
        run = module.make()
        digest = hashlib.sha256()
        for updates in range(1, UPDATES + 1):
            module.advance(run, math.inf, float(updates), EVENTS)
            module.values(run)
            digest.update(module.output_bytes())
            module.read(run)
            digest.update(module.output_bytes()[:8])
        assert digest.hexdigest() == one["digest"], f"run {k} differs: run `make live`"
        module.destroy(run)


def test_the_module_imports_nothing_and_is_small():
    module = Module()
    assert module.imports == []
    assert module.abi() == 1
