"""A server process with a web listener."""

from __future__ import annotations

import http.client
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families as prometheus

FASTPS = [sys.executable, "-m", "fastps"]


class Served:
    """A process of ``fastps serve`` with a web listener.

    Args:
        options: More options of the command.
        listen, web: Where it listens.
        log: File for its standard error; None: that of the tests.

    Attributes:
        scheme, port: Of the web listener.
        addresses: Of the shards.
    """

    def __init__(
        self,
        *options: str,
        listen: str = "127.0.0.1:0",
        web: str = "127.0.0.1:0",
        log: Path | None = None,
    ) -> None:
        command = [*FASTPS, "serve", "--listen", listen, "--web", web, *options]
        errors = log.open("w") if log else None
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ
        )
        if errors:
            errors.close()
        assert self.process.stdout is not None
        self.addresses: list[str] = []
        for line in self.process.stdout:
            if found := re.search(r"shard \d+ listening on (\S+)", line):
                self.addresses.append(found[1])
            elif found := re.search(r"at (https?)://[\d.]+:(\d+)$", line):
                self.scheme, self.port = found[1], int(found[2])
                break

    def ask(
        self,
        path: str,
        method: str = "GET",
        host: str | None = None,
        tls: ssl.SSLContext | None = None,
        **headers: str,
    ) -> tuple[int, str, http.client.HTTPMessage]:
        own = "127.0.0.1", self.port
        if tls is None:
            connection = http.client.HTTPConnection(*own, timeout=60)
        else:
            connection = http.client.HTTPSConnection(*own, timeout=60, context=tls)
        with closing(connection):
            connection.putrequest(method, path, skip_host=True)
            connection.putheader("Host", f"127.0.0.1:{self.port}" if host is None else host)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers

    def get(self, path: str) -> str:
        status, body, _ = self.ask(path)
        assert status == 200, body
        return body


@contextmanager
def serving(*options: str, web: str = "127.0.0.1:0", log: Path | None = None) -> Iterator[Served]:
    served = Served(*options, web=web, log=log)
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
