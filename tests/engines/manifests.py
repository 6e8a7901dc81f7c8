"""Objects of Kubernetes: those of the guide, and what all pods have."""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

import pytest
import yaml

from clients.toolchain import ROOT

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
