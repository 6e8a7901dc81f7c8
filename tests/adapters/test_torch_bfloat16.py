"""Models of torch whose parameters the servers keep in bfloat16."""

from __future__ import annotations

import pytest

import fastps

torch = pytest.importorskip("torch")
import fastps.torch  # noqa: E402


def test_parameters_are_kept_in_bfloat16_if_asked_for(ps: fastps.ParameterServer) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    for kind in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(8, 1).to(kind)
        prefix = f"{kind}/"
        with fastps.torch.ParameterServerOptimizer(
            model.named_parameters(), ps, fastps.AdamW(lr=0.05), dtype="bfloat16", prefix=prefix
        ) as optimizer:
            losses = []
            for _ in range(80):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x.to(kind)).float(), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        assert losses[-1] < 0.95 * losses[0]
        assert ps.spec(f"{prefix}weight").dtype == "bfloat16"
        shown = model.weight.detach().float().numpy()
        assert (shown == ps.pull(f"{prefix}weight")).all()
    # Without dtype=, those of bfloat16 are float32 on the servers, as before.
    model = torch.nn.Linear(8, 1).bfloat16()
    fastps.torch.ParameterServerOptimizer(model.named_parameters(), ps, fastps.SGD(lr=0.1)).close()
    assert ps.spec("weight").dtype == "float32"
    for dtype, text in (("bfloat16", "another dtype"), ("float16", "no parameters of this dtype")):
        with pytest.raises(fastps.DTypeError, match=text):
            fastps.torch.ParameterServerOptimizer(
                model.named_parameters(), ps, fastps.SGD(lr=0.1), dtype=dtype
            )
