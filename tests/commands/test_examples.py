"""`fastps examples`: every example is listed with what it needs, is in the package, and is copied whole."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fastps.commands import cli
from fastps.commands.examples import examples

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
FILES = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("*")
    if path.suffix in (".py", ".ipynb", ".sbatch") and ".ipynb_checkpoints" not in path.parts
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Packages that a requirement installs under another name, or as its own requirement.
BRINGS = {"scikit-learn": {"sklearn", "scipy"}}


def installed_by(requirements: list[str]) -> set[str]:
    names = [re.match(r"[\w-]+", line)[0] for line in requirements]
    return {package for name in names for package in BRINGS.get(name, {name})}


def source(example: str) -> str:
    """The code of a script or of a notebook's cells."""
    text = (FOLDER / example).read_text()
    if example.endswith(".sbatch"):
        return ""
    if not example.endswith(".ipynb"):
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def imported(example: str) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source(example))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    return {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"fastps"}


def test_all_are_listed_with_their_extras(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["examples"]) == 0
    printed = capsys.readouterr().out
    assert [example.name for example in examples()] == FILES
    assert all(re.match(r"\w", example.summary) for example in examples())
    assert "\nquickstart.py\n    A linear regression on two servers" in printed
    assert "\nevaluate.py (fastps[torch,checkpoint])\n    Evaluates the model" in f"\n{printed}"


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_the_extras_bring_what_an_example_imports(example) -> None:
    project = PROJECT["project"]
    extras = [line for extra in example.extras for line in project["optional-dependencies"][extra]]
    assert imported(example.name) <= installed_by([*project["dependencies"], *extras])


def test_wheels_and_source_distributions_have_all() -> None:
    """maturin puts the files of these patterns into both, under the path without `python/`."""
    found = {path for pattern in PROJECT["tool"]["maturin"]["include"] for path in ROOT.glob(pattern)}
    assert found == {ROOT / "python/fastps/examples" / name for name in FILES}


def test_copies_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new/examples"
    assert cli.main(["examples", "--to", str(target)]) == 0
    assert capsys.readouterr().out == f"copied {len(FILES)} examples to {target}\n"
    for name in FILES:
        assert (target / name).read_bytes() == (FOLDER / name).read_bytes()
    assert cli.main(["examples", "--to", str(target)]) == 0, "the same files are there already"
    quickstart = [sys.executable, str(target / "quickstart.py")]
    ran = subprocess.run(quickstart, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert re.findall(r"\d(?=\.)", ran.stdout) == list("0123456789"), ran.stderr


def test_a_changed_file_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("my own\n")
    assert cli.main(["examples", "--to", str(tmp_path)]) == 1
    assert f"fastps: {tmp_path}/train.py differs" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "my own\n"


def test_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["examples", "--to", str(tmp_path / "file")]) == 1
    assert "is no folder" in capsys.readouterr().err
