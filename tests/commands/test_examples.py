"""`fastps examples`: every example is listed with what it needs, is in the package, and is copied whole."""

from __future__ import annotations

import ast
import json
import os
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

ALONE = (1, r"rank 1 \| this starts its own .* without fastps run")
TRAINED = (0, r"epoch 2 .* accuracy (0\.9|1\.0)")
LAUNCHED = {
    "evaluate": (0, r"rank 0 \| best: version \d+ +0\.[89]"),
    "jax_local_steps": (0, r"step 300  accuracy (0\.9|1\.0)"),
    "language_model": ALONE,
    "mnist_jax": (0, r"epoch 5  accuracy 0\.[89]"),
    "mnist_numpy": (0, r"epoch 5  accuracy 0\.[89]"),
    "mnist_torch": (0, r"epoch 5  accuracy 0\.[89]"),
    "model_parallel --epochs 1": (0, r"epoch 1  accuracy 0\."),
    "model_parallel_demo": ALONE,
    "quickstart": (0, r"rank 1 \| \[-?0\.  1\.  2\."),
    "recommender": (0, r"rank 1 \| RMSE 0\."),
    "rl_custom": (0, r"rank 1 \| mean return 0\.2"),
    "synthetic_gradients": ALONE,
    "text_classification": (0, r"rank 1 \| accuracy (0\.9|1\.0)"),
    "torch_plain": TRAINED,
    "torch_server": TRAINED,
    "torch_tensorboard": TRAINED,
    "train --steps 300": (0, r"rank 1 \| largest error of a weight: 0\.0"),
}
"""Each script with its exit code and a line that two workers of `fastps run` print."""

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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", LAUNCHED)
def test_two_workers_of_a_script_run_under_the_launcher(example: str, tmp_path: Path) -> None:
    """Without an address, and on the digits of the package."""
    name, *options = example.split()
    for package in imported(f"{name}.py"):
        pytest.importorskip(package)
    env = {
        key: value for key, value in os.environ.items() if key not in ("FASTPS_DATA_DIR", "FASTPS_ADDRESSES")
    }
    command = [sys.executable, "-m", "fastps", "run", "-n", "2", str(FOLDER / f"{name}.py"), *options]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    code, line = LAUNCHED[example]
    assert ran.returncode == code, ran.stderr
    assert re.search(line, ran.stdout + ran.stderr), ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


def test_every_script_is_tried_under_the_launcher() -> None:
    assert sorted(f"{example.split()[0]}.py" for example in LAUNCHED) == [n for n in FILES if "/" not in n]
