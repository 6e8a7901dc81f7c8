"""The runtime of `deploy/kubeflow`, against the CRDs that modules of Go carry, and run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from manifests import VERSIONS, check_pod, needs_namespaces, of_guide, schema_of, secrets
from pods import run_pods

from clients.toolchain import ROOT

RUNTIME = ROOT / "deploy/kubeflow/runtime.yaml"


@pytest.fixture
def runtime() -> dict[str, Any]:
    return yaml.safe_load(RUNTIME.read_text())


def test_kubeflow_takes_the_runtime(runtime: dict[str, Any]) -> None:
    """As a runtime, as a JobSet, and as jobs of Kubernetes."""
    folder = "manifests/base/crds/trainer.kubeflow.org_"
    module = "github.com/kubeflow/trainer/v2@v2.0.0"
    of_runtimes = schema_of(module, f"{folder}clustertrainingruntimes.yaml", "v1alpha1")
    jsonschema.Draft202012Validator(of_runtimes).validate(runtime)
    jsonschema.Draft202012Validator(schema_of(module, f"{folder}trainjobs.yaml", "v1alpha1")).validate(
        of_guide("TrainJob")
    )
    assert of_guide("TrainJob")["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    file = "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"
    spec = runtime["spec"]["template"]["spec"]
    jobs = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "job"},
        "spec": spec,
    }
    jsonschema.Draft202012Validator(schema_of("sigs.k8s.io/jobset@v0.8.0", file, "v1alpha2")).validate(jobs)
    assert [job["name"] for job in spec["replicatedJobs"]] == ["server", "node"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["node"], "servers do not end by themselves"
    spec["replicatedJobs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.Draft202012Validator(of_runtimes).validate(runtime)


def test_kubernetes_takes_the_jobs_of_the_runtime(runtime: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for replicated in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}}
        for version in VERSIONS:
            validate(job | {"spec": replicated["template"]["spec"]}, version, strict=True)


@needs_namespaces
def test_a_server_starts_with_the_arguments_of_the_runtime(runtime: dict[str, Any], tmp_path: Path) -> None:
    """Workers find it by the name of its pod, which JobSet makes of the TrainJob's, and show their token."""
    servers, workers = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = servers["template"]["spec"]["template"]["spec"]
    check_pod(template)
    (worker,) = workers["template"]["spec"]["template"]["spec"]["containers"]
    (addresses,) = [one["value"] for one in worker["env"] if one["name"] == "FASTPS_ADDRESSES"]
    args = [one.replace("$(TRAINJOB)", "mnist") for one in template["containers"][0]["args"]]
    assert "--insecure" not in args
    secret = secrets(tmp_path, "fastps")
    args = [re.sub("/secrets/(tls|tokens)", str(secret), one) for one in args]
    pods = [{"args": args, "host": "mnist-server-0-0.mnist"}]
    client = {"tls_ca": str(secret / "ca.crt"), "tls_server_name": "fastps"}
    client["token_file"] = str(secret / "worker.token")
    said = run_pods(tmp_path, pods, addresses.replace("$(TRAINJOB)", "mnist"), **client)
    assert "trained on 1 shards" in said


def test_the_runtime_has_the_version_of_the_server(runtime: dict[str, Any]) -> None:
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    server = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert server["containers"][0]["image"] == f"fastps-server:{version}"
