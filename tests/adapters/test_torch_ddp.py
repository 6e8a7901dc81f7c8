"""A model in `DistributedDataParallel`: the optimizer says that each rank pushes the ranks' average."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fastps

SCRIPT = """
import datetime, sys, warnings
import torch
import torch.distributed as dist
import fastps, fastps.torch

address, rank, file, wraps = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
late = datetime.timedelta(seconds=120)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=late)
torch.manual_seed(1)
plain = torch.nn.Linear(3, 1)
model = torch.nn.parallel.DistributedDataParallel(plain) if wraps else plain
with fastps.connect(address, timeout=120.0) as ps, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    named = model.named_parameters()
    with fastps.torch.ParameterServerOptimizer(named, ps, fastps.SGD(lr=0.01)) as optimizer:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    dist.barrier()
    for one in caught:
        if "Data" in str(one.message):
            print(one.category.__name__, one.filename, one.message)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wraps", [True, False])
def test_a_model_in_ddp_gives_one_warning_per_rank(tmp_path: Path, wraps: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with fastps.serve() as server:
        command = [sys.executable, str(script), server.addresses]
        pipe = subprocess.PIPE
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(tmp_path / "store"), str(wraps)],
                stdout=pipe,
                stderr=pipe,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            for rank in ranks:
                printed, errors = rank.communicate(timeout=240)
                assert rank.returncode == 0, errors
                warning_lines = [line for line in printed.splitlines() if "Warning" in line]
                assert len(warning_lines) == wraps, printed
                if wraps:
                    assert warning_lines[0].startswith(f"RuntimeWarning {script} the model is in Distributed")
                    assert "2 ranks" in warning_lines[0]
                    assert "2 steps for each batch" in warning_lines[0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
