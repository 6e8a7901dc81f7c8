"""A server process with a web listener."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client.parser import text_string_to_metric_families as prometheus

FASTPS = [sys.executable, "-m", "fastps"]


class Served:
    """A process of ``fastps serve`` with a web listener."""

    def __init__(self, *options: str, listen: str = "127.0.0.1:0") -> None:
        command = [*FASTPS, "serve", "--listen", listen, "--web", "127.0.0.1:0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        assert self.process.stdout is not None
        self.addresses: list[str] = []
        for line in self.process.stdout:
            if found := re.search(r"shard \d+ listening on (\S+)", line):
                self.addresses.append(found[1])
            elif found := re.search(r"at http://127.0.0.1:(\d+)$", line):
                self.port = int(found[1])
                break

    def ask(
        self, path: str, method: str = "GET", host: str | None = None, **headers: str
    ) -> tuple[int, str, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", f"127.0.0.1:{self.port}" if host is None else host)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        found = answer.status, answer.read().decode(), answer.headers
        connection.close()
        return found

    def get(self, path: str) -> str:
        status, body, _ = self.ask(path)
        assert status == 200, body
        return body


@contextmanager
def serving(*options: str) -> Iterator[Served]:
    served = Served(*options)
    try:
        yield served
    finally:
        served.process.terminate()
        served.process.communicate(timeout=60)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in prometheus(text)
        for sample in family.samples
    }
