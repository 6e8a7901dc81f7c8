"""Dashboard and alerts against a real Prometheus that scrapes a real cluster."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from served import Served, samples, serving

import fastps
from fastps.commands.cli import main
from fastps.commands.kit.servers import free_ports

FOLDER = Path(__file__).parents[2] / "docs/how-to/monitoring"
NAMES = json.loads((Path(__file__).parents[1] / "vectors/metrics.json").read_text())
#: A worker; the pause between its steps makes it slow.
WORKER = """
import sys, time
import numpy as np
import fastps
addresses, rank, pause = sys.argv[1:]
with fastps.connect(addresses) as ps:
    params = {"w": np.zeros(300_000, np.float32)}
    with fastps.Worker(ps, params, fastps.Async(), rank=int(rank), name=f"trainer {rank}") as worker:
        while True:
            worker.step({"w": np.full(300_000, 1e-3, np.float32)}, loss=0.5)
            time.sleep(float(pause))
"""

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="Debian's package prometheus is not installed",
)


def dashboard_expressions() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    return [target["expr"] for panel in panels for target in panel["targets"]]


def alert_expressions() -> list[str]:
    return re.findall(r"expr: (.*)", (FOLDER / "alerts.yml").read_text())


def test_the_dashboard_is_what_its_script_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk makes the dashboard")
    spec = importlib.util.spec_from_file_location("grafana", FOLDER / "grafana.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (FOLDER / "grafana.json").read_text() == module.text(), (
        "run python docs/how-to/monitoring/grafana.py"
    )


def test_dashboard_and_alerts_use_the_names_of_the_list() -> None:
    parts = {name + part for name in NAMES["histograms"] for part in ("_bucket", "_sum", "_count")}
    known = {one["name"] for one in NAMES["shard"].values()} | set(NAMES["others"]) | parts
    expressions = dashboard_expressions() + alert_expressions()
    used = {name for expression in expressions for name in re.findall(r"(?:fastps|process)_\w+", expression)}
    assert used <= known
    assert len(used) > 30


class Prometheus(NamedTuple):
    """A running Prometheus."""

    port: int

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        query = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        if found["data"]["resultType"] == "scalar":
            return [{"metric": {}, "value": found["data"]["result"]}]
        return list(found["data"]["result"])

    def finite(self, expression: str) -> list[dict[str, Any]]:
        found = self.query(expression)
        return [series for series in found if math.isfinite(float(series["value"][1]))]


def until(seen: Callable[[], Any], why: str) -> Any:
    deadline = time.monotonic() + 90
    while not (found := seen()):
        assert time.monotonic() < deadline, why
        time.sleep(0.3)
    return found


@contextmanager
def prometheus_of(config: Path) -> Iterator[Prometheus]:
    """A Prometheus with this configuration; its files are beside that."""
    [port] = free_ports(1)
    log, series = config.parent / "log", config.parent / "series"
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--web.listen-address=127.0.0.1:{port}",
        f"--storage.tsdb.path={series}",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        prometheus = Prometheus(port)

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return prometheus.query("vector(1)") != []
            except OSError:
                return False

        until(answers, "Prometheus does not answer")
        yield prometheus
    finally:
        process.kill()
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, list[Served], str]]:
    """Two servers and four workers, one of them slow and one killed, and Prometheus that scrapes them."""
    folder = tmp_path_factory.mktemp("monitored")
    ports = free_ports(2)
    cluster = ",".join(f"127.0.0.1:{port}" for port in ports)
    servers, workers = [], []
    try:
        for port in ports:
            data, copies = folder / f"data {port}", (folder / "copies").as_uri()
            own = ["--cluster", cluster, "--lease-ms", "2000", "--data-dir", str(data), "--copy-to", copies]
            servers.append(Served(*own, listen=f"127.0.0.1:{port}"))
        with fastps.connect(cluster) as ps:
            ps.register("w", np.zeros(300_000, np.float32), fastps.SGD(lr=0.1))
        for rank, pause in enumerate((0.05, 0.05, 0.05, 1.0)):
            workers.append(subprocess.Popen([sys.executable, "-c", WORKER, cluster, str(rank), str(pause)]))
        targets = [f"127.0.0.1:{server.port}" for server in servers]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(FOLDER / "alerts.yml")],
            "scrape_configs": [{"job_name": "fastps", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.json").write_text(json.dumps(config))
        with prometheus_of(folder / "prometheus.json") as prometheus:
            rates = "rate(fastps_worker_steps_total[10s])"
            until(lambda: len(prometheus.finite(rates)) == 4, "no rates of four workers")
            workers[1].kill()
            yield prometheus, servers, cluster
    finally:
        for one in workers:
            one.kill()
            one.wait(timeout=60)
        for server in servers:
            server.process.kill()
            server.process.communicate(timeout=60)


@needs_prometheus
def test_every_expression_gives_a_finite_series(
    monitored: tuple[Prometheus, list[Served], str],
) -> None:
    prometheus, servers, cluster = monitored
    for expression in dashboard_expressions():
        concrete = expression.replace("$__rate_interval", "15s")
        until(lambda concrete=concrete: prometheus.finite(concrete), f"no finite series of {concrete}")
    for expression in alert_expressions():
        if "log_copy" in expression:
            continue  # these servers have no bucket
        for side in re.split(r" (?:==|>|<) ", expression):
            until(lambda side=side: prometheus.finite(side), f"no finite series of {side}")
    slow = next(expression for expression in alert_expressions() if "step_seconds" in expression)
    found = until(lambda: prometheus.finite(slow), "the slow worker is not found")
    assert [series["metric"]["worker"] for series in found] == ["trainer 3"]
    lost = next(expression for expression in alert_expressions() if "sessions_ended" in expression)
    until(lambda: prometheus.finite(lost), "the killed worker is not found")
    # The numbers of one scrape are those of the servers.
    with fastps.connect(cluster) as ps:
        counters = [shard["counters"] for shard in ps.stats()["shards"]]
    for shard, (server, own) in enumerate(zip(servers, counters, strict=True)):
        scraped = samples(server.get("/metrics"))
        for counter in ("slices", "memory_limit", "log_broken"):
            name, label = NAMES["shard"][counter]["name"], (("shard", str(shard)),)
            [series] = prometheus.query(f'{name}{{shard="{shard}"}}')
            assert float(series["value"][1]) == scraped[name, label] == own[counter]
    servers[1].process.kill()
    until(lambda: prometheus.finite('up{job="fastps"} == 0'), "the missing server is not found")


@needs_prometheus
def test_the_example_with_tls_scrapes_a_server_that_asks_for_a_token(ca, tmp_path: Path) -> None:
    """Off loopback for the server, which cannot know that the test reaches it through loopback."""
    new = ["token", "new", str(tmp_path / "tokens"), "prometheus", "--role", "reader"]
    assert main([*new, "--out", str(tmp_path / "reader.token")]) == 0
    assert Path(ca.file) == tmp_path / "ca.pem"
    shutil.copyfile(FOLDER / "alerts.yml", tmp_path / "alerts.yml")
    files = [f"--{name.replace('_', '-')}={file}" for name, file in ca.server.items()]
    with serving(*files, "--tokens", str(tmp_path / "tokens"), web="0.0.0.0:0") as server:
        text = (FOLDER / "prometheus-tls.yml").read_text()
        targets = f'["127.0.0.1:{server.port}"]'
        text = text.replace('["host-a:7069", "host-b:7069"]', targets).replace(" 15s", " 1s")
        assert targets in text
        (tmp_path / "prometheus-tls.yml").write_text(text)
        promtool = ["promtool", "check", "config", "prometheus-tls.yml"]
        ran = subprocess.run(promtool, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        with prometheus_of(tmp_path / "prometheus-tls.yml") as prometheus:
            until(lambda: prometheus.finite("fastps_ready == 1"), "nothing was scraped")
            assert main(["token", "revoke", str(tmp_path / "tokens"), "prometheus"]) == 0
            until(lambda: prometheus.finite('up{job="fastps"} == 0'), "a revoked token still scrapes")


@needs_prometheus
def test_promtool_accepts_metrics_rules_and_configuration(
    monitored: tuple[Prometheus, list[Served], str],
) -> None:
    _, servers, _ = monitored
    for arguments in (["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"]):
        ran = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
    metrics = servers[0].get("/metrics")
    ran = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


#: For each alert: its series, a value for each minute, and the labels of the one that fires.
FIRES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "ServerGone": ({'up{job="fastps",instance="a:7069"}': "1 0x20"}, {"job": "fastps", "instance": "a:7069"}),
    "ShardRefuses": ({'fastps_ready{instance="a:7069"}': "1 0x20"}, {"instance": "a:7069"}),
    "MemoryNearlyFull": (
        {
            'fastps_memory_used_bytes{shard="0"}': "95x20",
            'fastps_memory_used_bytes{shard="1"}': "5x20",
            'fastps_memory_limit_bytes{shard="0"}': "100x20",
            'fastps_memory_limit_bytes{shard="1"}': "100x20",
        },
        {"shard": "0"},
    ),
    "NotDurable": (
        {'fastps_log_broken{shard="0"}': "1x20", 'fastps_log_broken{shard="1"}': "0x20"},
        {"shard": "0"},
    ),
    "NoSnapshot": (
        {
            'fastps_snapshot_timestamp_seconds{shard="0"}': "0x20",
            'fastps_snapshot_interval_seconds{shard="0"}': "300x20",
            'fastps_snapshot_timestamp_seconds{shard="1"}': "0x20",
            'fastps_snapshot_interval_seconds{shard="1"}': "3600x20",
        },
        {"shard": "0"},
    ),
    "CopiesFail": ({'fastps_copies_failed_total{shard="0"}': "0x10 1+1x10"}, {"shard": "0"}),
    "LogCopyBehind": ({'fastps_log_copy_behind_ms{shard="0"}': "500x10 40000x10"}, {"shard": "0"}),
    "Stale": (
        {
            f'fastps_worker_staleness_p99{{worker="{name}"}}': f"{p99}x20"
            for name, p99 in {"a": 1, "b": 9}.items()
        },
        {},
    ),
    "SlowWorker": (
        {f'fastps_worker_step_seconds{{worker="{k}"}}': f"{4 if k == 3 else 1}x20" for k in range(4)},
        {"worker": "3"},
    ),
    "WorkersLost": (
        {'fastps_sessions_ended_total{reason="expired",shard="0"}': "0x15 1x5"},
        {"reason": "expired", "shard": "0"},
    ),
}


@needs_prometheus
def test_each_alert_fires_when_it_should_and_only_it(tmp_path: Path) -> None:
    rules = (FOLDER / "alerts.yml").read_text()
    summaries = dict(re.findall(r"- alert: (\w+).*?summary: \"(.*?)\"", rules, re.DOTALL))
    assert set(summaries) == set(FIRES)
    tests = []
    for alert, (series, labels) in FIRES.items():
        summary = re.sub(r"{{ \$labels\.(\w+) }}", lambda found, own=labels: own[found[1]], summaries[alert])
        fired = {"exp_labels": labels, "exp_annotations": {"summary": summary}}
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": "18m", "alertname": other, "exp_alerts": [fired] if other == alert else []}
                    for other in FIRES
                ],
            }
        )
    (tmp_path / "alerts.yml").write_text(rules)
    (tmp_path / "test.json").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": tests}))
    ran = subprocess.run(
        ["promtool", "test", "rules", "test.json"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
