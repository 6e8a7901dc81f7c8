"""What becomes of a gradient that a GPU, which is pretended, has encoded, if its push is refused or lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from between import between
from foreign_client import Stubs

import fastps
from fastps.torch import ParameterServerOptimizer
from pretended_gpu import pretended

#: Seconds for a call. An answer that is lost comes later.
TIMEOUT = 3.0
FAILURES = (fastps.PartialPush, fastps.DeadlineError, fastps.ConfigError)
#: A power of two: its products are exact.
RATE = 0.125
#: What happens to some of the pushes, by their number; the others pass.
FATES = {
    False: {1: "refused", 3: "lost"},
    True: {1: "refused", 3: "applied, answer lost", 5: "refused"},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overlap", FATES)
def test_nothing_of_a_gradient_is_lost_or_doubled(stubs: Stubs, overlap: bool) -> None:
    """Values and residuals are what all gradients sum up to."""
    pb, seen, met = stubs.pb, set[int](), list[str]()

    def answer(frame: bytes, passed_on: Callable[[bytes], bytes]) -> bytes | None:
        header = pb.Frame.FromString(frame).header
        if header.kind != pb.KIND_GRADIENT or header.sequence in seen:
            return passed_on(frame)
        seen.add(header.sequence)
        fate = FATES[overlap].get(len(seen) - 1, "passes")
        met.append(fate)
        if fate == "refused":
            reason = pb.Refusal(kind="precondition", message="not now", shard=0)
            refused = pb.Header(kind=pb.KIND_REFUSED, tag=header.tag, refusal=reason)
            return bytes(pb.Frame(header=refused).SerializeToString())
        if fate == "passes":
            return passed_on(frame)
        if fate != "lost":
            passed_on(frame)
        time.sleep(TIMEOUT + 0.5)
        return None

    weight = torch.nn.Parameter(torch.zeros(40, 3))
    rng, total = np.random.default_rng(3), torch.zeros(40, 3)
    with (
        pretended(),
        fastps.serve() as server,
        between(server.addresses, answer=answer) as address,
        fastps.connect(address, timeout=TIMEOUT) as ps,
    ):
        rule, mode = fastps.SGD(lr=RATE), fastps.Async(overlap=overlap)
        with ParameterServerOptimizer([("w", weight)], ps, rule, mode, fastps.OneBit()) as optimizer:
            for _ in range(8):
                weight.grad = torch.from_numpy(rng.standard_normal((40, 3), dtype=np.float32))
                total += weight.grad
                with contextlib.suppress(*FAILURES):
                    optimizer.step()
            for _ in range(2):  # the first one may meet a refusal, too
                with contextlib.suppress(*FAILURES):
                    optimizer.flush()
            owed = optimizer.state_dict()["fastps"]["residuals"]["w"].view(40, 3)
            with fastps.connect(server.addresses) as direct:
                changed = -torch.from_numpy(direct.pull("w")) / RATE
    assert {*FATES[overlap].values()} < {*met}
    torch.testing.assert_close(changed + owed, total, rtol=1e-4, atol=1e-5)
