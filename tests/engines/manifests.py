"""Objects of Kubernetes: those of the guide, and what all pods have."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from clients.toolchain import ROOT, go_environment, program_of_go

GUIDE = (ROOT / "docs/how-to/kubernetes.md").read_text()
#: The oldest version of Kubernetes that the chart allows, and a new one.
VERSIONS = ("1.27", "1.34")

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and iproute2"
)


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def of_guide(kind: str) -> dict[str, Any]:
    """The object of this kind that the guide shows."""
    blocks = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL))
    (found,) = of_kind(list(blocks), kind)
    return found


def check_pod(spec: dict[str, Any]) -> None:
    """It has no rights, and writes to its volumes only."""
    (server,) = spec["containers"]
    assert spec["securityContext"]["runAsUser"] == 65532
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["terminationGracePeriodSeconds"] >= 30
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert server["resources"]["limits"]["memory"] == server["resources"]["requests"]["memory"]


def secrets(folder: Path, name: str) -> Path:
    """A folder with what secrets have: a certificate for this name, its CA, and tokens."""
    authority = trustme.CA()
    certificate = authority.issue_cert(name)
    secret = folder / "secret"
    secret.mkdir()
    certificate.cert_chain_pems[0].write_to_path(secret / "tls.crt")
    authority.cert_pem.write_to_path(secret / "tls.crt", append=True)
    authority.cert_pem.write_to_path(secret / "ca.crt")
    certificate.private_key_pem.write_to_path(secret / "tls.key")
    (secret / "tls.key").chmod(0o600)
    for role, token in (("server", "server.token"), ("worker", "worker.token")):
        command = [sys.executable, "-m", "fastps", "token", "new", str(secret / "tokens"), role]
        command += ["--role", role, "--out", str(secret / token)]
        subprocess.run(command, check=True, timeout=100)
    return secret


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
