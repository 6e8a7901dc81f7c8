"""Tries what `.ci/release` has built, as users get it: `make release`.

    python tests/long/release.py FOLDER [--python python3.11 python3.13]

Each check prints a line; the first that fails ends the run. It needs no fastps.
Another architecture's files run under qemu (`.ci/foreign`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
TOOLS = TARGET / "release-tools/bin"
MOST_BYTES = 12 << 20
MOST_MEMORY = 8 << 30
PYTHONS = ["python3.11", "python3.12", "python3.13", "python3.14"]
NEEDED = ["numpy", "pytest", "pytest-timeout", "hypothesis", "trustme", "safetensors"]
GLIBC = "2_17"
TRAINING = """
import numpy as np, fastps, sys
rng = np.random.default_rng(0)
ps = fastps.connect(sys.argv[1])
ps.register("w", rng.standard_normal(300_000).astype(np.float32), fastps.Adam(lr=0.01))
for codec in (fastps.Float32(), fastps.BFloat16(), fastps.Int8()):
    ps.push("w", rng.standard_normal(300_000).astype(np.float32), codec=codec)
bound = ps.bind({"w": rng.standard_normal(300_000).astype(np.float32)}, codec=fastps.OneBit())
ps.push(bound)
print(__import__("hashlib").sha256(ps.pull("w").tobytes()).hexdigest())
ps.close()
"""
"""Prints the same on every architecture and instruction set."""


def run(*command: object, **how: object) -> str:
    """Standard output of a command that succeeds."""
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, **how)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def passed(what: str) -> None:
    print(f"release: {what}", flush=True)


def check(truth: object, what: str) -> None:
    if not truth:
        sys.exit(f"release: {what}: NO")


def check_sums(folder: Path) -> None:
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    files = [path for path in folder.iterdir() if path.name != "SHA256SUMS"]
    check(listed.keys() == {path.name for path in files}, "SHA256SUMS names every file")
    for path in files:
        check(hashlib.sha256(path.read_bytes()).hexdigest() == listed[path.name], f"the sum of {path.name}")
        passed(f"{path.stat().st_size:>11,} bytes  {path.name}")


def check_program(program: bytes, name: str) -> None:
    """A release names no folder of its builder, and lacks the failpoints that builds for tests have."""
    check(b"FASTPS_FAILPOINT" not in program, f"{name} has no failpoints")
    for place in (ROOT, Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))):
        check(f"{place}/".encode() not in program, f"{name} does not name {place}")


def check_wheel(wheel: Path) -> None:
    """Its size, tags and content, and its bill of materials."""
    check(wheel.stat().st_size <= MOST_BYTES, f"{wheel.name} has at most {MOST_BYTES >> 20} MiB")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (extension,) = (name for name in names if name.endswith(".so"))
        check_program(archive.read(extension), extension)
    bill = json.loads(wheel.with_suffix(".cyclonedx.json").read_text())
    crates = {component["name"] for component in bill["components"]}
    check({"fastps-core", "h2", "rustls", "aws-lc-rs"} <= crates, "the bill of materials lists the crates")
    shown = run(TOOLS / "auditwheel", "show", wheel)
    tag = f"manylinux_{GLIBC}_{architecture(wheel)}"
    check(tag in shown, f"auditwheel finds {tag}:\n{shown}")
    passed(f"auditwheel: {tag}; {len(crates)} crates in the bill of materials")


def architecture(path: Path) -> str:
    return re.search(r"x86_64|aarch64", path.name)[0]


class Foreign:
    """Tools that run programs of another architecture: qemu, and a folder with a Python for it."""

    def __init__(self, arch: str) -> None:
        self.root = Path(run(ROOT / ".ci/foreign", arch).strip())
        self.qemu = self.root / f"usr/bin/qemu-{arch}-static"
        self.command = [self.qemu, "-L", self.root, self.root / "usr/bin/python3.11"]


class Server:
    """The static fastps-server in an otherwise empty root."""

    def __init__(self, archive: Path, folder: Path, foreign: Foreign | None) -> None:
        root = folder / "root"
        root.mkdir()
        with tarfile.open(archive) as files:
            (member,) = (one for one in files.getmembers() if one.name.endswith("/fastps-server"))
            program = files.extractfile(member).read()
        check(member.mode & 0o111, f"the program in {archive.name} may be run")
        check_program(program, archive.name)
        (root / "fastps-server").write_bytes(program)
        (root / "fastps-server").chmod(0o755)
        command = ["/fastps-server"]
        if foreign is not None:
            shutil.copy(foreign.qemu, root / "qemu")
            command = ["/qemu", *command]
        # By their paths: the environment that they run in is empty, too.
        change = [shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin")]
        if os.geteuid() != 0:
            change = [shutil.which("unshare"), "--map-root-user", *change]
        check(None not in change, "there are chroot and unshare")
        self.inside = [*change, root, *command]
        self.root = root

    def __enter__(self) -> str:
        """Its address."""
        check("fastps" in run(*self.inside, "--version", env={}), "fastps-server --version")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.process = subprocess.Popen(
            [*map(str, self.inside), "--listen", self.address, "--web", "off", "--data-dir", "/data"], env={}
        )
        late = time.monotonic() + 60
        while True:
            try:
                host, port = self.address.split(":")
                socket.create_connection((host, int(port))).close()
                return self.address
            except OSError:
                check(time.monotonic() < late and self.process.poll() is None, "the static server listens")
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        check(self.process.wait(60) == 0, "the static server stops on SIGTERM")


def interpreter(name: str) -> str | None:
    """A Python that runs: that of PATH, or a version of pyenv, whose shim may run another one."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for program in (shutil.which(name), *versions.glob(f"*/bin/{name}")):
        if program and subprocess.run([program, "-c", ""], capture_output=True).returncode == 0:
            return str(program)
    return None


def installed(wheel: Path, python: str, folder: Path) -> Path:
    """The interpreter of a new environment with the wheel, the lab's, NumPy and nothing else."""
    run(python, "-m", "venv", folder)
    (lab,) = wheel.parent.glob("fastps_lab-*.whl")
    run(folder / "bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install", wheel, lab)
    return folder / "bin/python"


def try_here(wheel: Path, python: str, folder: Path) -> Path:
    """The wheel in an empty environment, where no compiler can be found."""
    environment = folder / Path(python).name
    interpreter = installed(wheel, python, environment)
    plain = {"PATH": str(environment / "bin"), "HOME": str(folder), "FASTPS_WEB": "off"}
    demo = run(environment / "bin/fastps", "demo", "--seconds", "3", "--json", cwd=folder, env=plain)
    check(json.loads(demo.splitlines()[-1])["updates"] > 0, f"the demo trains on {python}")
    check(
        "fastps" in run(environment / "bin/fastps-server", "--version", env=plain), "fastps-server --version"
    )
    run(environment / "bin/fastps-lab", "live", "--export", folder / "live.html", env=plain)
    version = run(interpreter, "--version").strip()
    passed(f"{wheel.name}: the demo trains in an empty environment of {version}")
    return interpreter


def unpacked(wheel: Path, arch: str, site: Path) -> Path:
    """The wheel and what its tests need, for another architecture."""
    pip = [TOOLS / "pip", "--quiet", "--disable-pip-version-check", "install", "--target", site]
    tags = [f"manylinux_2_{minor}_{arch}" for minor in (17, 27, 28, 34)] + [f"manylinux2014_{arch}"]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    run(*pip, *platforms, "--python-version", "3.11", "--only-binary=:all:", wheel, *NEEDED)
    return site


def bounded() -> None:
    """A qemu that runs wild must not take the memory of this machine."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def try_there(wheel: Path, foreign: Foreign, folder: Path) -> None:
    """The tests of the store under qemu, without those whose processes share memory or handles.

    The others start their processes under qemu, too: the kernel here cannot run that Python.
    """
    site = unpacked(wheel, architecture(wheel), folder / "site")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, foreign.command))} "$@"\n')
    python.chmod(0o755)
    plain = {"PATH": "", "PYTHONPATH": str(site), "FASTPS_WEB": "off", "HOME": str(folder)}
    start = "import pytest, sys; sys.executable = sys.argv.pop(1); sys.exit(pytest.main(sys.argv[1:]))"
    pytest = [*foreign.command, "-c", start, python, "-q", "-p", "no:cacheprovider"]
    pytest += ["--timeout=600", "-o", "faulthandler_timeout=300"]
    left_out = [f"--ignore=store/test_{name}.py" for name in ("fork", "shared_store", "handles")]
    shown = run(*pytest, "store", *left_out, cwd=ROOT / "tests", env=plain, preexec_fn=bounded)
    passed(f"{wheel.name} under qemu: {shown.splitlines()[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    arguments = parser.parse_args()
    check_sums(arguments.folder)
    here = platform.machine()
    found = list(filter(None, map(interpreter, arguments.python)))
    check(found, f"there is one of {', '.join(arguments.python)}")
    digests = set()
    with tempfile.TemporaryDirectory() as place:
        for wheel in sorted(
            arguments.folder.glob("fastps-*.whl"), key=lambda wheel: architecture(wheel) != here
        ):
            check_wheel(wheel)
        (own,) = arguments.folder.glob(f"*{here}.whl")
        for name in dict.fromkeys([found[0], found[-1]]):
            python = try_here(own, name, Path(place))
        for archive in sorted(arguments.folder.glob("fastps-server-*.tar.gz")):
            arch = architecture(archive)
            foreign = None if arch == here else Foreign(arch)
            inside = Path(place, arch)
            inside.mkdir()
            with Server(archive, inside, foreign) as address:
                digests.add(run(python, "-c", TRAINING, address))
            passed(f"{archive.name}: serves in an empty root")
            if foreign is not None:
                (wheel,) = arguments.folder.glob(f"*{arch}.whl")
                try_there(wheel, foreign, inside)
        check(len(digests) == 1, "training gives the same bits on every architecture")
    passed("training gives the same bits on all servers")


if __name__ == "__main__":
    main()
