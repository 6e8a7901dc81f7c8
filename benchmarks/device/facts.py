"""Facts about the machine, its GPU and the packages that the figures depend on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import fastps

PACKAGES = ("torch", "triton", "jax", "jaxlib", "numpy", "scipy", "scikit-learn", "pytest")


def facts() -> dict[str, Any]:
    """Card, driver, processor and versions; empty where something is absent."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    cpu = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.date.today().isoformat(),
        "card": card(),
        "cuda": torch.version.cuda,
        "processor": cpu.get("model name", platform.machine()),
        "family": f"family {cpu.get('cpu family', '?')} model {cpu.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "fastps": fastps.__version__,
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
    }


def card() -> dict[str, Any] | None:
    """The first GPU and its driver."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        driver = ""
    return {
        "name": found.name,
        "memory_gib": round(found.total_memory / 2**30),
        "capability": f"{found.major}.{found.minor}",
        "driver": driver.strip() or "unknown",
    }


def version_of(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
