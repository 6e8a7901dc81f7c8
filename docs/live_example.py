"""Puts the page of `fastps-lab live`, as one file, and the changelog into the site."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
EXPORT = ROOT / "lab/fastps_lab/live/export.py"


def _export() -> ModuleType:
    """The module alone: the package needs its extension module, which need not be built."""
    spec = importlib.util.spec_from_file_location("live_export", EXPORT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_files(files: Any, config: Any) -> Any:
    files.append(File.generated(config, "live-example.html", content=_export().one_file()))
    files.append(File.generated(config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text()))
    return files
