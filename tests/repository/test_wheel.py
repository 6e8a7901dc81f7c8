"""The released wheel: small, complete, and sufficient in an empty environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WHEEL = Path(os.environ.get("FASTPS_WHEEL", ""))

pytestmark = pytest.mark.skipif(
    not WHEEL.is_file(), reason="FASTPS_WHEEL names no wheel; make test builds one and names it"
)


def test_size_and_content() -> None:
    # Without the last optimisations the program is larger; users get the release.
    most = 18 if WHEEL.parent.name == "dev" else 12
    assert WHEEL.stat().st_size <= most * 2**20
    assert "abi3" in WHEEL.name, "one wheel serves Python 3.11 and all later ones"
    with zipfile.ZipFile(WHEEL) as archive:
        names = archive.namelist()
    for needed in (
        "fastps/__init__.py",
        "fastps/py.typed",
        "fastps/_fastps.pyi",
        "fastps/data/files/ATTRIBUTION.md",
        "fastps/examples/quickstart.py",
    ):
        assert needed in names
    assert any("licenses/LICENSE" in name for name in names)
    assert not [name for name in names if name.startswith("tests/") or "__pycache__" in name]


def test_links_of_its_description_lead_somewhere() -> None:
    """The description is shown where the repository is not, so a relative link leads nowhere."""
    with zipfile.ZipFile(WHEEL) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        description = archive.read(metadata).decode().partition("\n\n")[2]
    assert description.startswith("# fastps\n")
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert [link for link in links if not link.startswith("https://")] == []


def test_only_a_build_for_tests_has_failpoints() -> None:
    """In a release, no name of a place kills the process (rust/core/src/base/failpoint.rs)."""
    with zipfile.ZipFile(WHEEL) as archive:
        (extension,) = (name for name in archive.namelist() if name.endswith(".so"))
        program = archive.read(extension)
    assert b"FASTPS_SERVER_DATA_DIR" in program, "it has the server"
    assert (b"FASTPS_FAILPOINT" in program) == (WHEEL.parent.name == "dev")


@pytest.mark.timeout(300)
def test_an_empty_environment_with_numpy_alone(tmp_path: Path) -> None:
    """Installed without extras: the demo prints plain lines and says what to install for more."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin/python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", WHEEL], check=True)
    listed = subprocess.run([*pip, "list", "--format=json"], check=True, capture_output=True, text=True)
    packages = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert packages - {"pip", "setuptools", "wheel"} == {"fastps", "numpy"}

    folder = tmp_path / "empty"
    folder.mkdir()
    command = [environment / "bin/fastps", "demo", "--seconds", "3", "--json"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FASTPS"))}
    demo = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=120)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert json.loads(demo.stdout.splitlines()[-1])["updates"] > 0
    assert "pip install rich matplotlib" in demo.stderr
    assert [path.name for path in folder.iterdir()] == ["fastps-demo"]

    copying = [environment / "bin/fastps", "examples", "--to", "examples"]
    subprocess.run(copying, cwd=folder, env=clean, check=True)
    ran = subprocess.run(
        [python, "examples/quickstart.py"], cwd=folder, env=clean, capture_output=True, text=True
    )
    assert re.findall(r"\d(?=\.)", ran.stdout) == list("0123456789"), ran.stderr
