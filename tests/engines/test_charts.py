"""The Helm chart of `deploy/helm`, against Kubernetes' own schemas.

helm renders the chart; `make test-engines` builds it where it is not installed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from manifests import GUIDE, VERSIONS, check_pod, needs_namespaces, of_guide, of_kind, schema_of, secrets
from pods import run_pods

from clients.toolchain import GO_FOLDER, ROOT

CHART = ROOT / "deploy/helm/fastps"
TLS = {"tls": {"secret": "server"}}
MONITOR = {"interval": "15s", "tlsConfig": {"cert": {"secret": {"name": "reader", "key": "tls.crt"}}}}
VALUES: dict[str, dict[str, Any]] = {
    "insecure": {"insecure": True},
    "TLS": TLS | {"shards": 2, "web": {"enabled": True}, "tokens": {"secret": "principals"}},
    "mutual TLS": {"tls": {"secret": "server", "clientCertificates": True, "certificateRole": "server"}},
    "data volume": {
        "insecure": True,
        "data": {"enabled": True, "size": "100Gi", "storageClass": "fast"},
        "extraArgs": ["--copy-to=s3://models/run"],
        "extraEnv": [{"name": "AWS_REGION", "value": "eu-central-1"}],
        "serviceAccountName": "trainer",
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "podAnnotations": {"team": "models"},
    },
    "many shards": {"insecure": True, "shards": 12, "web": {"enabled": True}},
    "tokens": TLS | {"tokens": {"secret": "principals", "key": "all", "serverKey": "own"}},
    "monitored": TLS
    | {
        "tls": {"secret": "server", "clientCertificates": True},
        "web": {"enabled": True},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "endpoint": MONITOR},
        "networkPolicy": {"enabled": True, "monitoring": [{"namespaceSelector": {}}]},
        "roots": {"configMap": "cas", "key": "all.pem"},
        "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    },
}
#: Values that are refused, and what the message says.
REFUSED = (
    ({}, "set tls.secret, or insecure=true"),
    (TLS, "with TLS alone everyone in the network can read and change the parameters: set tokens.secret"),
    ({"insecure": True, "tokens": {"secret": "principals"}}, "tokens.secret needs tls.secret"),
    ({"insecure": True, "tls": {"clientCertificates": True}}, "tls.clientCertificates needs tls.secret"),
    ({"insecure": True, "serviceMonitor": {"enabled": True}}, "serviceMonitor.enabled needs web.enabled"),
    ({"insecure": True, "shard": 2}, "shard"),
    ({"insecure": True, "shards": 0}, "shards"),
    ({"insecure": True, "shards": "2"}, "shards"),
    ({"insecure": "yes"}, "insecure"),
    ({"insecure": True, "data": {"size": "many"}}, "size"),
    ({"insecure": True, "extraArgs": ["copy-to"]}, "extraArgs"),
    ({"insecure": True, "terminationGracePeriodSeconds": 1}, "terminationGracePeriodSeconds"),
)


def helm(folder: Path, command: list[str], values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm", path=f"{os.environ['PATH']}:{GO_FOLDER / 'bin'}")
    if program is None:
        pytest.skip("helm was not found; `make test-engines` builds it")
    file = folder / "values.json"
    file.write_text(json.dumps(values))
    folders = {f"HELM_{name}_HOME": str(folder / name) for name in ("CACHE", "CONFIG", "DATA")}
    options = [f"--values={file}", "--namespace=models", f"--kube-version={VERSIONS[0]}"]
    given = [program, *command, str(CHART), *options]
    return subprocess.run(given, capture_output=True, text=True, timeout=100, env=os.environ | folders)


def template(folder: Path, values: dict[str, Any], release: str = "fastps") -> list[dict[str, Any]]:
    """The objects that helm would create."""
    done = helm(folder, ["template", release], values)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one]


def pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (workload,) = of_kind(objects, "StatefulSet")
    return workload["spec"]["template"]["spec"]


def test_the_chart_has_what_each_value_set_asks_for(tmp_path: Path) -> None:
    for name, values in VALUES.items():
        done = helm(tmp_path, ["lint", "--strict"], values)
        assert done.returncode == 0, (name, done.stdout)
        objects = template(tmp_path, values)
        spec, shards = pod(objects), values.get("shards", 1)
        check_pod(spec)
        (server,) = spec["containers"]
        args, probe = server["args"], server["readinessProbe"]
        (workload,) = of_kind(objects, "StatefulSet")
        names = [f"fastps-{shard}" for shard in range(shards)]
        assert workload["spec"]["replicas"] == shards
        headless, *services = of_kind(objects, "Service")
        assert (headless["metadata"]["name"], headless["spec"]["clusterIP"]) == ("fastps", "None")
        assert workload["spec"]["serviceName"] == "fastps"
        assert [one["metadata"]["name"] for one in services] == names
        chosen = [one["spec"]["selector"]["statefulset.kubernetes.io/pod-name"] for one in services]
        assert chosen == names
        (addresses,) = of_kind(objects, "ConfigMap")
        cluster = ",".join(f"{one}.models.svc:7070" for one in names)
        assert addresses["data"] == {"FASTPS_ADDRESSES": cluster}
        assert f"--cluster={cluster}" in args
        (budget,) = of_kind(objects, "PodDisruptionBudget")
        labels = workload["spec"]["template"]["metadata"]["labels"].items()
        for selector in (budget["spec"]["selector"], workload["spec"]["selector"]):
            assert selector["matchLabels"].items() <= labels
        tls, web = "tls" in values, values.get("web", {}).get("enabled", False)
        assert ("grpc" in probe, "httpGet" in probe, "tcpSocket" in probe) == (
            not tls,
            tls and web,
            tls and not web,
        )
        assert ("--insecure" in args) == values.get("insecure", False)
        probes = [one["httpGet"] for one in (probe, server["livenessProbe"]) if "httpGet" in one]
        assert all(one.get("scheme", "HTTP") == ("HTTPS" if tls else "HTTP") for one in probes)
        assert len(probes) == (0 if not web else 2 if tls else 1)
        assert ("--tls-cert=/secrets/tls/tls.crt" in args) == tls
        mutual = name in ("mutual TLS", "monitored")
        assert ("--tls-ca=/secrets/tls/ca.crt" in args) == mutual
        role = values.get("tls", {}).get("certificateRole", "reader")
        assert (f"--certificate-role={role}" in args) == mutual
        assert ("--tokens=/secrets/tokens/tokens" in args) == (name == "TLS")
        assert ("--server-token-file=/secrets/tokens/server.token" in args) == (name == "TLS")
        assert ("--tokens=/secrets/tokens/all" in args) == (name == "tokens")
        assert ("--server-token-file=/secrets/tokens/own" in args) == (name == "tokens")
        mounts = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
        claims = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])]
        volumes = [volume["name"] for volume in spec.get("volumes", [])]
        assert sorted(mounts) == sorted(claims + volumes), "each mount has its volume"
        assert ("data" in claims) == (name == "data volume")


def test_kubernetes_takes_what_the_chart_renders(tmp_path: Path) -> None:
    """Strictly: also unknown fields are errors."""
    validate = pytest.importorskip("kubernetes_validate").validate
    for values in VALUES.values():
        for one in template(tmp_path, values):
            for version in VERSIONS if one["kind"] != "ServiceMonitor" else ():
                validate(one, version, strict=True)
    (workload,) = of_kind(template(tmp_path, VALUES["insecure"]), "StatefulSet")
    workload["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(jsonschema.ValidationError):
        validate(workload, VERSIONS[0], strict=True)
    validate(of_guide("Job"), VERSIONS[0], strict=True)


def test_the_chart_is_watched_and_closed_as_asked(tmp_path: Path) -> None:
    objects = template(tmp_path, VALUES["monitored"])
    (monitor,) = of_kind(objects, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["endpoints"]
    ca = {"secret": {"name": "server", "key": "ca.crt"}}
    tls = {"ca": ca, "serverName": "fastps-0.models.svc"} | MONITOR["tlsConfig"]
    assert endpoint == {"port": "web", "scheme": "https", "interval": "15s", "tlsConfig": tls}
    (policy,) = of_kind(objects, "NetworkPolicy")
    (workload,) = of_kind(objects, "StatefulSet")
    assert policy["spec"]["podSelector"] == workload["spec"]["selector"]
    clients, monitoring = policy["spec"]["ingress"]
    assert clients["ports"] == [{"port": "grpc"}]
    assert clients["from"] == [{"podSelector": workload["spec"]["selector"]}, {"podSelector": {}}]
    assert monitoring == {"ports": [{"port": "web"}], "from": [{"namespaceSelector": {}}]}
    plain = template(tmp_path, VALUES["many shards"] | {"networkPolicy": {"enabled": True}})
    (policy,) = of_kind(plain, "NetworkPolicy")
    assert len(policy["spec"]["ingress"]) == 1, "without peers nobody reaches the port"
    (server,) = pod(objects)["containers"]
    assert {"name": "SSL_CERT_FILE", "value": "/roots/all.pem"} in server["env"]
    assert {"name": "roots", "configMap": {"name": "cas"}} in pod(objects)["volumes"]
    file = "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml"
    schema = schema_of("github.com/prometheus-operator/prometheus-operator@v0.85.0", file, "v1")
    jsonschema.Draft202012Validator(schema).validate(monitor)


def test_wrong_values_are_refused(tmp_path: Path) -> None:
    for values, message in REFUSED:
        done = helm(tmp_path, ["template", "fastps"], values)
        assert done.returncode, values
        assert message in done.stderr, (values, done.stderr)


def test_the_guide_s_lines_install_the_chart(tmp_path: Path) -> None:
    (line,) = re.findall(r"^\$ helm install ((?:.*\\\n)*.*)", GUIDE, re.MULTILINE)
    release, _, *options = shlex.split(line.replace("\\\n", " "))
    objects = list(
        yaml.load_all(helm(tmp_path, ["template", release, *options], {}).stdout, yaml.CSafeLoader)
    )
    (workload,) = of_kind(objects, "StatefulSet")
    assert workload["spec"]["replicas"] == 4
    (worker,) = of_guide("Job")["spec"]["template"]["spec"]["containers"]
    (addresses,) = of_kind(objects, "ConfigMap")
    assert worker["envFrom"] == [{"configMapRef": {"name": addresses["metadata"]["name"]}}]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert values.keys() == schema.keys() - {"global"}
    assert [name for name in values if f"`{name}" not in GUIDE] == []


def test_names_come_from_the_release(tmp_path: Path) -> None:
    for release, name in (("fastps", "fastps"), ("my-fastps", "my-fastps"), ("run-1", "run-1-fastps")):
        (workload,) = of_kind(template(tmp_path, VALUES["insecure"], release), "StatefulSet")
        assert workload["metadata"]["name"] == name
    objects = template(tmp_path, VALUES["many shards"], "r" * 53)
    assert max(len(one["metadata"]["name"]) for one in of_kind(objects, "Service")) <= 63


@needs_namespaces
def test_servers_start_with_the_arguments_of_the_pods(tmp_path: Path) -> None:
    """With the names of the services, plain and with a certificate that shards and clients share."""
    secret = secrets(tmp_path, "*.models.svc")
    own = {f"tls_{name}": str(secret / file) for name, file in (("cert", "tls.crt"), ("key", "tls.key"))}
    authorities = {"tls_ca": str(secret / "ca.crt")}
    token = {"token_file": str(secret / "worker.token")}
    for name, client in (("insecure", {}), ("TLS", authorities | token), ("mutual TLS", authorities | own)):
        folder = tmp_path / name
        folder.mkdir()
        objects = template(tmp_path, VALUES[name] | {"shards": 2})
        (server,) = pod(objects)["containers"]
        (addresses,) = of_kind(objects, "ConfigMap")
        pods = []
        for shard in range(2):
            text = json.dumps(server["args"]).replace("$(POD_NAME)", f"fastps-{shard}")
            args = json.loads(
                text.replace("/secrets/tls", str(secret)).replace("/secrets/tokens", str(secret))
            )
            pods.append({"args": args, "host": f"fastps-{shard}.models.svc"})
        said = run_pods(folder, pods, addresses["data"]["FASTPS_ADDRESSES"], **client)
        assert "trained on 2 shards" in said


def test_the_chart_has_the_version_of_the_server() -> None:
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
