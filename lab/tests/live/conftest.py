"""A running `fastps-lab live`, and a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from fastps_lab.live.export import one_file
from live.visits import Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One that several tests use."""
    live = Served(tmp_path_factory.mktemp("live"), "--workers", "3")
    yield live
    live.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is not installed (.ci/packages lists what .ci/run installs)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra test)")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the page in one file."""
    file = tmp_path_factory.mktemp("export") / "live.html"
    file.write_text(one_file())
    return file.as_uri()
