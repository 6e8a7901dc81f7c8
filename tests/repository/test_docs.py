"""The documentation is correct: snippets run, links resolve, names exist.

Blocks marked `python` run one by one, each in an empty directory and its own process: a fork of one that
has imported torch, or a new one if it imports JAX, whose threads do not survive a fork. The `bash` blocks
of a page run in order in one shell; servers that they leave in the background must still be alive at the
end. Blocks marked `text` are pictures, and tests/engines checks those marked `yaml`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import fastps
from fastps.commands import cli
from fastps.commands.kit.servers import free_ports
from interpreter import Interpreter

ROOT = Path(__file__).resolve().parents[2]
GO_GUIDE = ROOT / "docs/how-to/other-languages.md"
"""The guide of other languages, which tests/clients follows."""
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page != GO_GUIDE]
EXECUTED = [ROOT / "README.md", ROOT / "python/README.md", *DOCS]
PAGES = [
    *EXECUTED,
    GO_GUIDE,
    *(ROOT / page for page in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "lab/README.md")),
    *(ROOT / "protos" / page for page in ("README.md", "VERBS.md")),
]

SET_UP = {"make demo", "make test"}
"""The two set-up commands of the README: without them nothing here can run."""

TWO_MACHINES = "fastps cluster new cluster --servers host-a,host-b"
"""Start of the block that tests/server/test_tls_cluster.py runs. Here, servers without TLS replace it."""

STAND_IN = """
fastps serve --listen host-a:7070 --cluster host-a:7070,host-b:7070 &
fastps serve --listen host-b:7070 --cluster host-a:7070,host-b:7070 &
"""

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

JAX = re.compile(r"^(?:import|from) (?:jax|flax|keras|optax|fastps\.jax)\b", re.MULTILINE)

OPTIONAL = ("accelerate", "flax", "keras", "lightning", "tensorboard", "transformers")
"""Packages that a block may import, and that need not be installed."""

KERAS_BLOCKS_OF_ONE_NAME = """
class Model(keras.Model):
    def __init__(self):
        super().__init__()
        layers = keras.layers.Dense(8, name="d"), keras.layers.Dense(8, name="d"), keras.layers.Dense(1)
        self.one, self.two, self.last = (keras.Sequential([layer], name="block") for layer in layers)

    def call(self, x):
        return self.last(self.two(self.one(x)))

model = Model()
model(torch.randn(2, 4))
"""

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
}


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if language in languages]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def on_this_machine(commands: str) -> str:
    """The commands of a page with its example addresses replaced by free ones of this machine."""
    for letter in "abcdef":
        commands = commands.replace(f"host-{letter}:7070", f"127.0.0.1:{free_ports(1)[0]}")
    return re.sub(r"serve --shards \d", r"\g<0> --listen 127.0.0.1:0", commands)


def run(command: list[str], cwd: Path, seconds: float = 120, code: int = 0) -> str:
    """Output of a command."""
    printed = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, **printed, text=True, timeout=seconds)
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """For scripts that do not import JAX."""
    with Interpreter(ENVIRONMENT) as interpreter:
        yield interpreter


@pytest.fixture
def run_script(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """Runs a script, given as its path and arguments; returns what it printed."""

    def run_one(script: list[str], cwd: Path, seconds: int = 240, code: int = 0) -> str:
        if JAX.search(Path(script[0]).read_text()):
            return run([sys.executable, *script], cwd, seconds, code)
        output = tmp_path_factory.mktemp("printed") / "output"
        ended = request.getfixturevalue("interpreter").run(script, cwd, output, seconds)
        assert ended == code, output.read_text()
        return output.read_text()

    return run_one


@pytest.mark.parametrize("page", EXECUTED, ids=name)
def test_every_block_has_a_known_language(page: Path) -> None:
    languages = {language for language, _ in BLOCK.findall(page.read_text())}
    assert languages <= {"python", "bash", "text", "yaml"}


PYTHON_BLOCKS = [
    pytest.param(block, id=f"{name(page)}-{k}")
    for page in EXECUTED
    for k, block in enumerate(blocks(page, "python"), 1)
]


@pytest.mark.timeout(300)  # if torch is not yet cached and the disk is slow
@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_python_block(block: str, tmp_path: Path, run_script: Callable[..., str]) -> None:
    for package in OPTIONAL:
        named = re.search(rf"^(?:import|from) {package}\b|[\"']{package}:", block, re.MULTILINE)
        if named and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    (tmp_path / "snippet.py").write_text(block)
    printed = run_script([str(tmp_path / "snippet.py")], tmp_path).splitlines()
    # A comment after a print that looks like a value is the output.
    for shown in re.findall(r"print\(.*\)  # ([\[\d-].*)$", block, re.MULTILINE):
        assert shown in printed


@pytest.mark.timeout(300)
def test_the_keras_recipe_keeps_equal_paths_apart(tmp_path: Path, run_script: Callable[..., str]) -> None:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    (block,) = blocks(ROOT / "docs/how-to/keras.md", "python")
    made = re.findall(r"^model = .*\n", block, re.MULTILINE)
    block = block.replace(*made, KERAS_BLOCKS_OF_ONE_NAME).replace("assert loss < 0.1", "print(len(params))")
    (tmp_path / "twice.py").write_text(block)
    assert run_script([str(tmp_path / "twice.py")], tmp_path).split()[-1] == "6"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in EXECUTED if blocks(page, "bash")], ids=name)
def test_bash_blocks(page: Path, tmp_path: Path) -> None:
    commands = [
        STAND_IN if block.startswith(TWO_MACHINES) else block
        for block in blocks(page, "bash")
        if block.strip() not in SET_UP
    ]
    if any(line.startswith("fastps-lab ") for line in "\n".join(commands).splitlines()):
        pytest.importorskip("fastps_lab")
    script = "\n".join([*commands, "sleep 2", 'for job in $(jobs -p); do kill -0 "$job"; done'])
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    with (tmp_path / "output").open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-euxo", "pipefail", "-c", on_this_machine(script)],
            cwd=tmp_path,
            env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},  # `fastps run kill` finds no other test's run
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = shell.wait(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
    assert code == 0, (tmp_path / "output").read_text()


def without_docstring(script: Path) -> str:
    return re.sub(r'^""".*?"""', "", script.read_text(), flags=re.DOTALL)


def test_the_quickstart_is_the_readme_s() -> None:
    shown = blocks(ROOT / "README.md", "python")[0]
    assert without_docstring(ROOT / "examples/quickstart.py").strip() == shown.strip()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/concepts/index.md"])
def test_the_drawing_has_the_words_of_its_page(page: str) -> None:
    svg = ElementTree.parse(ROOT / "docs/images/idea.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    shown = [text.text or "" for text in svg.iter(f"{space}text")]
    read = (ROOT / page).read_text()
    assert len(shown) >= 8
    assert [words for words in shown for word in words.split(", ") if word not in read] == []
    described = svg.findtext(f"{space}desc")
    assert described
    assert f"![{described}](" in read  # what a screen reader says


def test_the_torch_example_differs_in_at_most_10_lines() -> None:
    plain, changed = (without_docstring(ROOT / f"examples/torch_{which}.py") for which in ("plain", "server"))
    lines = [
        line for line in difflib.ndiff(plain.splitlines(), changed.splitlines()) if line[:2] in ("+ ", "- ")
    ]
    assert 0 < len(lines) <= 10, lines


@pytest.mark.timeout(240)
def test_the_torch_example_trains() -> None:
    """As it says: a server, and two workers by ``fastps run``."""
    with fastps.serve() as server:
        command = [sys.executable, "-m", "fastps", "run", "-n", "2", "--servers", server.addresses]
        output = run([*command, str(ROOT / "examples/torch_server.py")], ROOT / "tests", 200)
        assert all(float(a) > 0.9 for a in re.findall(r"epoch 2 .* accuracy (\S+)", output)), output
        with fastps.connect(server.addresses) as ps:
            assert ps.versions("0.weight")["0.weight"] == 1 + 2 * 3 * 128


@pytest.mark.timeout(240)
def test_the_tensorboard_example_draws_its_curves(tmp_path: Path, run_script: Callable[..., str]) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with fastps.serve() as server:
        output = run_script([str(ROOT / "examples/torch_tensorboard.py"), server.addresses], tmp_path)
    last = float(re.findall(r"epoch 2  loss (\S+)", output)[0])
    (folder,) = (tmp_path / "runs").iterdir()
    curves = reader.EventAccumulator(str(folder), {"scalars": 0}).Reload()
    names = {"loss", "staleness", "bytes", "scale", "momentum", "global_step", "lr"}
    assert set(curves.Tags()["scalars"]) == names
    assert [point.step for point in curves.Scalars("bytes")] == list(range(1, 3 * 128 + 1))
    assert curves.Scalars("loss")[-1].value == pytest.approx(last, abs=1e-3)
    assert {point.value for point in curves.Scalars("staleness")} == {0.0}  # one worker
    parameters = 2 * 32 + 32 + 32 * 32 + 32 + 32 * 2 + 2
    assert all(point.value == 4 * parameters for point in curves.Scalars("bytes")[1:])


def test_several_workers_of_the_training_example() -> None:
    """The two-terminal example, with two workers at once on the same servers."""
    with fastps.serve(shards=2) as server:
        command = [sys.executable, str(ROOT / "examples/train.py"), server.addresses, "--steps", "500"]
        workers = [
            subprocess.Popen(
                command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for _ in range(2)
        ]
        first, last = [], []
        for worker in workers:
            output, _ = worker.communicate(timeout=120)
            assert worker.returncode == 0, output
            losses = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
            first.append(losses[0])
            last.append(losses[-1])
        assert max(last) < max(first) / 10, (
            first,
            last,
        )  # one may have begun late
        with fastps.connect(server.addresses) as ps:
            assert ps.versions("w")["w"] == 1 + 2 * 500  # the registration, and every push of both


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("example", "tensor"), [("numpy", "w1"), ("torch", "0.weight"), ("jax", "0/w")])
def test_two_workers_of_an_mnist_example_train_one_model(example: str, tensor: str) -> None:
    """On the package's digits: every portion of every epoch is one push, whichever worker took it."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "FASTPS_DATA_DIR"}
    with fastps.serve() as server, fastps.connect(server.addresses) as ps:
        command = [sys.executable, str(ROOT / f"examples/mnist_{example}.py"), server.addresses]
        # No worker passes the first epoch before both are present.
        gate = fastps.data.Portions(ps, n=1442, size=64, name="mnist")
        next(iter(gate))
        workers = [
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for _ in range(2)
        ]
        late = time.monotonic() + 120
        while ps.stats()["shards"][0]["counters"]["portion_workers"] < 3 and time.monotonic() < late:
            time.sleep(0.05)
            if any(worker.poll() is not None for worker in workers):
                break
        gate.close()
        for worker in workers:
            output, _ = worker.communicate(timeout=120)
            assert worker.returncode == 0, output
            assert float(re.findall(r"epoch 5  accuracy (\S+)", output)[0]) > 0.85, output
        assert ps.versions(tensor)[tensor] == 1 + 5 * 23


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_the_mnist_example_reads_the_original_files() -> None:
    folder = os.environ.get("FASTPS_DATA_DIR")
    if folder is None or not (Path(folder) / "mnist").is_dir():
        pytest.skip("FASTPS_DATA_DIR names no folder with mnist/")
    with fastps.serve() as server, fastps.connect(server.addresses) as ps:
        command = [sys.executable, str(ROOT / "examples/mnist_numpy.py"), server.addresses, "--epochs=1"]
        output = run(command, ROOT / "tests", 200)
        assert ps.versions("w1")["w1"] == 1 + 938
    assert float(re.findall(r"epoch 1  accuracy (\S+)", output)[0]) > 0.9, output


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), f"{target} does not exist"
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    for anchor in re.findall(r"\]\(#([^)]+)\)", text):
        assert anchor in anchors, f"no section {anchor}"
    folders = "rust|python|lab|protos|tests|docs|benchmarks|examples"
    for path in set(re.findall(rf"(?<![\w/.])(?:{folders})/[\w*./-]*[\w*/]", text)):
        assert list(ROOT.glob(path.rstrip("/"))), f"{path} does not exist"


def test_the_recipes_name_what_exists() -> None:
    """In CONTRIBUTING, a step names its files first, then functions, macros and types that are in them."""
    sections = (ROOT / "CONTRIBUTING.md").read_text().split("\n## ")
    recipes = [section for section in sections if section.startswith("Add ")]
    steps = [
        step for recipe in recipes for step in re.findall(r"^\d\. .*?(?=^\d\. |\Z)", recipe, re.M | re.S)
    ]
    assert len(recipes) == 6
    assert len(steps) > 24
    for step in steps:
        named = re.findall(r"`([\w./-]+[!]?)`", step)
        files = [
            path for name in named if "/" in name for path in [*ROOT.glob(name), *ROOT.glob(f"{name}*.rs")]
        ]
        text = "\n".join(path.read_text(errors="replace") for path in files if path.is_file())
        for symbol in named:
            if "/" not in symbol and "." not in symbol and symbol.isidentifier() | symbol.endswith("!"):
                assert re.search(rf"\b{symbol}", text), f"{symbol} is in none of {files}"


def test_nothing_tells_to_install_fastps_from_an_index() -> None:
    """It is built from source: another package may have its name there."""
    scripts = (path for folder in ("python", "lab", "examples") for path in (ROOT / folder).rglob("*.py"))
    texts = [*PAGES, *scripts]
    assert [name(path) for path in texts if re.search(r"pip install '?fastps\b", path.read_text())] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", page.read_text(), re.MULTILINE)
    assert {first or second for first, second in commands} <= targets


# docs/internals/architecture.md names Rust's types as well.
@pytest.mark.parametrize("page", [p for p in EXECUTED if p.stem != "architecture"], ids=name)
def test_named_exceptions_exist(page: Path) -> None:
    for exception in set(re.findall(r"\b[A-Z]\w+Error\b|\bPartialPush\b", page.read_text())):
        places = ("builtins", "fastps", "fastps.rl", "fastps.simulate", "fastps.torch.parallel")
        assert any(hasattr(importlib.import_module(place), exception) for place in places), exception


def attribute(path: str) -> object:
    """What a dotted name such as `fastps.torch.load` means; modules are imported."""
    found: object = fastps
    for part in path.split(".")[1:]:
        if not hasattr(found, part) and isinstance(found, ModuleType):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("page", [page for page in EXECUTED if "internals" not in page.parts], ids=name)
def test_named_functions_and_classes_exist(page: Path) -> None:
    files = r"(?:toml|proto|v1|run|sha256|pem|example)\b"
    for path in set(re.findall(rf"\bfastps(?:\.(?!{files})[a-zA-Z]\w*)+", page.read_text())):
        attribute(path)


def test_named_commands_have_their_options() -> None:
    """On pages, and in messages."""
    known = {name for command in cli.all_commands() for option in command.options for name in option.names}
    sources = [
        path
        for folder, kind in (("python/fastps", "py"), ("lab", "py"), ("rust", "rs"))
        for path in (ROOT / folder).rglob(f"*.{kind}")
    ]
    for text in (page.read_text() for page in [*PAGES, *sources] if page.name != "CHANGELOG.md"):
        for command in re.findall(r"\bfastps (?!run\b)[a-z]+[^`\"'\n;|&#]*", text):
            if "helm" not in command:
                assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", command)) <= known, command


def section(title: str) -> str:
    """Of the reference of servers."""
    page = (ROOT / "docs/reference/servers.md").read_text()
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_documented_alarms_are_said() -> None:
    rows = [row.split("|")[1] for row in section("Alarms").splitlines()[2:] if row.startswith("| ")]
    said = [words for row in rows for words in re.findall(r"`([^`]+ [^`]+)`", row)]
    assert len(said) > 12
    crates = (ROOT / "rust/server/src", ROOT / "rust/transport/src", ROOT / "rust/durable/src")
    source = "".join(path.read_text() for crate in crates for path in crate.rglob("*.rs"))
    assert [words for words in said if words not in source] == []


def test_documented_counters_exist(tmp_path: Path) -> None:
    page = section("Counters")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    names = {counter for row in rows for counter in re.findall(r"\w+", row)}
    assert len(names) > 20
    copies = (tmp_path / "copies").as_uri()
    with (
        fastps.serve(
            data_dir=tmp_path / "data", copy_to=copies, keep_history=1 << 20, copy_history=True
        ) as server,
        fastps.connect(server.addresses) as ps,
    ):
        stats = ps.stats()
    needs_a_bucket = {"owner_term", "owner_lease_left_ms", "log_copy_behind_ms", "log_copies_failed"}
    assert names - needs_a_bucket <= {*stats["client"], *stats["shards"][0]["counters"]}


def test_one_version_everywhere() -> None:
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    ours, lab = (
        tomllib.loads((ROOT / f"{folder}/pyproject.toml").read_text())["project"] for folder in (".", "lab")
    )
    assert (ours["version"], lab["version"], lab["dependencies"]) == (
        version,
        version,
        [f"fastps=={version}"],
    )
    newest = re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == version
    assert fastps.__version__ == version
