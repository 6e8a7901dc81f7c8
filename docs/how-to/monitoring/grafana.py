"""Makes ``grafana.json`` beside it, a dashboard of a fastps cluster: ``python grafana.py``.

It needs ``grafana-foundation-sdk``. ``docs/reference/metrics.md`` has the metrics.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef


class Panel(NamedTuple):
    """A panel: what it shows, in which unit of Grafana, and each query with its legend."""

    title: str
    unit: str
    queries: dict[str, str]
    description: str = ""


def rate(metric: str, by: str | None = None) -> str:
    """Increase per second, of all series together or by labels."""
    labels = f" by ({by})" if by else ""
    return f"sum{labels} (rate({metric}[$__rate_interval]))"


def quantile(share: float, histogram: str, by: str = "le") -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({share}, sum by ({by}) (rate({histogram}[$__rate_interval])))"


ROWS = {
    "At a glance": [
        Panel(
            "Servers that answer",
            "none",
            {
                'sum(up{job="fastps"})': "answer",
                'count(up{job="fastps"}) - sum(up{job="fastps"})': "do not answer",
                "sum(fastps_ready)": "serve",
            },
            "One that answers and does not serve says why at /readyz.",
        ),
        Panel(
            "Workers",
            "none",
            {"count(fastps_worker_steps_total)": "report", "sum(fastps_group_workers)": "in groups"},
        ),
        Panel(
            "Pushes and pulls",
            "ops",
            {rate("fastps_pushes_total"): "pushes", rate("fastps_pulls_total"): "pulls"},
        ),
        Panel(
            "Memory in use",
            "percentunit",
            {"fastps_memory_used_bytes / fastps_memory_limit_bytes": "shard {{shard}}"},
            "From 90 % on add shards, or raise --memory-limit.",
        ),
    ],
    "Workers": [
        Panel("Steps", "ops", {rate("fastps_worker_steps_total", "worker"): "{{worker}}"}),
        Panel(
            "Time of a step",
            "s",
            {"fastps_worker_step_seconds": "{{worker}}"},
            "A worker that takes three times as long as the median is slow.",
        ),
        Panel("Loss", "none", {"fastps_worker_loss": "{{worker}}"}),
        Panel("Share of time spent waiting", "percentunit", {"fastps_worker_waited_ratio": "{{worker}}"}),
        Panel("Staleness of a worker (p99)", "none", {"fastps_worker_staleness_p99": "{{worker}}"}),
        Panel(
            "Staleness of all pushes",
            "none",
            {
                quantile(0.5, "fastps_push_staleness_bucket"): "p50",
                quantile(0.99, "fastps_push_staleness_bucket"): "p99",
            },
            "In changes by others, per slice.",
        ),
        Panel(
            "Stale gradients",
            "ops",
            {
                rate("fastps_gradients_scaled_total"): "scaled",
                rate("fastps_gradients_stale_total"): "refused",
                rate("fastps_gradients_late_total"): "late for their version",
            },
        ),
        Panel(
            "Workers at different clocks",
            "none",
            {"fastps_group_clock_fastest - fastps_group_clock_slowest": "{{group}}"},
        ),
    ],
    "Shards": [
        Panel(
            "Time to an answer (p99)",
            "s",
            {quantile(0.99, 'fastps_answer_seconds_bucket{kind=~"gradient|pull"}', "le, kind"): "{{kind}}"},
            "With Sync and Bounded it includes the wait for other workers.",
        ),
        Panel(
            "Bytes",
            "Bps",
            {
                rate("fastps_received_bytes_total", "codec, transport"): "received: {{codec}}, {{transport}}",
                rate("fastps_sent_bytes_total", "codec, transport"): "sent: {{codec}}, {{transport}}",
            },
        ),
        Panel("Refusals", "ops", {rate("fastps_refusals_total", "reason"): "{{reason}}"}),
        Panel("Memory by purpose", "bytes", {"sum by (kind) (fastps_memory_bytes)": "{{kind}}"}),
        Panel(
            "Clients",
            "none",
            {
                "fastps_sessions": "sessions at shard {{shard}}",
                "fastps_connections": "connections of shard {{shard}}",
            },
        ),
        Panel("Sessions ended", "ops", {rate("fastps_sessions_ended_total", "reason"): "{{reason}}"}),
        Panel(
            "Processor time of a server",
            "percentunit",
            {'rate(process_cpu_seconds_total{job="fastps"}[$__rate_interval])': "{{instance}}"},
            "100 % are one core.",
        ),
        Panel(
            "File descriptors in use",
            "percentunit",
            {'process_open_fds{job="fastps"} / process_max_fds{job="fastps"}': "{{instance}}"},
            "Without one a server refuses connections.",
        ),
    ],
    "Durability": [
        Panel(
            "Age of the newest snapshot",
            "s",
            {"time() - fastps_snapshot_timestamp_seconds": "shard {{shard}}"},
        ),
        Panel("Age of the newest copy", "s", {"time() - fastps_copy_timestamp_seconds": "shard {{shard}}"}),
        Panel("Changes that are not durable yet", "bytes", {"fastps_log_pending_bytes": "shard {{shard}}"}),
        Panel(
            "Failures",
            "none",
            {
                "fastps_log_broken": "log of shard {{shard}} is broken",
                "fastps_snapshots_failed_total": "snapshots of shard {{shard}}",
                "fastps_copies_failed_total": "copies of shard {{shard}}",
            },
            "The log of the server has the reason, such as a full disk.",
        ),
    ],
}


def build(panel: Panel) -> timeseries.Panel:
    """The panel for the SDK; the data source is chosen in the dashboard."""
    source = DataSourceRef(type_val="prometheus", uid="${datasource}")
    made = timeseries.Panel().title(panel.title).unit(panel.unit).span(6).height(7).datasource(source).min(0)
    if panel.description:
        made = made.description(panel.description)
    for ref, (expression, legend) in zip("ABCDEF", panel.queries.items(), strict=False):
        made = made.with_target(prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(ref))
    return made


def text() -> str:
    """The dashboard as JSON."""
    made = dashboard.Dashboard("fastps").uid("fastps").refresh("10s").time("now-30m", "now")
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    made = made.with_variable(source)
    for title, panels in ROWS.items():
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(build(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "grafana.json").write_text(text())
