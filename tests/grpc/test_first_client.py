"""The script at the beginning of `protos/README.md` does what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from programs import ROOT, grpcurl

import fastps


@pytest.mark.timeout(600)  # grpcurl may have to be built
def test_the_first_client_of_the_readme() -> None:
    folder = Path(grpcurl()).parent
    if shutil.which("jq") is None:
        pytest.skip("the script needs jq, which was not found")
    section = (
        (ROOT / "protos/README.md").read_text().partition("## Your first client\n")[2].partition("\n## ")[0]
    )
    script = "".join(re.findall(r"```bash\n(.*?)```", section, re.DOTALL))
    with fastps.serve() as server:
        environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SERVER": server.addresses}
        done = subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert '["KIND_RECEIPT","2"]' in done.stdout, done.stdout
        assert done.stdout.split()[-3:] == ["0.5", "1.5", "2.5"]
        with fastps.connect(server.addresses) as ps:
            assert ps.pull("first").tolist() == [0.5, 1.5, 2.5]
