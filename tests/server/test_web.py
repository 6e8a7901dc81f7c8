"""The web listener: metrics, health and the state of a cluster over HTTP."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as prometheus
from served import FASTPS, Served, samples, serving

import fastps

ROOT = Path(__file__).parents[1]
MAX_WORKERS = 64
OTHERS = "fastps_worker_steps_total", (("worker", "(others)"),)
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("data")
    kept = ["--data-dir", str(data), "--copy-to", (data / "copies").as_uri()]
    kept += ["--keep-history", "1MiB", "--copy-history"]
    with serving("--shards", "2", *kept) as one:
        yield one


def test_every_counter_is_a_metric_and_equals_that_of_stats(served: Served) -> None:
    with fastps.connect(served.addresses) as ps:
        ps.register("w", np.zeros(600_000, np.float32), fastps.Adam())
        with fastps.Worker(
            ps, {"w": np.zeros(600_000, np.float32)}, fastps.Async(), name="trainer"
        ) as worker:
            worker.step({"w": np.ones(600_000, np.float32)}, loss=0.25)
            deadline = time.monotonic() + 60
            while not (reports := [one["report"] for one in ps.stats()["workers"] if one["report"]]):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            text, stats = served.get("/metrics"), ps.stats()
        ps.unregister("w")
    found = samples(text)
    names = json.loads((ROOT / "vectors/metrics.json").read_text())
    moving = {
        "frames",
        "log_syncs",
        "log_pending",
        "snapshot_age_s",
        "copy_age_s",
        "history_bytes",
        "history_copied_bytes",
        "snapshot",
        "copy",
        "pulls",
    }
    for shard in (0, 1):
        counters = stats["shards"][shard]["counters"]
        assert set(counters) <= set(names["shard"]), "a counter has no metric"
        for counter, value in counters.items():
            metric = names["shard"][counter]
            labels = {**metric.get("labels", {}), "shard": str(shard)}
            own = found[metric["name"], tuple(sorted(labels.items()))]
            assert own == value or counter in moving or counter.startswith(("memory_", "connections")), (
                counter
            )
    assert found["fastps_ready", ()] == 1
    label = (("worker", "trainer"),)
    assert found["fastps_worker_steps_total", label] == reports[0]["steps"] == 1
    assert found["fastps_worker_loss", label] == 0.25
    assert reports[0]["step_seconds"] is None, "the first step includes the start"
    assert found["fastps_group_workers", (("group", "default"),)] == 1


def test_the_names_are_those_of_the_list(served: Served) -> None:
    """A dashboard relies on them: a change of this list is a change of a contract."""
    names = json.loads((ROOT / "vectors/metrics.json").read_text())
    allowed = {one["name"] for one in names["shard"].values()} | set(names["others"])
    parts = {name + part for name in names["histograms"] for part in ("_bucket", "_sum", "_count")}
    found = {sample.name for family in prometheus(served.get("/metrics")) for sample in family.samples}
    assert found <= allowed | parts
    needs_a_bucket = {"fastps_owner_term", "fastps_owner_lease_left_ms"}
    needs_a_bucket |= {"fastps_log_copy_behind_ms", "fastps_log_copies_failed_total"}
    assert {one["name"] for one in names["shard"].values()} | parts <= found | needs_a_bucket
    assert all(re.fullmatch(r"(fastps|process)_[a-z0-9_]+", name) for name in allowed)


def test_the_process_and_the_times(served: Served) -> None:
    found = samples(served.get("/metrics"))
    [build] = [dict(labels) for name, labels in found if name == "fastps_build_info"]
    assert build["version"] == fastps.__version__
    now, start = time.time(), found["process_start_time_seconds", ()]
    # The kernel's clocks differ by some ticks.
    assert now - 3600 < start < now + 1
    for shard in ("0", "1"):
        label = (("shard", shard),)
        assert found["fastps_snapshot_interval_seconds", label] == 300
        for name in ("fastps_snapshot_timestamp_seconds", "fastps_copy_timestamp_seconds"):
            assert start - 2 < found[name, label] < now + 1, name
    usage = psutil.Process(served.process.pid)
    assert found["process_max_fds", ()] == usage.rlimit(psutil.RLIMIT_NOFILE)[0]
    assert abs(found["process_open_fds", ()] - usage.num_fds()) < 20
    assert found["process_resident_memory_bytes", ()] > 1 << 20
    assert found["process_virtual_memory_bytes", ()] > found["process_resident_memory_bytes", ()]
    assert found["process_cpu_seconds_total", ()] > 0


def test_no_counter_falls_when_workers_and_tensors_leave(served: Served) -> None:
    last: dict[tuple, float] = {}
    zeros = {"w": np.zeros(3, np.float32)}

    def look() -> None:
        for family in prometheus(served.get("/metrics")):
            for sample in family.samples if family.type == "counter" else ():
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert sample.value >= last.get(key, 0), key
                last[key] = sample.value

    with fastps.connect(served.addresses) as ps:
        for name, apply in (("w", "exact"), ("h", "hogwild")):
            ps.register(name, np.zeros(3, np.float32), fastps.SGD(lr=1e-6), apply=apply)
            ps.push(name, np.ones(3, np.float32))
        with contextlib.ExitStack() as workers:
            for number in range(MAX_WORKERS + 4):
                client = workers.enter_context(fastps.connect(served.addresses, transport="tcp"))
                worker = fastps.Worker(client, zeros, fastps.Async(), name=f"worker {number}")
                workers.enter_context(worker).step(zeros)
                for _ in range(20 * (number < MAX_WORKERS)):
                    worker.step(zeros)
            deadline = time.monotonic() + 60
            while OTHERS not in last:
                assert time.monotonic() < deadline
                look()
                time.sleep(0.1)
        shown = set()
        while not shown or shown > {OTHERS}:
            assert time.monotonic() < deadline + 60, shown
            look()
            shown = {key for key in samples(served.get("/metrics")) if key[0] == OTHERS[0]}
        for name in ("w", "h"):
            ps.unregister(name)
        look()


def test_both_formats_are_well_formed(served: Served) -> None:
    status, text, headers = served.ask("/metrics", Accept=OPEN_METRICS)
    assert (status, headers["Content-Type"]) == (
        200,
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
    )
    families = {family.name: family.type for family in open_metrics(text)}
    assert families["fastps_pushes"] == "counter"
    assert families["fastps_memory_used_bytes"] == "gauge"
    assert families["fastps_push_staleness"] == families["fastps_answer_seconds"] == "histogram"
    status, text, headers = served.ask("/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert {family.name for family in prometheus(text)} == set(families)


def test_health_version_and_the_cluster(served: Served) -> None:
    assert served.get("/healthz") == served.get("/readyz") == "ok\n"
    assert json.loads(served.get("/version")) == {"version": fastps.__version__}
    cluster = json.loads(served.get("/api/v1/cluster"))
    assert cluster["cluster"] == served.addresses
    assert [shard["shard"] for shard in cluster["shards"]] == [0, 1]
    assert (cluster["ready"], cluster["trouble"], cluster["workers"]) == (True, None, [])
    status, body, headers = served.ask("/metrics", method="HEAD")
    assert (status, body) == (200, "")
    assert int(headers["Content-Length"]) > 1000


def test_the_listener_knows_its_names() -> None:
    options = ["--insecure", "--advertise", "fastps-0.models.svc", "--web-host", "one.example"]
    options += ["--web-host", "two.example"]
    served = Served(*options, listen="0.0.0.0:0")
    try:
        port = served.port
        names = [f"fastps-0.models.svc:{port}", f"{socket.gethostname()}:{port}", f"10.1.2.3:{port}"]
        for host in (*names, "one.example", "TWO.example:443", f"fastps-0.models.svc.:{port}"):
            assert served.ask("/metrics", host=host)[0] == 200, host
        for host in ("three.example", "fastps-0.models.svc:1", "models.svc"):
            status, text, _ = served.ask("/metrics", host=host)
            assert (status, "--web-host" in text) == (421, True), host
    finally:
        served.process.kill()
        served.process.communicate()


def test_nothing_can_be_changed_and_foreign_pages_are_refused(served: Served) -> None:
    own = f"127.0.0.1:{served.port}"
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        status, _, headers = served.ask("/metrics", method=method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
    for path in ("/", "/metrics/", "/metrics/../healthz", "//metrics", "/%6detrics", "/api/v1", "/METRICS"):
        assert served.ask(path)[0] == 404, path
    assert served.ask("/metrics?x=1")[0] == 200
    for host in ("", "evil.example", f"evil.example:{served.port}", f"{socket.gethostname()}:1", f"x@{own}"):
        assert served.ask("/metrics", host=host)[0] in (400, 421), host
        assert served.ask("/healthz", host=host)[0] == served.ask("/readyz", host=host)[0] == 200, host
    for host in (own, f"localhost:{served.port}", "localhost", "localhost:9", "127.0.0.1:9", "[::1]:9"):
        assert served.ask("/metrics", host=host)[0] == 200, host
    assert served.ask("/metrics", Origin="http://evil.example")[0] == 403
    assert served.ask("/metrics", Origin="null")[0] == 403
    assert served.ask("/metrics", Origin=f"http://localhost:{served.port}")[0] == 200
    assert "Access-Control-Allow-Origin" not in served.ask("/metrics")[2]


def test_peers_that_send_too_much_or_nothing_are_cut_and_training_continues(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as peer:
        peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: ")
        with pytest.raises(ConnectionError):  # until the listener closes the connection
            for _ in range(64):
                peer.sendall(b"x" * (1 << 16))
                time.sleep(0.01)
            while peer.recv(1 << 16):
                pass
            raise ConnectionResetError
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):  # a line now and then does not prolong the time for the head
            for k in range(300):
                slow.sendall(f"X-{k}: 1\r\n".encode())
                time.sleep(0.1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    idle = [socket.create_connection(("127.0.0.1", served.port), timeout=60) for _ in range(1000)]
    with fastps.connect(served.addresses) as ps:
        ps.register("idle", np.zeros(10, np.float32), fastps.SGD(lr=1.0))
        for _ in range(20):
            ps.push("idle", np.ones(10, np.float32))
        assert ps.pull("idle")[0] == -20.0
        ps.unregister("idle")
    for one in idle:  # each is closed at once, or when it has sent no head for 5 seconds
        assert one.recv(1 << 16) == b""
        one.close()
    assert served.get("/healthz") == "ok\n"


def test_a_port_that_is_asked_for_and_taken_is_an_error_and_off_is_off() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        command = [*FASTPS, "serve", "--listen", "127.0.0.1:0", "--web", taken]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 1
        assert f"cannot listen on {taken}" in ran.stderr
    for open_address in ("0.0.0.0:0", "not an address"):
        command = [*FASTPS, "serve", "--listen", "127.0.0.1:0", "--web", open_address]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 1
        assert "loopback" in ran.stderr or "host:port" in ran.stderr
    command = [*FASTPS, "serve", "--listen", "127.0.0.1:0", "--web", "off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.terminate()
    assert "listening on" in lines[0]
    assert "version" in lines[1]


def test_the_page_and_the_alerts_have_the_names_of_the_list() -> None:
    names = json.loads((ROOT / "vectors/metrics.json").read_text())
    every = {one["name"] for one in names["shard"].values()} | set(names["others"]) | set(names["histograms"])
    docs = ROOT.parent / "docs"
    page = (docs / "reference/metrics.md").read_text()
    assert set(re.findall(r"^\| `((?:fastps|process)_\w+)` \|", page, re.MULTILINE)) == every
    alerts = (docs / "how-to/monitoring/alerts.yml").read_text()
    used = {name for line in re.findall(r"expr: (.*)", alerts) for name in re.findall(r"fastps_\w+", line)}
    assert used
    assert used <= every
