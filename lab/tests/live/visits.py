"""A running `fastps-lab live`, as tests see it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LATE = 60.0
#: The same in milliseconds, for what a browser does.
LATE_PAGE = 60_000


def until(true: Callable[[], Any], late: float = LATE) -> Any:
    """Waits until something is true; returns it."""
    end = time.monotonic() + late
    while not (result := true()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return result


def frame_with(frame: Callable[[], dict[str, Any]], true: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The next frame of which something is true."""
    end = time.monotonic() + LATE
    while not true(found := frame()):
        assert time.monotonic() < end
    return found


class Served:
    """A ``fastps-lab live`` without a browser.

    Attributes:
        link: The link that it has printed.
        tab: The number of the page in whose name it makes wishes.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        environment = {**os.environ, "TMPDIR": str(folder), "LIVE_TEST_MARK": str(folder)}
        command = [sys.executable, "-m", "fastps_lab", "live", "--no-browser", *options]
        self.folder = folder
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.link = self.process.stdout.readline().strip()
        address, _, self.token = self.link.removeprefix("http://").partition("/#token=")
        self.port = int(address.rpartition(":")[2])
        self.tab = 0

    def call(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Status, text and headers of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LATE)
        own = {"X-Fastps-Token": self.token, "X-Fastps-Tab": str(self.tab)}
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        with contextlib.closing(connection):
            connection.request(method, path, data, {**own, **given})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers

    @contextlib.contextmanager
    def listen(self) -> Iterator[Callable[[], dict[str, Any]]]:
        """Opens the stream; yields the function that reads the next frame."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LATE)
        with contextlib.closing(connection):
            connection.request("GET", "/events", headers={"X-Fastps-Token": self.token})
            answer = connection.getresponse()
            assert answer.status == 200

            def frame() -> dict[str, Any]:
                while not (line := answer.readline().strip()):
                    pass
                return json.loads(line)

            yield frame

    def take_controls(self, frame: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Makes wishes in the name of this page, as soon as others are gone; its first frame."""
        first = now = frame()
        self.tab = first["you"]
        while now["control"] != self.tab:
            now = frame()
        return first

    def processes(self) -> list[int]:
        """Its processes that live (Linux)."""
        mark = f"LIVE_TEST_MARK={self.folder}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def end(self, signum: int) -> tuple[int, str]:
        """Exit code and standard error after a signal."""
        self.process.send_signal(signum)
        _, errors = self.process.communicate(timeout=LATE)
        return self.process.returncode, errors

    def close(self) -> None:
        """Ends it, whatever happened."""
        self.process.kill()
        self.process.communicate()


class Page:
    """A tab, and what went wrong in it."""

    def __init__(self, context: Any, base: str) -> None:
        self.tab = context.new_page()
        self.base = base
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)

    def open(self, fragment: str) -> None:
        """Loads the page, and unfolds all controls of the laboratory."""
        self.tab.goto("about:blank")
        self.tab.goto(f"{self.base}#{fragment}")
        self.tab.wait_for_selector("#page:not([hidden]) #panel > *", timeout=LATE_PAGE)
        self.tab.evaluate("document.querySelectorAll('.group').forEach((group) => { group.open = true; })")
        self.settle()

    def go(self, fragment: str) -> None:
        """Changes the address of the page that is loaded."""
        self.tab.evaluate("(fragment) => { location.hash = fragment; }", fragment)
        self.settle()
        self.settle()

    def settle(self) -> None:
        """Waits until the next pictures are drawn."""
        self.tab.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def text(self, selector: str) -> str:
        return self.tab.inner_text(selector)

    def cell(self, name: str) -> str:
        """A number of the strip."""
        return self.text(f"#strip div:has(dt:text-is('{name}')) dd")

    def table(self) -> str:
        """All numbers behind the figure."""
        self.tab.evaluate("document.getElementById('numbers').open = true")
        self.tab.wait_for_selector("#numbers table", state="attached", timeout=LATE_PAGE)
        self.settle()
        return self.text("#numbers")

    @property
    def fragment(self) -> str:
        return self.tab.url.partition("#")[2]


def faults(page: Page) -> list[str]:
    """What stands seriously in the way of people with other eyes or hands."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page.tab).response["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:150]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
