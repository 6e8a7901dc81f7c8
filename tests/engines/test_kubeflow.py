"""The runtime of `deploy/kubeflow`, against the CRDs that modules of Go carry, and run."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from manifests import VERSIONS, check_pod, needs_namespaces, of_guide
from pods import run_pods

from clients.toolchain import ROOT, go_environment, program_of_go

RUNTIME = ROOT / "deploy/kubeflow/runtime.yaml"


def strictly(schema: Any) -> Any:
    """A schema of a CRD that refuses unknown fields, which the API server would drop."""
    if isinstance(schema, list):
        return [strictly(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: strictly(one) for name, one in schema.items()}
    free = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and "properties" in schema and not free:
        strict["additionalProperties"] = False
    return strict


def schema_of(module: str, file: str, version: str) -> dict[str, Any]:
    """The schema of a CRD that a module of Go carries."""
    go = program_of_go("go")
    if go is None:
        pytest.skip("the CRDs come from modules of Go, and go was not found")
    command = [go, "mod", "download", "-json", module]
    done = subprocess.run(
        command, cwd=ROOT / "deploy", env=go_environment(), capture_output=True, text=True, timeout=100
    )
    if done.returncode:
        pytest.skip(f"the module {module} cannot be had: {done.stdout[-300:]}")
    text = (Path(json.loads(done.stdout)["Dir"]) / file).read_text()
    (found,) = [
        one for one in yaml.load(text, yaml.CSafeLoader)["spec"]["versions"] if one["name"] == version
    ]
    return strictly(found["schema"]["openAPIV3Schema"])


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
    """Workers find it by the name of its pod, which JobSet makes of the TrainJob's."""
    servers, workers = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = servers["template"]["spec"]["template"]["spec"]
    check_pod(template)
    (worker,) = workers["template"]["spec"]["template"]["spec"]["containers"]
    (addresses,) = [one["value"] for one in worker["env"] if one["name"] == "FASTPS_ADDRESSES"]
    args = [one.replace("$(TRAINJOB)", "mnist") for one in template["containers"][0]["args"]]
    pods = [{"args": args, "host": "mnist-server-0-0.mnist"}]
    said = run_pods(tmp_path, pods, addresses.replace("$(TRAINJOB)", "mnist"))
    assert "shard 0 is ready" in said


def test_the_runtime_has_the_version_of_the_server(runtime: dict[str, Any]) -> None:
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    server = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert server["containers"][0]["image"] == f"fastps-server:{version}"
