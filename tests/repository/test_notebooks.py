"""The notebooks run from top to bottom, and show what their text says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_why_stale_gradients(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    import nbformat

    notebook = nbformat.read(ROOT / "examples/notebooks/why_stale_gradients.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in cells] == [[]] * len(cells), "it is stored without outputs"

    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 4
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    means = {int(n): float(mean) for n, mean in re.findall(r"workers: +(\d+) .*mean +([\d.]+)", printed)}
    assert all(0.8 * (n - 1) <= mean <= n - 1 for n, mean in means.items())
    assert sorted(means) == [1, 4, 16, 32]
    best = ast.literal_eval(re.search(r"best rate.*: (\{.*\})", printed)[1])
    assert best[32] < best[1]
