"""The encoders alone, where a gradient lies: bytes read and written, as a share of what a copy reaches there.

The share says whether plain operations of torch are fast enough, or one kernel for each codec would pay.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from device.row import Figures, Row, Setting
from harness import readable, table

import fastps
from fastps.torch import encode

CODECS = {"BFloat16": fastps.BFloat16(), "Int8": fastps.Int8(), "OneBit": fastps.OneBit()}
DTYPES = (torch.float32, torch.bfloat16)
ELEMENTS, SMALL = 100_000_000, 260_000
#: Calls before those that are timed, which are so many.
WARM, TIMED = 2, 5


def measure(setting: Setting) -> Figures:
    """Seconds for each codec, dtype of a gradient and residual."""
    device, n = ("cpu", SMALL) if setting.small else ("cuda", ELEMENTS)
    grad = torch.randn(n, device=device)
    speed = 2 * grad.nbytes / best(functools.partial(torch.empty_like(grad).copy_, grad), setting.small)
    found = {}
    for dtype in DTYPES:
        given = {"w": grad.to(dtype)}
        for name, codec in CODECS.items():
            out = {"w": torch.empty(encode.body_len(codec, n), dtype=torch.uint8, device=device)}
            for residual in (None, {"w": torch.zeros(n, device=device)}):
                run = functools.partial(encode.encode, codec, given, residual, out=out)
                moved = given["w"].nbytes + out["w"].nbytes + (0 if residual is None else 8 * n)
                way = f"{name} of {str(dtype).removeprefix('torch.')}"
                way += "" if residual is None else ", with a residual"
                found[way] = {"seconds": best(run, setting.small), "bytes": moved}
    return {"elements": n, "copy": speed, "ways": found}


def best(run: Callable[[], object], small: bool) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(WARM + TIMED):
        begun = time.perf_counter()
        run()
        if not small:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times[WARM:])


def show(figures: Figures) -> list[str]:
    """One line for each way."""
    rows = []
    for way, found in figures["ways"].items():
        speed = found["bytes"] / found["seconds"]
        share = f"{speed / figures['copy']:.2f}"
        rows.append([way, readable(1e9 * found["seconds"]), f"{speed / 1e9:.0f} GB/s", share])
    about = f"{figures['elements'] / 1e6:.1f} M elements; a copy there: {figures['copy'] / 1e9:.0f} GB/s."
    return [about, "", *table(["", "time", "read and written", "to a copy"], rows)]


ROWS = [Row("the encoders alone", measure, show, 90.0)]
