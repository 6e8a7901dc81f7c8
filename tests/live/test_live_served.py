"""`fastps live`: real processes behind a page, and who may reach them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastps.live import command, settings
from fastps.live.errors import RefusedError
from fastps.live.problems import DIGITS, PLANES, problem
from fastps.live.web import POLICY
from live.visits import LATE, Served, frame_with, until


@pytest.mark.parametrize(
    ("headers", "status", "text"),
    [
        ({"X_Fastps_Token": "wrong"}, 401, "wrong token: open the link that fastps live has printed\n"),
        ({"X_Fastps_Token": ""}, 401, "wrong token: open the link that fastps live has printed\n"),
        ({"Host": "evil.example"}, 403, "foreign host: expected 127.0.0.1:{port}, got 'evil.example'\n"),
        (
            {"Origin": "http://evil.example"},
            403,
            "foreign origin: expected http://127.0.0.1:{port}, got 'http://evil.example'\n",
        ),
    ],
    ids=["wrong token", "no token", "host", "origin"],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/events"), ("POST", "/act"), ("POST", "/set")])
def test_strangers_are_refused(
    served: Served, method: str, path: str, headers: dict[str, str], status: int, text: str
) -> None:
    answer = served.call(method, path, {"what": "kill", "number": 0} if method == "POST" else None, **headers)
    assert answer[:2] == (status, text.format(port=served.port))


def test_files_have_the_policy_and_no_token(served: Served) -> None:
    for path, kind in (("/", "text/html"), ("/main.js", "text/javascript"), ("/style.css", "text/css")):
        status, _, headers = served.call("GET", path, X_Fastps_Token="")
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/../session.py", "/missing", "/%2e%2e/session.py"):
        assert served.call("GET", path)[0] == 404
    assert served.call("DELETE", "/")[0] == 501


def test_wishes_are_checked_and_the_second_page_watches(served: Served) -> None:
    with served.listen() as first, served.listen() as second:
        one = served.take_controls(first)
        two = second()
        served.tab = two["you"]
        assert served.call("POST", "/act", {"what": "kill", "number": 0})[:2] == (
            409,
            "another page has the controls: this one watches\n",
        )
        served.tab = one["you"]
        for body, expected in (
            (b"nonsense", "expected JSON, got something else"),
            ([], "expected an object, got list"),
            ({"workers": 10**9}, "invalid workers: expected an integer from 1 to 64, got '1000000000'"),
            ({"lr": float("nan")}, "invalid lr: expected a number from 0 to 100, got 'nan'"),
            ({"codec": "zip"}, "invalid codec: expected float32 or bfloat16 or"),
            ({"max_staleness": 0, "on_stale": "scale"}, "invalid max_staleness: expected an integer >= 1"),
            ({"error_feedback": False}, "unknown setting: expected one of problem, x, y"),
        ):
            status, text, _ = served.call("POST", "/set", body)
            assert (status, text[: len(expected)]) == (400, expected)
        assert served.call("POST", "/act", {"what": "dance"})[0] == 400
        assert served.call("POST", "/act", {"what": "kill", "number": 99})[0] == 409
        assert served.call("POST", "/set", b" " * 20_000)[0] == 413


def test_a_killed_worker_and_a_killed_server(served: Served) -> None:
    with served.listen() as frame:
        served.take_controls(frame)
        state = frame_with(frame, lambda f: all(w["state"] == "running" for w in f["workers"]))
        victim = state["workers"][1]["pid"]
        assert served.call("POST", "/act", {"what": "kill", "number": 1})[0] == 204
        until(lambda: not Path(f"/proc/{victim}").exists(), late=2.0)
        killed = frame_with(frame, lambda f: f["workers"][1]["state"] == "killed")
        until(lambda: frame()["state"]["updates"] > killed["state"]["updates"] + 20)

        before = frame()["servers"]
        for shard in (0, 1):
            assert served.call("POST", "/act", {"what": "kill_server", "number": shard})[0] == 204
        back = frame_with(frame, lambda f: all(s["up"] and s["starts"] == 2 for s in f["servers"]))
        assert {s["pid"] for s in before} & {s["pid"] for s in back["servers"]} == set()
        later = frame_with(frame, lambda f: f["state"]["updates"] > back["state"]["updates"] + 20)
        # Every acknowledged push is there but those that are counted as lost, and some in flight.
        counts = later["state"]
        assert counts["pushes"] - counts["lost"] <= counts["updates"] + len(later["workers"])

        assert served.call("POST", "/act", {"what": "nan", "number": 0})[0] == 204
        said = until(lambda: [m for m in frame()["messages"] if m[2] == "refused"])
        assert "NonFiniteError: a value is not finite at index 0" in said[0][4]
        assert served.call("POST", "/act", {"what": "join"})[0] == 204
        until(lambda: any(w["index"] == 3 and w["state"] == "running" for w in frame()["workers"]))


@pytest.mark.parametrize("mode", ["sync", "bounded", "local", "warm", "async"])
def test_every_mode_goes_on_from_the_present_point(served: Served, mode: str) -> None:
    with served.listen() as frame:
        first = served.take_controls(frame)
        given = {**first["settings"], "workers": 2, "mode": mode, "momentum": 0.2 if mode == "sync" else 0.1}
        if mode == "async":
            given.update(problem="digits", codec="onebit", lr=0.1)
        assert served.call("POST", "/set", given)[0] == 204
        now = frame_with(frame, lambda f: f["settings"]["mode"] == mode)
        assert mode == "async" or now["visit"] == first["visit"]
        frame_with(frame, lambda f: f["rows"] and f["state"]["updates"] > now["state"]["updates"] + 5)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_behind(tmp_path: Path, signum: int) -> None:
    live = Served(tmp_path, "--workers", "1")
    try:
        with live.listen() as frame:
            until(lambda: frame()["workers"][:1])
            assert list(tmp_path.iterdir()) != []
            code, errors = live.end(signum)
        assert (code, errors) == (128 + signum, f"fastps: stopped by signal {signum.value}\n")
        assert list(tmp_path.iterdir()) == []
        until(lambda: live.processes() == [])
    finally:
        live.close()


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = [sys.executable, "-m", "fastps", "live", "--no-browser", "--port", str(port)]
        done = subprocess.run(run, capture_output=True, text=True, timeout=LATE)
    text = f"fastps: --port {port}: the port is in use; choose another one, or 0 for any\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", text)


def test_without_a_browser_the_link_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise command.webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(command.webbrowser, "get", none)
    assert not command._open("http://127.0.0.1/")
    monkeypatch.setattr(command.webbrowser, "get", lambda: command.webbrowser.GenericBrowser("w3m"))
    assert not command._open("http://127.0.0.1/")


@pytest.mark.parametrize("name", [*PLANES, DIGITS])
def test_gradients_are_those_of_the_values(name: str, rng: Any) -> None:
    """Central differences of the loss, relative to the largest part."""
    if name == DIGITS:
        task = problem(name)
        start = task.start((0.0, 0.0))
        grads, loss = task.gradient(start, rng)
        assert loss > 0
        assert {n: g.shape for n, g in grads.items()} == {n: p.shape for n, p in start.items()}
        return
    plane = PLANES[name]
    for x, y in rng.uniform(-2, 2, (1000, 2)):
        h = 1e-6
        found = np.array(
            [plane.value(x + h, y) - plane.value(x - h, y), plane.value(x, y + h) - plane.value(x, y - h)]
        )
        exact = np.array(plane.slope(x, y))
        assert np.abs(exact - found / (2 * h)).max() <= 1e-5 * max(1.0, np.abs(exact).max())


def test_settings_are_the_objects_of_the_package() -> None:
    for mode in ("async", "local", "bounded", "sync", "warm"):
        assert (
            type(settings.Settings.from_mapping({"mode": mode}).fastps_mode())
            .__name__.lower()
            .startswith(mode)
        )
    with pytest.raises(RefusedError, match="invalid workers"):
        settings.Settings.from_mapping({"workers": 2.5})
