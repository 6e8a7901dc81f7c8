"""The short form of `make soak`: some seconds of random steps over every transport."""

import sys

import pytest

from soak import Setting, run, transports


@pytest.mark.skipif(sys.platform != "linux", reason="pins processes to cores")
def test_nothing_stalls_and_each_step_is_applied_once():
    chosen = [
        Setting(way, pinned=pinned, spinning=spinning, loaded=pinned)
        for way in transports()
        for pinned, spinning in [(False, True), (True, False)]
    ]
    said: list[str] = []
    assert run(chosen, steps=10**9, seconds=6.0, seed=7, say=said.append) > 100 * len(chosen), said
