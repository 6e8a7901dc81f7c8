"""The documentation site builds without a warning, and its reference has every public name."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fastps

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("mkdocs", reason="MkDocs is not installed (extra docs)")


def extension() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_docstrings", ROOT / "docs/api_docstrings.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(300)
def test_the_site_builds_and_documents_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "<title>A Live Example" in (tmp_path / "live-example.html").read_text()
    pages = "".join(page.read_text() for page in (tmp_path / "reference/api").glob("*.html"))
    documented = set(re.findall(r'id="(fastps\.[\w.]+)"', pages))
    ends = {name.rpartition(".")[2] for name in documented}
    assert set(fastps.__all__) - ends == {"__version__"}
    assert ends >= {
        "ParameterServerOptimizer",
        "Portions",
        "HogwildClassifier",
        "A3C",
        "register",
        "push",
        "result",
    }


def test_docstrings_of_compiled_classes_are_those_of_the_module() -> None:
    found = extension().docstrings()
    assert {"Receipt", "Sparse", "Versions", "InDoubt", "ErrorFeedback", "InDoubt.result"} <= set(found)
    for name, text in found.items():
        thing = fastps
        for part in name.split("."):
            thing = getattr(thing, part, None)
        if thing is not None:
            assert inspect.cleandoc(text) == inspect.getdoc(thing), name
