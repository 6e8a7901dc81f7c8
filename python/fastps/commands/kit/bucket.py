"""A stand-in for S3 in this process, by moto."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping

from fastps._shared.process import CommandError
from fastps.commands.kit.servers import free_ports

__all__ = ["bucket"]

#: Seconds in which the stand-in answers.
ANSWER_TIMEOUT = 60.0


@contextlib.contextmanager
def bucket(what: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """A bucket with conditional writes, which ends with the block.

    Args:
        what: What needs it, for the error.

    Yields:
        Its URL, and variables for the servers that use it.

    Raises:
        CommandError: moto is not installed.
    """
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        raise CommandError(
            f"{what} needs a bucket with conditional writes, which a folder has not, and the stand-in for "
            "S3 is not installed: pip install 'moto[server]'"
        )
    from moto.server import ThreadedMotoServer

    # It logs each request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    (port,) = free_ports(1)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        endpoint = f"http://127.0.0.1:{port}"
        _create(endpoint, "fastps")
        environment = {
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        yield "s3://fastps/run", environment
    finally:
        server.stop()


def _create(endpoint: str, name: str) -> None:
    from urllib.request import ProxyHandler, Request, build_opener

    request = Request(f"{endpoint}/{name}", method="PUT")
    build_opener(ProxyHandler({})).open(request, timeout=ANSWER_TIMEOUT).close()
