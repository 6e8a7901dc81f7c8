"""Names of others in a terminal: new ones have no hidden characters, and present ones are escaped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from between import between
from foreign_client import ForeignClient, Refused, Stubs
from spaces import Space

import fastps
import grpc
from cases import case

FASTPS = [sys.executable, "-m", "fastps"]
#: What a terminal obeys or hides; one line has one end.
HIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
EVIL = "a\x1b]52;c;aGk=\x07b\nERROR fake\r\u202ec\x9b2J\u2028"


def test_a_new_name_with_hidden_characters_is_refused(target: ForeignClient) -> None:
    """Wherever a name enters; with its first such character."""
    pb, client = target.pb, target.client
    space = Space(target, "names")
    calls: dict[str, Any] = {
        "tensor": lambda name: ("Register", pb.RegisterRequest(spec=target.spec(name, (4,)), client=client)),
        "group": lambda name: (
            "Register",
            pb.RegisterRequest(spec=target.spec("new", (4,), group=name), client=client),
        ),
        "client": lambda name: ("Hello", pb.HelloRequest(client=4711, secret=bytes(range(16)), name=name)),
        "worker": lambda name: (
            "Join",
            pb.JoinRequest(
                client=client,
                group=target.entry("small").placement.group,
                mode=pb.Mode(kind=pb.MODE_FREE),
                name=name,
            ),
        ),
        "portions": lambda name: (
            "Portion",
            pb.PortionRequest(client=client, worker=1, name=name, n=8, size=2),
        ),
        "space": lambda name: (
            "OpenSpace",
            pb.OpenSpaceRequest(client=client, name=name, tensors=["small"], vectors=["g"]),
        ),
        "vector": lambda name: (
            "OpenSpace",
            pb.OpenSpaceRequest(client=client, name="new", tensors=["small"], vectors=["g", name]),
        ),
        "coordinator": lambda name: (
            "Coordinate",
            pb.CoordinateRequest(client=client, space=space.space, action=pb.SEAT_TAKE, term=2, name=name),
        ),
        "replica": lambda name: (
            "BatchPortion",
            pb.BatchPortionRequest(client=client, space="names", replica=1, name=name),
        ),
    }
    for what, call in calls.items():
        for hidden in ("\x1b", "\n", "\x7f", "\x85", "\u202e", "\u2066", "\u061c", "\u2028"):
            with case(f"{what} {hidden!r}"), pytest.raises(Refused) as refused:
                target.call(0, *call(f"ab{hidden}c"))
            refusal = refused.value.refusal
            assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
            assert (refusal.kind, refusal.got) == ("config", f"U+{ord(hidden):04X} at character 3"), refusal


def test_labels_of_clients_and_workers_are_escaped(server: fastps.Server) -> None:
    """They identify nothing, and a launcher may make them from names of others."""
    zeros = np.zeros(3, np.float32)
    with fastps.Store() as store, fastps.connect(server.addresses, name=EVIL) as ps:
        for there in (store, ps):
            with pytest.raises(fastps.ConfigError, match=r"got U\+001B at character 2"):
                there.register(EVIL, zeros, fastps.SGD())
            there.register("labels", zeros, fastps.SGD())
            with fastps.Worker(there, {"labels": zeros.copy()}, fastps.Async(), name=EVIL[:-1]) as worker:
                worker.step({"labels": zeros})
        names = {one["name"] for one in ps.stats()["workers"]}
        assert r"a\u001b]52;c;aGk=\u0007b\u000aERROR fake\u000d\u202ec\u009b2J\u2028" in names


def test_what_a_command_prints_is_printable(stubs: Stubs, tmp_path: Path) -> None:
    """Also where a server sends other names, as an earlier one has them, or a hostile one."""
    pb = stubs.pb

    def hostile(method: str, answer: bytes) -> bytes:
        name = method.rpartition("/")[2]
        found = getattr(pb, f"{name}Response").FromString(answer)
        if name == "Stats":
            found.version = found.trouble = EVIL
            found.sessions.add(name=EVIL, report=pb.WorkerReport(name=EVIL, host=EVIL, mode=EVIL))
            found.groups.add(name=EVIL, mode=EVIL, fastest=1)
        elif name == "GetMap":
            for entry in found.entries:
                found.epoch, entry.spec.name, entry.spec.group = 1, f"run:{EVIL}/{EVIL}", EVIL
        elif name == "ListSpaces":
            found.spaces.add(name=EVIL, tensors=[EVIL], vectors=[EVIL], coordinator=EVIL)
        elif name == "Checkpoint":
            found.path = EVIL
        return bytes(found.SerializeToString())

    with fastps.serve(data_dir=tmp_path) as server, between(server.addresses, change=hostile) as address:
        with fastps.connect(server.addresses) as ps:
            ps.register("w", np.zeros(3, np.float32), fastps.SGD())
        for command in (
            ["ls", address],
            ["ls", address, "--json"],
            ["rm", address, "--namespace", EVIL + "x"],
            ["status", address],
            ["status", address, "--all"],
            ["status", address, "--json"],
            ["top", address, "--once", "--interval", "0.1"],
            ["checkpoint", "save", address],
        ):
            ran = subprocess.run([*FASTPS, *command], capture_output=True, text=True, timeout=120)
            text = ran.stdout + ran.stderr
            with case(" ".join(command)):
                assert not HIDDEN.search(text), text
                assert "\nERROR" not in text
                assert r"a\u001b]52" in text, (ran.returncode, text)
