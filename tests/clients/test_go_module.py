"""The Go module: its checks and tests, its generated code, its examples."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.toolchain import GO_FOLDER, MODULE, ROOT, Go, go_environment, program_of_go
from faults.shards import PATIENT, Shards

#: The module's path stands in go.mod; what imports it must follow.
PATH = (MODULE / "go.mod").read_text().split()[1]
PACKAGE = f"{PATH}/fastpsv1;fastpsv1"


def test_the_module_is_clean_and_its_tests_pass(go: Go) -> None:
    for check in ("vet", "test"):
        done = go(check, "./...")
        assert done.returncode == 0, done.stdout + done.stderr
    staticcheck = shutil.which("staticcheck", path=f"{GO_FOLDER / 'bin'}:{os.environ['PATH']}")
    if staticcheck is not None:
        done = subprocess.run([staticcheck, "./..."], cwd=MODULE, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    sources = [*MODULE.glob("*.go"), *MODULE.glob("internal/**/*.go"), *MODULE.glob("examples/**/*.go")]
    assert unformatted(*sources) == ""


def test_the_module_may_be_served_from_anywhere() -> None:
    assert "." in PATH.partition("/")[0], "paths without a dot there are those of Go's own library"


def unformatted(*sources: Path) -> str:
    """Files that gofmt would change."""
    gofmt = program_of_go("gofmt")
    assert gofmt is not None
    return subprocess.run([gofmt, "-l", *sources], capture_output=True, text=True, check=True).stdout


def test_the_generated_code_is_that_of_the_protos(go: Go, tmp_path: Path) -> None:
    """``FASTPS_REGENERATE=1`` writes it."""
    bins = tmp_path / "bin"
    for plugin in (
        "google.golang.org/protobuf/cmd/protoc-gen-go",
        "google.golang.org/grpc/cmd/protoc-gen-go-grpc",
    ):
        built = go("build", "-o", f"{bins}/", plugin)
        assert built.returncode == 0, built.stderr
    into = MODULE if os.environ.get("FASTPS_REGENERATE") else tmp_path
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}"]
    for plugin in ("go", "go-grpc"):
        command += [f"--{plugin}_out={into}", f"--{plugin}_opt=module={PATH}"]
        command += [f"--{plugin}_opt=Mfastps/v1/fastps.proto={PACKAGE}"]
    environment = os.environ | {"PATH": f"{bins}:{os.environ['PATH']}"}
    subprocess.run([*command, "fastps/v1/fastps.proto"], env=environment, check=True)

    def text(path: Path) -> str:
        # The header names the version of protoc, which changes nothing.
        return re.sub(r"(?m)^// [-\s]*protoc .*\n", "", path.read_text())

    for name in ("fastps.pb.go", "fastps_grpc.pb.go"):
        assert text(into / "fastpsv1" / name) == text(MODULE / "fastpsv1" / name), name


def test_the_example_trains_beside_a_python_worker(
    go: Go, clusters: Callable[..., Shards], tmp_path: Path
) -> None:
    data = Path(os.environ.get("FASTPS_DATA_DIR", "nowhere"), "a9a", "a9a.gz")
    if not data.exists():
        pytest.skip("FASTPS_DATA_DIR has no a9a")
    built = go("build", "-o", str(tmp_path / "logistic"), "./examples/logistic")
    assert built.returncode == 0, built.stderr
    servers = ",".join(clusters().addresses)
    commands: list[list[str]] = [
        [str(tmp_path / "logistic"), "-servers", servers, "-data", str(data), "-steps", "300"],
        [sys.executable, str(MODULE / "examples/logistic/worker.py"), servers, str(data), "300"],
    ]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    for worker in workers:
        answer, _ = worker.communicate(timeout=PATIENT)
        assert worker.returncode == 0
        loss = float(answer.split()[1])
        assert loss < 0.40, answer  # 0.693 at the start; scikit-learn reaches 0.32


def test_the_guide_leads_to_a_training_loop(go: Go, clusters: Callable[..., Shards], tmp_path: Path) -> None:
    guide = (ROOT / "docs/how-to/other-languages.md").read_text()
    section = guide.partition("## From nothing to a training loop in Go\n")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```go\n(.*?)```", section, re.DOTALL)
    begin, start, replace = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    (tmp_path / "fastps/clients").mkdir(parents=True)
    (tmp_path / "fastps/clients/go").symlink_to(MODULE)
    run_shell(begin, tmp_path)
    (tmp_path / "training/main.go").write_text(program)
    printed = run_shell(
        start.replace("127.0.0.1:7070", clusters(shards=1).addresses[0]), tmp_path / "training"
    )
    assert printed == start.partition("# ")[2]
    assert unformatted(tmp_path / "training/main.go") == ""
    (tmp_path / "training/go.work").unlink()
    run_shell(f"{replace}go build .", tmp_path / "training")


def run_shell(script: str, folder: Path) -> str:
    environment = go_environment() | {"PATH": f"{os.environ['PATH']}:/usr/local/go/bin"}
    command = ["bash", "-euc", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
