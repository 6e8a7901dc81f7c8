"""The short form of `make soak`: some hundred random steps over every transport."""

import sys

import pytest

from long.soak import Setting, run, transports


@pytest.mark.timeout(600)  # a step without progress ends it after a minute
@pytest.mark.skipif(sys.platform != "linux", reason="pins processes to cores")
def test_nothing_stalls_and_each_step_is_applied_once():
    chosen = [
        Setting(way, pinned=pinned, spinning=spinning, loaded=pinned)
        for way in transports()
        for pinned, spinning in [(False, True), (True, False)]
    ]
    said: list[str] = []
    steps = 300 * len(chosen)
    assert run(chosen, steps, seconds=600.0, seed=7, say=said.append) == steps, said
