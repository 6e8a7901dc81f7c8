"""`fastps-lab live`: real processes behind a page, and who may reach them."""

from __future__ import annotations

import concurrent.futures
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastps.commands.cli import main
from fastps_lab.live import command, fit, session, settings, wishes
from fastps_lab.live.errors import RefusedError
from fastps_lab.live.problems import DIGITS, PLANES, Plane, problem
from fastps_lab.live.progress import Progress
from fastps_lab.live.web import POLICY
from live.visits import LATE, Served, frame_with, until


@pytest.mark.parametrize(
    ("headers", "status", "text"),
    [
        ({"X_Fastps_Token": "wrong"}, 401, "wrong token: open the link that fastps-lab live has printed\n"),
        ({"X_Fastps_Token": ""}, 401, "wrong token: open the link that fastps-lab live has printed\n"),
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


def test_it_is_on_loopback_whatever_the_variables_of_a_secured_cluster_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, token = tmp_path / "tokens", tmp_path / "reader.token"
    assert main(["token", "new", str(tokens), "reader", "--role", "reader", "--out", str(token)]) == 0
    variables = {"TOKENS": tokens, "TOKEN_FILE": token, "WEB": "0.0.0.0:0", "LISTEN": "0.0.0.0:0"}
    for name, value in variables.items():
        monkeypatch.setenv(f"FASTPS_{name}", str(value))
    live = Served(tmp_path, "--workers", "1")
    try:
        with live.listen() as frame:
            frame_with(frame, lambda found: [w["state"] for w in found["workers"]] == ["running"])
        assert live.call("GET", "/events", X_Fastps_Token=token.read_text().strip())[0] == 401
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", live.port), timeout=LATE)
    finally:
        live.close()


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
            ({"lr": 10**400}, "invalid lr: expected a number from 0 to 100, got '1000"),
            ({"seed": -(10**400)}, "invalid seed: expected an integer from 0 to 4.29497e+09, got '-1000"),
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
        until(lambda: not Path(f"/proc/{victim}").exists())
        killed = frame_with(frame, lambda f: f["workers"][1]["state"] == "killed")
        until(lambda: frame()["state"]["updates"] > killed["state"]["updates"] + 20)

        before = frame()["servers"]
        for shard in (0, 1):
            assert served.call("POST", "/act", {"what": "kill_server", "number": shard})[0] == 204
        back = frame_with(frame, lambda f: all(s["up"] and s["starts"] == 2 for s in f["servers"]))
        assert {s["pid"] for s in before} & {s["pid"] for s in back["servers"]} == set()
        later = frame_with(frame, lambda f: f["state"]["updates"] > back["state"]["updates"] + 20)
        # Every acknowledged push is applied, except those counted as lost and some in flight.
        counts = later["state"]
        assert counts["pushes"] - counts["lost"] <= counts["updates"] + len(later["workers"])

        assert served.call("POST", "/act", {"what": "nan", "number": 0})[0] == 204
        said = until(lambda: [m for m in frame()["messages"] if m[2] == "refused"])
        assert "NonFiniteError: a value is not finite at index 0" in said[0][4]
        assert served.call("POST", "/act", {"what": "join"})[0] == 204
        until(lambda: any(w["index"] == 3 and w["state"] == "running" for w in frame()["workers"]))


@pytest.mark.parametrize("mode", ["sync", "bounded", "local", "warm", "async"])
def test_every_mode_continues_from_the_present_point(served: Served, mode: str) -> None:
    with served.listen() as frame:
        first = served.take_controls(frame)
        given = {**first["settings"], "workers": 2, "mode": mode, "momentum": 0.2 if mode == "sync" else 0.1}
        if mode == "async":
            given.update(problem="digits", codec="onebit", lr=0.1)
        assert served.call("POST", "/set", given)[0] == 204
        now = frame_with(frame, lambda f: f["settings"]["mode"] == mode)
        assert mode == "async" or now["visit"] == first["visit"]
        frame_with(frame, lambda f: f["rows"] and f["state"]["updates"] > now["state"]["updates"] + 5)


def test_a_paused_worker_is_left_alone_until_it_continues(served: Served) -> None:
    with served.listen() as frame:
        first = served.take_controls(frame)
        path = {"problem": "illconditionedquadratic", "workers": 3, "mode": "async", "lr": 0.01}
        assert served.call("POST", "/set", {**first["settings"], **path, "codec": "onebit"})[0] == 204
        running = frame_with(frame, lambda f: [w["state"] for w in f["workers"]] == ["running"] * 3)
        assert served.call("POST", "/act", {"what": "pause", "number": 0})[0] == 204
        assert served.call("POST", "/act", {"what": "pause", "number": 2})[0] == 204
        paused = frame_with(frame, lambda f: f["workers"][2]["state"] == "paused")
        # A removed worker ends immediately, and not when its pause would.
        began = time.monotonic()
        fewer = {**first["settings"], **path, "codec": "onebit", "workers": 2, "momentum": 0.3}
        assert served.call("POST", "/set", fewer)[0] == 204
        until(lambda: not Path(f"/proc/{running['workers'][2]['pid']}").exists(), late=4.0)
        assert time.monotonic() < began + 4.0
        # The other one gets the settings when it continues: it takes steps of the course that has begun.
        later = frame_with(frame, lambda f: any(row[1] == 0 for row in f["rows"]))
        assert later["course"] == paused["course"] + 1
        fit = frame_with(frame, lambda f: f["state"]["fit"] is not None and f["state"]["residual"] > 0)
        assert set(fit["state"]["codecs"]) == {"onebit"}
        assert sum(fit["state"]["staleness"]) <= fit["state"]["pushes"]
        with served.listen() as late:
            hello = late()
        assert [w["applied"] for w in hello["workers"]] >= [w["applied"] for w in fit["workers"]]


def test_a_change_that_fails_leaves_the_settings_in_force(served: Served) -> None:
    with served.listen() as frame:
        first = served.take_controls(frame)
        wish = {**first["settings"], "optimizer": "adagrad", "lr": 0.05}
        assert served.call("POST", "/act", {"what": "kill_server", "number": 1})[0] == 204
        status, text, _ = served.call("POST", "/set", wish)
        assert (status, text) == (503, "expected running servers, got shard 1 that is starting; try again\n")
        starts = first["servers"][1]["starts"]
        back = frame_with(frame, lambda f: f["servers"][1]["up"] and f["servers"][1]["starts"] > starts)
        assert back["settings"] == first["settings"]
        assert served.call("POST", "/set", wish)[:2] == (204, "")
        frame_with(frame, lambda f: f["settings"]["optimizer"] == "adagrad")


def test_a_wish_that_a_page_gives_up_is_not_fulfilled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, done = wishes.Wishes(), []
    monkeypatch.setattr(wishes, "PATIENCE", 0.01)
    with pytest.raises(RefusedError, match="busy"):
        asked.ask(lambda: done.append("late"))
    asked.fulfil()
    assert done == []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        monkeypatch.setattr(wishes, "PATIENCE", LATE)
        waiting = pool.submit(asked.ask, lambda: done.append("closed"))
        while not asked._queue.qsize():
            time.sleep(0.001)
        asked.close()
        with pytest.raises(RefusedError, match="has ended"):
            waiting.result(LATE)
    with pytest.raises(RefusedError, match="has ended"):
        asked.ask(lambda: done.append("after"))
    assert done == []


def test_more_workers_than_are_fast_are_slow_late_ones_included() -> None:
    running = session.Session.__new__(session.Session)
    running._addresses, running._course = "", 1
    running._settings, running._late = settings.Settings(workers=16, spread=4.0), 0
    assert running._orders(0).pace == 0.02
    running._late = 1
    assert running._orders(0).pace == 0.2
    assert running._settings.mean(15) == 4.0
    assert running._settings.mean(16) == 1.0  # late ones are as fast as the first
    running._late = 60
    assert running._wanted == settings.MOST_WORKERS


def path_of(
    plane: Plane, momentum: float, rate: float, start: tuple[float, float]
) -> list[tuple[float, float]]:
    """Values at consecutive versions."""
    (x, y), (vx, vy), points = start, (0.0, 0.0), [start]
    for _ in range(40):
        dx, dy = plane.slope(x, y)
        vx, vy = momentum * vx - rate * dx, momentum * vy - rate * dy
        x, y = x + vx, y + vy
        points.append((x, y))
    return points


def test_the_momentum_is_fitted_to_versions_in_any_order(rng: Any) -> None:
    plane, found = PLANES["illconditionedquadratic"], fit.Fit()
    points = path_of(plane, 0.6, 0.03, (1.0, 0.5))
    for k in [*rng.permutation(len(points)), 3, 4]:
        if k != 20:  # one is missing
            found.add(plane, int(k), points[k])
    assert found.solve() == pytest.approx((0.6, 0.03))
    assert np.isnan(fit.Fit().solve()).all()
    found.add(plane, 99, (np.inf, 0.0))
    assert found.solve() == pytest.approx((0.6, 0.03))


def report(updates: int, to: tuple[float, float], **more: Any) -> dict[str, Any]:
    """A worker's report of a step."""
    times = [0.0, 0.1, 0.2, 0.3, 0.4]
    plain = {
        "step": updates,
        "times": times,
        "at": to,
        "to": to,
        "fetched": True,
        "staleness": 1,
        "scale": 1.0,
    }
    return {
        **plain,
        "updates": updates,
        "bytes": 8,
        "loss": 0.0,
        "lost": 0,
        "rejected": 0,
        "residual": None,
        **more,
    }


def test_a_fit_begins_again_where_the_path_breaks() -> None:
    plane, chosen = PLANES["illconditionedquadratic"], settings.Settings(problem="illconditionedquadratic")
    for breaks in (
        lambda p: p.add(0, report(1, (5.0, 5.0), lost=3), chosen, plane, None),
        lambda p: p.look(2, plane, {"w": np.zeros(2, np.float32)}),
        lambda p: p.continue_from_here(),
    ):
        progress = Progress(0.0)
        for momentum, start in ((0.9, (-3.0, 2.0)), (0.2, (1.0, 0.5))):
            points = path_of(plane, momentum, 0.02, start)
            for k, point in enumerate(points, 1):
                progress.add(0, report(k, point), chosen, plane, None)
            assert progress.state()["fit"] == pytest.approx(momentum)
            progress.look(len(points), plane, {"w": np.zeros(2, np.float32)})
            breaks(progress)


def test_sums_count_steps_that_are_no_longer_kept() -> None:
    plane, chosen = PLANES["beale"], settings.Settings()
    progress = Progress(0.0)
    for k in range(5000):
        progress.add(k % 2, report(k, (0.0, 0.0)), chosen, plane, None)
    for k in range(3):
        progress.add(0, report(k, (0.0, 0.0), bytes=4), settings.Settings(codec="bfloat16"), plane, None)
    state = progress.state()
    assert state["codecs"] == {"float32": [5000, 40_000], "bfloat16": [3, 12]}
    assert state["staleness"][1] == state["pushes"] == 5003
    assert [progress.tally(k).applied for k in (0, 1)] == [2503, 2500]
    assert progress.tally(1).waited == pytest.approx(2500 * 0.1)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_behind(tmp_path: Path, signum: int) -> None:
    live = Served(tmp_path, "--workers", "1")
    try:
        with live.listen() as frame:
            until(lambda: frame()["workers"][:1])
            assert list(tmp_path.iterdir()) != []
            code, errors = live.end(signum)
        by = "Ctrl-C" if signum == signal.SIGINT else signum.name
        assert (code, errors) == (128 + signum, f"fastps: stopped by {by}\n")
        assert list(tmp_path.iterdir()) == []
        until(lambda: live.processes() == [])
    finally:
        live.close()


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = [sys.executable, "-m", "fastps_lab", "live", "--no-browser", "--port", str(port)]
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
