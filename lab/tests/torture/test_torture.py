"""`fastps-lab torture`: the checker on histories with one violation each, the plan, and one short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fastps
from fastps.commands.kit.account import Account
from fastps_lab.torture.auditor import Auditor
from fastps_lab.torture.check import INVARIANTS, certain, check
from fastps_lab.torture.client.calls import Call
from fastps_lab.torture.history import History, read
from fastps_lab.torture.lag import Lag
from fastps_lab.torture.plan import PROFILES, Plan
from fastps_lab.torture.source import Planned, Recorded

HISTORIES = Path(__file__).parent / "histories"
BAD = sorted(path.stem for path in HISTORIES.glob("*.jsonl") if path.stem not in ("good", "replay"))


def history(name: str) -> list:
    return read((HISTORIES / f"{name}.jsonl").read_text().splitlines())


def invariant(name: str) -> str:
    """The one that a file is named after: "no-internal-died" is of "no internal"."""
    return next(known for known in INVARIANTS if name.startswith(known.replace(" ", "-")))


def test_a_good_history_has_no_violations() -> None:
    assert check(history("good")) == []


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_violates_its_invariant_and_no_other(name: str) -> None:
    found = check(history(name))
    assert {violation.invariant for violation in found} == {invariant(name)}
    assert all(violation.evidence for violation in found)


def test_a_run_ends_early_for_an_act_that_is_wrong_by_itself() -> None:
    """Values are judged at the end, when everything is settled."""
    early = {"strangers", "liveness", "one owner", "no internal"}
    for name in BAD:
        assert certain(history(name), "applied") == (invariant(name) in early)
    assert not certain(history("good"), "applied")


@pytest.mark.parametrize("own", [0, 2])
def test_a_run_ends_early_for_a_lost_push_that_was_logged(own: int) -> None:
    call: dict = {"verb": "push", "life": 0, "step": 1, "took": 0.1, "limit": None, "error": None, "text": ""}
    call.update(ev="done", lost=[["small0", 0, own, 7, 5]])
    assert certain([call], "logged") == (own > 0)
    assert not certain([call], "applied")


def test_every_invariant_has_a_bad_history() -> None:
    assert {invariant(name) for name in BAD} == set(INVARIANTS)


def test_a_violation_names_the_step() -> None:
    assert [v.step for v in check(history("one-owner"))] == [5]
    assert str(check(history("one-owner"))[0]).startswith("one owner (step 5): ")


def test_an_account_has_bounds() -> None:
    account = Account()
    for _ in range(5):
        account.ask(1.0)
    account.apply(1.0)
    account.refuse(1.0)
    account.doubt(1.0)
    account.doubt(1.0)
    assert account.bounds == (1.0, 4.0)  # the fifth is under way
    account.resolve(1.0, "applied")
    account.resolve(1.0, "fenced")
    assert account.bounds == (2.0, 3.0)
    assert account.bounds_without_fates == (1.0, 4.0)
    account.lose(1, 1)
    assert account.bounds == (1.0, 2.0)


def assignment(n: int, value: float, lost: list | None = None, *, in_doubt: bool = False) -> list:
    """An assignment of client 0, and its outcome; one that is in doubt has its call's number."""
    part = ["assign/0", 0]
    ask = {"ev": "ask", "life": 0, "n": n, "verb": "assign", "parts": [[*part, value]], "limit": 2.0}
    done = {
        "ev": "done", "life": 0, "n": n, "verb": "assign", "took": 0.0, "limit": 2.0, "lag": 0.0,
        "doubts": [[n, *part]] if in_doubt else [],
        "error": "VersionsLost" if lost else "PartialPush" if in_doubt else None,
        "text": "VersionsLost: " if lost else "DeadlineError: " if in_doubt else "",
        "applied": [] if lost or in_doubt else [part], "refused": [part] if lost else [], "lost": lost or [],
    }  # fmt: skip
    return [ask, done]


@pytest.mark.parametrize(
    ("ack", "crash", "reported", "violated"),
    [
        ("applied", True, True, set()),
        ("applied", True, False, {"reported"}),
        ("applied", False, False, {"ledger"}),
        ("logged", True, False, {"ledger"}),
    ],
)
def test_an_assigned_value_may_be_lost_in_a_crash_if_the_next_call_tells_it(
    ack: str, crash: bool, reported: bool, violated: set
) -> None:
    begin = {"ev": "begin", "ack": ack, "limit": 2**28, "lease": 10.0}
    life = {"ev": "life", "life": 0, "slot": 0}
    crashed = [{"ev": "server", "shard": 0, "what": "killed", "pid": 1}] if crash else []
    old = {"ev": "assigned", "life": 0, "tensor": "assign/0", "value": 1.0}
    after = assignment(3, 3.0, [["assign/0", 0, 1, 3, 2]] if reported else None)
    events = [begin, life, *assignment(1, 1.0), *assignment(2, 2.0), *crashed, old, *after]
    assert {v.invariant for v in check([{"step": None, **event} for event in events])} == violated


@pytest.mark.parametrize(
    ("verb", "error", "reported", "violated"),
    [
        ("pull", None, True, {"reported"}),  # the next call has succeeded without the report
        ("portions", None, True, set()),
        ("close_space", None, True, set()),
        ("pull", "PartialPush", True, set()),  # of an earlier push
        ("pull", "PartialPush", False, {"reported"}),
    ],
)
def test_a_call_that_cannot_report_a_loss_may_come_before_its_report(
    verb: str, error: str | None, reported: bool, violated: set
) -> None:
    begin = {"ev": "begin", "ack": "applied", "limit": 2**28, "lease": 10.0}
    life = {"ev": "life", "life": 0, "slot": 0}
    crashed = {"ev": "server", "shard": 0, "what": "killed", "pid": 1}
    old = {"ev": "assigned", "life": 0, "tensor": "assign/0", "value": 1.0}
    between = assignment(3, 3.0)[1] | {"verb": verb, "error": error, "text": error or "", "applied": []}
    after = assignment(4, 4.0, [["assign/0", 0, 1, 3, 2]] if reported else None)
    events = [begin, life, *assignment(1, 1.0), *assignment(2, 2.0), crashed, old, between, *after]
    assert {v.invariant for v in check([{"step": None, **event} for event in events])} == violated


@pytest.mark.parametrize(
    ("fate", "crash", "violated"),
    [
        (None, True, set()),
        ("applied", True, set()),
        ("unknown", True, set()),
        ("fenced", True, {"ledger"}),
        (None, False, {"ledger"}),
    ],
)
def test_a_crash_may_bring_back_a_value_in_doubt_that_was_overwritten(
    fate: str | None, crash: bool, violated: set
) -> None:
    begin = {"ev": "begin", "ack": "applied", "limit": 2**28, "lease": 10.0}
    life = {"ev": "life", "life": 0, "slot": 0}
    crashed = [{"ev": "server", "shard": 0, "what": "killed", "pid": 1}] if crash else []
    answer = {"ev": "fate", "life": 0, "doubt": 2, "tensor": "assign/0", "slice": 0, "fate": fate}
    old = {"ev": "assigned", "life": 0, "tensor": "assign/0", "value": 2.0}
    made = [*assignment(1, 1.0), *assignment(2, 2.0, in_doubt=True), *assignment(3, 3.0)]
    after = assignment(4, 4.0, [["assign/0", 0, 1, 4, 3]]) if crash else []
    events = [begin, life, *made, *([answer] if fate else []), *crashed, old, *after, old]
    assert {v.invariant for v in check([{"step": None, **event} for event in events])} == violated


def test_a_loss_reported_while_the_catalogue_is_read_is_recorded() -> None:
    class Restarted:
        """A client of a server that restarts between two pulls."""

        def __init__(self) -> None:
            self.pulled: list[str] = []

        def names(self, timeout: float) -> list[str]:
            return ["a", "b", "c"]

        def pull(self, name: str, timeout: float) -> None:
            self.pulled.append(name)
            if name == "a":
                raise fastps.UnknownTensorError("it was removed", tensor=name)
            if name == "b":
                raise fastps.VersionsLost(lost=[("big", 0, None, 402, 401)])

    record = History()
    auditor = Auditor([], record, Lag())
    auditor._ps = ps = Restarted()  # type: ignore[assignment]
    assert not auditor._look_at_the_catalogue(7)
    assert ps.pulled == ["a", "b"]
    done = [event for event in record.events() if event["ev"] == "done"]
    assert [event["error"] for event in done] == [None, None, "VersionsLost"]
    assert done[-1]["lost"] == [["big", 0, None, 402, 401]]


def test_a_call_is_not_charged_for_what_its_caller_does_after_the_deadline() -> None:
    ignored = Call(1, "push_async", {}, 0.0, 0.0)
    time.sleep(0.2)
    ignored.is_waited_for()
    waited = Call(2, "push_async", {}, 10.0, 0.0)
    waited.is_waited_for()
    time.sleep(0.2)
    assert ignored.took() <= time.monotonic() - ignored.began - 0.2
    assert waited.took() >= 0.2


@pytest.mark.parametrize("profile", PROFILES)
def test_an_action_depends_on_seed_and_step_alone(profile: str) -> None:
    plan, again = Plan(7, profile), Plan(7, profile)
    forwards = [plan.action(step) for step in range(400)]
    assert [again.action(step) for step in reversed(range(400))] == forwards[::-1]
    assert [Plan(8, profile).action(step) for step in range(400)] != forwards
    for lane in plan.lanes:
        own = [action for action in forwards if action.lane == lane]
        assert [action.step for action in own] == [plan.step(lane, turn) for turn in range(len(own))]


def test_a_deck_has_every_kind_before_one_comes_again() -> None:
    plan = Plan(3, "all")
    kinds = [plan.action(plan.step("shard 0", turn)).kind for turn in range(12)]
    assert sorted(kinds[:6]) == sorted(kinds[6:])
    assert len(set(kinds[:6])) == 6


def test_a_recorded_history_is_the_source_of_the_same_actions() -> None:
    planned, record = Planned(Plan(5, "all"), 1e9), History()
    asked = []
    for lane in planned.lanes:
        for _ in range(3):
            found = planned.next(lane, 0.0)
            assert found is not None
            action = found[0]
            asked.append(action)
            record.add("action", action.step, lane=lane, kind=action.kind, args=dict(action.args))
    recorded = Recorded(json.loads(json.dumps(event)) for event in record.events())
    got = [recorded.next(action.lane, 1e9) for action in asked]
    assert got == [(action, 0.0) for action in asked]
    assert all(recorded.next(lane, 1e9) is None for lane in recorded.lanes)


def run_torture(*arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastps_lab", "torture", "--json", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110.0, env=os.environ | variables)
    assert run.returncode == code, run.stderr
    return run


def torture(*arguments: str, code: int = 0) -> dict:
    return json.loads(run_torture(*arguments, code=code).stdout.splitlines()[-1])


def test_a_replay_does_what_was_recorded_and_no_more() -> None:
    report = torture("--replay", str(HISTORIES / "replay.jsonl"))
    assert report["violations"] == {}
    assert report["faults"] == {"kill": 1, "reset": 1}
    assert report["restarts"] == 1
    assert report["pushes"] == 20 + 20 + 3


def test_a_short_run_of_everything_is_clean() -> None:
    report = torture("--seconds", "8", "--seed", "1")
    assert report["violations"] == {}
    # A busy machine gets through fewer of them.
    assert report["pushes"] > 0
    assert report["checks"] > 0
    assert report["faults"]


def test_without_safetensors_a_run_says_so_and_blames_no_server(tmp_path: Path) -> None:
    """The base wheel does not depend on it. A client of this seed saves a file within seconds."""
    absent = "raise ModuleNotFoundError(\"No module named 'safetensors'\", name='safetensors')\n"
    (tmp_path / "safetensors.py").write_text(absent)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = run_torture("--seconds", "8", "--seed", "12", PYTHONPATH=path)
    assert json.loads(run.stdout.splitlines()[-1])["violations"] == {}
    assert "not checked: saved files, consistent snapshots (pip install safetensors)" in run.stderr


def test_a_run_has_a_column_for_each_client() -> None:
    command = [sys.executable, "-m", "fastps_lab", "torture", "--seconds", "1801"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "at most 1800" in run.stderr


def test_what_is_no_history_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}\n")
    for file, why in (("x", "not a history of fastps-lab torture"), ("y", "No such file or directory")):
        command = [sys.executable, "-m", "fastps_lab", "torture", "--replay", str(tmp_path / file)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert (run.returncode, run.stderr) == (1, f"fastps: --replay {tmp_path / file}: {why}\n")
