"""The last release and this version with each other, both ways: `make compat`.

FASTPS_LAST names the folder that `.ci/last-release` makes. A break is a failure, unless the minor version of
the protocol has changed and the refusal says "update fastps".
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from faults.shards import Shards

LAST_FOLDER = Path(os.environ.get("FASTPS_LAST", ""))
PROGRAM = Path(__file__).with_name("compat_program.py")
PATIENT = 600.0

DIFFERENT = {
    "test_repeated_fenced_and_refused_gradients": "reads the momentum of receipts, a field of 0.1",
    "test_reflection_answers": "compares the server's proto with the suite's own",
    "test_a_bad_call_is_refused": "its unknown optimizer, lion, is one of 0.1",
    "test_a_bad_frame_is_refused": "knows the codec FourBit, and a meaning of the weight, of 0.1",
    "test_unknown_values_of_enums_are_refused": "knows codecs, optimizers and views of 0.1",
    "test_encoders_give_what_the_library_gives": "compares FourBit, a codec of 0.1",
    "test_a_question_about_a_quorum_ends": "asks for a quorum, which is one of 0.1",
    "test_what_is_acknowledged_is_forgotten": "acknowledges sequences, which is a field of 0.1",
    "test_resolve_tells_or_fences": "reads the counter pushes_fenced, which is one of 0.1",
    "test_writes_wait_until_all_shards_have_begun": "the option --consistent was --cut before 0.1",
    "test_a_foreign_client_trains_over_tls[True]": "certificates without a role may only read since 0.1",
}
"""Names, or their beginnings, of conformance tests that fail with a server of the other version, and why."""

pytestmark = [
    pytest.mark.timeout(3 * PATIENT),
    pytest.mark.skipif(not LAST_FOLDER.name, reason="FASTPS_LAST is not set: make compat"),
]


class Version(NamedTuple):
    """A version of fastps: its source, and the folder to import it from (None: the package under test)."""

    source: Path
    site: Path | None

    @property
    def minor(self) -> str:
        """The minor version of its protocol."""
        return re.search(r"PROTOCOL_MINOR: u32 = (\d+)", (self.source / "rust/proto/src/lib.rs").read_text())[
            1
        ]

    @contextlib.contextmanager
    def imported(self) -> Iterator[None]:
        """Processes that start meanwhile import it."""
        with pytest.MonkeyPatch.context() as patch:
            if self.site is not None:
                patch.setenv("PYTHONPATH", str(self.site))
            yield

    def run(self, *command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        with self.imported():
            words = [sys.executable, "-P", *map(str, command)]
            return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=2 * PATIENT)

    def call(self, *command: object) -> Any:
        """Runs a Python program and returns the JSON that it prints."""
        done = self.run(*command)
        if done.returncode and NEW.minor != LAST.minor and "update fastps" in done.stderr:
            pytest.skip(done.stderr.splitlines()[-1])
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def ask(self, stage: str, servers: Shards, folder: Path = Path()) -> Any:
        """Runs a stage of the program as a client of these servers."""
        return self.call(PROGRAM, stage, ",".join(servers.addresses), folder)


NEW = Version(Path(__file__).resolve().parents[2], None)
LAST = Version(LAST_FOLDER / "source", LAST_FOLDER / "site")
PAIRS = pytest.mark.parametrize(("one", "other"), [(LAST, NEW), (NEW, LAST)], ids=["last-this", "this-last"])


@contextlib.contextmanager
def serving(version: Version, data: Path | None = None) -> Iterator[Shards]:
    """Two servers of a version."""
    with version.imported():
        servers = Shards(2, data=data)
    with contextlib.closing(servers):
        yield servers


def test_two_versions_are_two_packages() -> None:
    places = {v.call("-c", "import fastps, json; print(json.dumps(fastps.__file__))") for v in (NEW, LAST)}
    assert len(places) == 2


def test_a_client_gets_the_same_from_both_servers() -> None:
    got = []
    for client, server in itertools.product((NEW, LAST), repeat=2):
        with serving(server) as servers:
            got.append(client.ask("train", servers))
    assert got == [got[0]] * 4


@PAIRS
def test_a_suite_passes_on_the_other_server(one: Version, other: Version, tmp_path: Path) -> None:
    """The files of tests that both versions have; what a new file tests is newer than the last release."""
    found = [{path.name for path in (v.source / "tests/grpc").glob("test_*.py")} for v in (one, other)]
    files = [f"grpc/{name}" for name in sorted(found[0] & found[1])]
    report = tmp_path / "report.xml"
    options = ["-q", "-o", f"cache_dir={tmp_path / 'cache'}", f"--junitxml={report}"]
    done = other.run("-m", "pytest", "-n3", *options, *files, cwd=one.source / "tests")
    assert report.is_file(), done.stdout + done.stderr
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert len(cases) > 250, "the suite is not whole"
    if done.returncode == 1:  # on a busy machine deadlines pass: those that failed again, one at a time
        done = other.run("-m", "pytest", "--last-failed", *options, *files, cwd=one.source / "tests")
        cases = list(ElementTree.parse(report).iter("testcase"))
    assert done.returncode in (0, 1), done.stdout
    failed = {case.get("name") for case in cases if {"failure", "error"} & {part.tag for part in case}}
    unexpected = {name for name in failed if not name.startswith(tuple(DIFFERENT))}
    assert not unexpected, done.stdout


@PAIRS
def test_a_server_starts_from_the_data_of_the_other(one: Version, other: Version, tmp_path: Path) -> None:
    """Snapshot and log, after a kill; then the first version again, from what the other wrote."""
    data = tmp_path / "data"
    with serving(one, data) as servers:
        one.ask("train", servers)
        one.call("-m", "fastps", "checkpoint", "save", "--json", *servers.addresses)
        state = one.ask("log", servers)
        for reader, stage in ((other, "log"), (one, "look")):
            with reader.imported():
                for shard in range(2):
                    servers.restart(shard)
            assert reader.ask("look", servers) == state
            state = reader.ask(stage, servers)
    for version in (one, other):
        version.call("-m", "fastps", "checkpoint", "verify", "--json", data)
    restored = tmp_path / "restored"
    other.run("-m", "fastps", "checkpoint", "restore", data, restored, "--shards", 2).check_returncode()


@PAIRS
def test_files_of_a_checkpoint_and_a_worker(one: Version, other: Version, tmp_path: Path) -> None:
    with serving(one) as servers:
        one.ask("train", servers)
        saved = one.ask("save", servers, tmp_path)
    with serving(other) as servers:
        assert other.ask("load", servers, tmp_path) == saved
