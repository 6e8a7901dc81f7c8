"""The import rules of docs/internals/architecture.md ("Who may import whom"), checked on the source."""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "rust/core/src"
CLIENT = ROOT / "rust/client/src"
SERVER = ROOT / "rust/server/src"

# Folders that each folder of the core (and `shard.rs` at its root) may import.
CORE_FOLDERS: dict[str, set[str]] = {
    "base": set(),
    "memory": {"base"},
    "kernel": {"base", "memory"},
    "hogwild": {"base", "memory"},
    "tensor": {"base", "memory", "kernel"},
    "slice": {"base", "memory", "kernel", "tensor"},
    "coordination": {"base", "memory", "tensor", "slice"},
    "shard": {"base", "memory", "tensor", "slice", "coordination"},
    "verbs": {"base", "kernel", "tensor", "slice", "coordination"},
    "push": {"base", "kernel", "tensor", "slice", "verbs"},
    "store": {"base", "kernel", "tensor", "slice", "coordination", "shard", "verbs", "push"},
}
# Files of one folder that import each other.
CORE_FILE_CIRCLES = {
    # Racing memory is part of regions, which are made of its lines.
    "memory": {("cell", "shared")},
    # A slice owns its memory, whose changes need the slice; a policy releases pushes to the slice.
    "slice": {
        *(("slice", file) for file in ("exact", "hogwild", "policy", "round")),
        *(("exact", file) for file in ("image", "round", "vectors")),
    },
}

# Crates of the workspace that each of its crates may depend on.
CRATES = {
    "fastps-core": set(),
    "fastps-durable": {"fastps-core"},
    "fastps-proto": set(),
    "fastps-transport": {"fastps-core", "fastps-proto"},
    "fastps-client": {"fastps-core", "fastps-proto", "fastps-transport"},
    "fastps-server": {"fastps-core", "fastps-durable", "fastps-proto", "fastps-transport"},
    "fastps-cli": {"fastps-core", "fastps-durable", "fastps-transport", "fastps-client", "fastps-server"},
    "fastps-live": {"fastps-core"},
    "fastps-python": {"fastps-core", "fastps-client", "fastps-server", "fastps-cli"},
}
# Packages that the core must not use: network, async, clocks, logging, Python.
NOT_IN_CORE = {"tokio", "tonic", "prost", "h2", "hyper", "pyo3", "tracing", "log", "bytes", "futures-util"}

UNSAFE_FILES = {
    "rust/core/src/base/isa.rs",
    "rust/core/src/memory/cell.rs",
    "rust/core/src/memory/exposed.rs",
    "rust/core/src/memory/shared.rs",
    "rust/live/src/exports.rs",
    "rust/python/src/arrays/buffer.rs",
    "rust/python/src/arrays/buffer/dlpack.rs",
    "rust/python/src/arrays/shared_view.rs",
    "rust/python/src/openmp.rs",
    "rust/server/src/connection/trim.rs",
    "rust/transport/src/wire/shm/memory.rs",
}


def without_comments_and_strings(source: str) -> str:
    """Rust source with comments removed and string literals emptied."""
    token = re.compile(
        r"""//[^\n]*|/\*.*?\*/|r(\#*)".*?"\1|"(?:\\.|[^"\\])*"|'(?:\\[^\n]|[^'\\\n])'""", re.DOTALL
    )
    return token.sub(lambda m: " " if m[0].startswith("/") else '""', source)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def rust_files(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*.rs")) if "generated" not in p.parts]


def manifests() -> dict[str, dict]:
    loaded = (tomllib.loads(p.read_text()) for p in sorted(ROOT.glob("rust/*/Cargo.toml")))
    return {m["package"]["name"]: m for m in loaded}


def dependencies(manifest: dict, kinds: tuple[str, ...] = ("dependencies", "build-dependencies")) -> set[str]:
    tables = [manifest, *manifest.get("target", {}).values()]
    return {name for table in tables for kind in kinds for name in table.get(kind, {})}


def without_circle(place: object, imports: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"{place}: these import each other: {error.args[1]}")


def core_folder(path: Path) -> str:
    """The folder of the core that contains a file, or the file's own name."""
    return path.relative_to(CORE).parts[0].removesuffix(".rs")


def names_after(source: str, prefix: str) -> set[str]:
    """The names that follow a path's prefix: `prefix::name` and `prefix::{name, name::more}`."""
    names = set(re.findall(rf"\b{prefix}::(\w+)", source))
    for group in re.findall(rf"\b{prefix}::\{{(.*?)\}};", source, re.DOTALL):
        depth_free = re.sub(r"\{[^{}]*\}", "", group)
        names |= {item.strip().split("::")[0] for item in depth_free.split(",")} - {""}
    return names


def core_imports(path: Path) -> set[str]:
    """The folders of the core that a file names by `crate::`, tests included."""
    return names_after(without_comments_and_strings(path.read_text()), "crate") - {core_folder(path)}


def file_imports(folder: Path) -> dict[str, set[str]]:
    """Imports of each file of a folder from the others, by their names or through the folder's `mod.rs`.

    A file and the folder of its submodules count as one.
    """
    module = next(path for path in (folder / "mod.rs", folder.with_suffix(".rs")) if path.exists())
    files = {path.stem for path in folder.glob("*.rs")} - {"mod"}
    files |= {path.name for path in folder.iterdir() if path.is_dir()}
    exports: dict[str, str] = {}
    for file in files:
        for name in names_after(module.read_text(), rf"use {file}"):
            exports[name] = file
    root = next(parent for parent in folder.parents if parent.name == "src")
    own = "::".join(("crate", *folder.relative_to(root).parts))
    imports: dict[str, set[str]] = {}
    for file in files:
        beside, inside = folder / f"{file}.rs", rust_files(folder / file)
        sources = [without_comments_and_strings(path.read_text()) for path in inside]
        names = names_after("".join(sources), own)
        if beside.exists():
            source = without_comments_and_strings(beside.read_text())
            names |= names_after(source, own) | names_after(source, "super")
        imports[file] = ({exports.get(name, name) for name in names} & files) - {file}
    return imports


def test_crates_depend_in_one_direction() -> None:
    crates = manifests()
    assert set(crates) == set(CRATES), "a new crate needs a line in CRATES and in the architecture page"
    for name, manifest in crates.items():
        own = dependencies(manifest) & set(CRATES)
        assert own <= CRATES[name], f"{name} must not depend on {sorted(own - CRATES[name])}"


def test_core_knows_no_network_clock_or_python() -> None:
    assert not dependencies(manifests()["fastps-core"]) & NOT_IN_CORE
    for path in rust_files(CORE):
        source = without_comments_and_strings(path.read_text())
        production = source.split("#[cfg(test)]")[0]
        found = re.findall(r"\bstd::net\b|\bInstant\b|\bSystemTime\b|\basync\s+fn\b|\.await\b", production)
        assert not found, f"{path.relative_to(ROOT)} uses {found}"


def test_durable_knows_no_network_or_async() -> None:
    assert not dependencies(manifests()["fastps-durable"]) & {"tokio", "tonic", "h2", "hyper", "bytes"}
    for path in rust_files(ROOT / "rust/durable/src"):
        source = without_comments_and_strings(path.read_text())
        assert not re.search(r"\bstd::net\b|\basync\s+fn\b|\.await\b", source), path.relative_to(ROOT)


def test_pyo3_is_in_the_python_crate_alone() -> None:
    for name, manifest in manifests().items():
        uses = any(d.startswith("pyo3") for d in dependencies(manifest, ("dependencies", "dev-dependencies")))
        assert uses == (name == "fastps-python"), name


def test_folders_of_the_core_import_lower_folders_only() -> None:
    without_circle("the core", CORE_FOLDERS)
    files = [path for path in rust_files(CORE) if path.name != "lib.rs"]
    assert {core_folder(path) for path in files} == set(CORE_FOLDERS)
    for path in files:
        wrong = core_imports(path) - CORE_FOLDERS[core_folder(path)]
        assert not wrong, f"{path.relative_to(ROOT)} must not import {sorted(wrong)}"


def folders_of(src: Path) -> list[Path]:
    return sorted({path.parent for path in rust_files(src)} - {src})


def test_files_of_a_folder_of_the_core_form_no_circle() -> None:
    for folder in folders_of(CORE):
        allowed = CORE_FILE_CIRCLES.get(str(folder.relative_to(CORE)), set())
        imports = file_imports(folder)
        others = {file: {f for f in found if (file, f) not in allowed} for file, found in imports.items()}
        without_circle(folder, others)
        unused = {(file, other) for file, other in allowed if other not in imports[file]}
        assert not unused, f"no longer needed: {sorted(unused)}"


def test_files_of_a_folder_of_client_and_server_form_no_circle() -> None:
    for folder in (*folders_of(CLIENT), *folders_of(SERVER)):
        without_circle(folder, file_imports(folder))


def test_atomics_and_locks_come_through_sync() -> None:
    for path in rust_files(CORE):
        if path.name == "sync.rs":
            continue
        production = without_comments_and_strings(path.read_text()).split("#[cfg(test)]")[0]
        assert not re.search(r"\bstd::sync::atomic\b", production), path.relative_to(ROOT)


def test_unsafe_is_in_the_named_files_alone() -> None:
    assert tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["lints"]["rust"]["unsafe_code"] in (
        "deny",
        "forbid",
    )
    for manifest in manifests().values():
        assert manifest["lints"] == {"workspace": True}, manifest["package"]["name"]
    for path in rust_files(ROOT / "rust"):
        name = str(path.relative_to(ROOT))
        source = without_comments_and_strings(path.read_text())
        allows = re.search(r"allow\([^)]*\bunsafe_code\b", source)
        uses = re.search(r"\bunsafe\s*(\{|fn\b|impl\b|extern\b)", source)
        assert name in UNSAFE_FILES or not allows, name
        assert name in UNSAFE_FILES or not uses, name


def test_generated_types_stay_in_the_crates_that_speak_the_protocol() -> None:
    for folder in ("core", "durable", "cli/src", "python"):
        for path in rust_files(ROOT / "rust" / folder):
            assert "fastps_proto" not in path.read_text(), path.relative_to(ROOT)


def python_imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Absolute modules that a file imports, and whether at its top level (which an import of it executes)."""
    tree = parsed(path)
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, id(node) in top


#: Both packages, by their names.
PACKAGES = {"fastps": ROOT / "python/fastps", "fastps_lab": ROOT / "lab/fastps_lab"}
LAB = PACKAGES["fastps_lab"]


def python_files() -> list[Path]:
    return sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))


RL = ROOT / "python/fastps/rl"
CONVNET = ROOT / "lab/fastps_lab/repro/convnet.py"
#: The programs of claims' worker processes, which nothing imports.
PROCESSES = {
    ROOT / "lab/fastps_lab/repro" / name
    for name in ("allreduce/worker.py", "fleet/beside.py", "fleet/peer.py")
}
NETS = {
    ROOT / "lab/fastps_lab/repro/figures/nets" / name
    for name in ("images.py", "parts_costs.py", "parts_model.py", "residual.py")
}


def test_torch_and_jax_are_imported_by_their_adapters_alone() -> None:
    """But torch also by `fastps.rl`, whose models are torch's, and by claims and figures about models in
    parts, about images, about all-reduce and about a fleet.
    """
    models = {RL, CONVNET, *PROCESSES, *NETS, ROOT / "lab/fastps_lab/repro/claims/synthetic.py"}
    for path in python_files():
        for module, _ in python_imports(path):
            for framework in ("torch", "jax"):
                allowed = framework == "torch" and {path, *path.parents} & models
                if module.split(".")[0] == framework and not allowed:
                    own = (ROOT / f"python/fastps/{framework}.py", ROOT / f"python/fastps/{framework}")
                    assert {path, *path.parents} & set(own), path.relative_to(ROOT)


def test_the_base_package_needs_numpy_alone() -> None:
    standard = set(__import__("sys").stdlib_module_names) | {"numpy", *PACKAGES}
    for path in python_files():
        if (
            path in PROCESSES
            or path.name in ("jax.py", "mpi.py")
            or {"torch", "hogwild", "rl"} & {folder.name for folder in path.parents}
        ):
            continue
        if path in NETS:  # imported where torch is needed
            continue
        extra = {m for m, top in python_imports(path) if top and m.split(".")[0] not in standard}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)} at its top level"


MODES = ROOT / "python/fastps/modes"


def test_a_mode_is_read_by_its_properties_and_not_by_its_type() -> None:
    """`arguments.py` alone asks whether a value is a mode at all."""
    source = "".join(path.read_text() for path in MODES.glob("*.py"))
    kinds = set(re.findall(r"^class (\w+)", source, re.MULTILINE))
    assert {"Mode", "Sync", "WarmStart"} <= kinds
    for path in python_files():
        if path.parent == MODES or path == ROOT / "python/fastps/worker/arguments.py":
            continue
        for call in ast.walk(parsed(path)):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("isinstance", "issubclass"):
                names = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(call.args[1])}
                assert not names & kinds, f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"


COMMANDS = ROOT / "python/fastps/commands"


def test_commands_import_the_library_and_never_the_reverse() -> None:
    """A module of the library names the module that it needs, so that `fastps` itself is above all."""
    for path in python_files():
        if {COMMANDS, LAB} & set(path.parents) or path.name == "__main__.py":
            continue
        found = {module for module, _ in python_imports(path) if module.startswith("fastps.commands")}
        assert not found, f"{path.relative_to(ROOT)} imports {sorted(found)}"
        tree = parsed(path)
        names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        assert "fastps" not in names, f"{path.relative_to(ROOT)} imports the package itself"


def test_the_lab_imports_public_names_and_the_kit_and_nobody_imports_the_lab() -> None:
    for path in python_files():
        for name in imported_names(path):
            package, *parts = name.split(".")
            where = f"{path.relative_to(ROOT)} imports {name}"
            if LAB not in path.parents:
                assert package != "fastps_lab", where
            elif package == "fastps":
                assert not [part for part in parts if re.match("_[^_]", part)], where
                assert parts[:1] != ["commands"] or parts[1] == "kit", where


def test_the_extension_module_is_private() -> None:
    """Only the package itself names `fastps._fastps`; tests, examples, demo and lab use the public face."""
    for folder in ("python/fastps/commands/demo", "lab/fastps_lab", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "_fastps" not in path.read_text(), path.relative_to(ROOT)


@pytest.mark.parametrize("crate", ["durable", "transport", "client", "server"])
def test_folders_of_a_crate_form_no_circle(crate: str) -> None:
    """Files beside the folders count as separate folders."""
    root = ROOT / "rust" / crate / "src"
    names = {path.stem if path.is_file() else path.name for path in root.iterdir()} - {"lib"}
    imports: dict[str, set[str]] = {name: set() for name in names}
    for path in rust_files(root):
        name = path.relative_to(root).parts[0].removesuffix(".rs")
        if name != "lib":
            source = without_comments_and_strings(path.read_text())
            imports[name] |= set(re.findall(r"\bcrate::(\w+)", source)) & names - {name}
    without_circle(root, imports)


def imported_names(path: Path) -> Iterator[str]:
    """Dotted names of what a file imports, anywhere in it."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def imported_paths(path: Path) -> list[Path]:
    """Files of both packages that a file imports; the compiled module has none."""
    return [found for name in imported_names(path) for found in found_module(name)]


def found_module(name: str) -> Iterator[Path]:
    """The file of a dotted name, or of the module that defines it."""
    parts = name.split(".")
    while parts and parts[0] in PACKAGES:
        place = PACKAGES[parts[0]].parent / Path(*parts)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.exists():
                yield file
                return
        if place.with_suffix(".pyi").exists():
            return
        parts.pop()


def packages() -> list[Path]:
    return [path.parent for path in python_files() if path.name == "__init__.py"]


def test_python_packages_have_no_circles() -> None:
    """Among the files and folders of a package, imports lead in one direction."""
    for package in packages():
        graph: dict[str, set[str]] = collections.defaultdict(set)
        for path in package.rglob("*.py"):
            inside = (
                other.relative_to(package) for other in imported_paths(path) if package in other.parents
            )
            child = path.relative_to(package).parts[0]
            graph[child] |= {other.parts[0] for other in inside} - {child}
        without_circle(package, graph)


def features(*packages: str) -> dict[str, set[str]]:
    """Each package that a build of `packages` needs, with the sets of features that it is built with."""
    command = ["cargo", "tree", "--locked", "--offline", "--no-dedupe", "--prefix=none", "--format={p}|{f}"]
    listed = subprocess.run([*command, *packages], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert listed.returncode == 0, listed.stderr
    found: dict[str, set[str]] = collections.defaultdict(set)
    for line in filter(None, listed.stdout.splitlines()):  # an empty one separates two packages
        package, names = line.removesuffix(" (*)").split("|")
        found[package].add(names)
    return found


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed")
def test_the_wheel_under_test_shares_its_libraries_with_the_rust_tests() -> None:
    """Where features differ, a package is built twice, and so is every package that depends on it."""
    wheel = features("--package=fastps-python", "--features=failpoints", "--edges=normal,build")
    tests = features("--workspace", "--exclude=fastps-transport-loom", "--edges=normal,build,dev")
    own = [package for package in wheel if package.startswith("fastps-python ")]
    different = [package for package in wheel if package not in own and not wheel[package] <= tests[package]]
    assert not different, {package: (wheel[package], tests[package]) for package in different}
