"""The HTTP server: files of the page, a stream of frames, and the wishes of a visitor. Loopback only.

A file needs no token: all visitors get equal ones. The stream and every wish need the token of the link, so
no other user and no other page of the browser can reach the workers.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import queue
import secrets
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fastps_lab.live.errors import LiveError, RefusedError
from fastps_lab.live.export import KINDS, page_files
from fastps_lab.live.session import Session

__all__ = ["Site"]

POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'; style-src 'self'; "
    "img-src 'self' data:; font-src 'self'; worker-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)
TOKEN, TAB = "X-Fastps-Token", "X-Fastps-Tab"
#: Bytes of a wish.
MOST_BODY = 16_384
#: Seconds after which a connection that does not move is closed.
TIMEOUT = 30.0
#: Seconds between two signs of life on a stream.
BEAT = 5.0


class Site:
    """The server, on separate threads. It has its port from the start, and answers when it is opened.

    Args:
        port: 0: any free one.

    Attributes:
        link: Where the page is; the token is in its fragment, which browsers do not send.
    """

    def __init__(self, port: int) -> None:
        try:
            self._server = _Server(("127.0.0.1", port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            reason = "is in use" if error.errno == errno.EADDRINUSE else "may not be used"
            raise LiveError(f"--port {port}: the port {reason}; choose another one, or 0 for any") from None
        self._server.token = secrets.token_urlsafe(24)
        self._server.files = page_files()
        self._open = False
        self.link = f"http://127.0.0.1:{self._server.server_address[1]}/#token={self._server.token}"

    def open(self, session: Session) -> None:
        """Begins to answer."""
        self._server.session = session
        self._open = True
        threading.Thread(target=self._server.serve_forever, name="fastps-live-web", daemon=True).start()

    def close(self) -> None:
        """Closes the port."""
        if self._open:
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    session: Session
    token: str
    files: dict[str, bytes]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that goes away in the middle is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "fastps"
    sys_version = ""
    timeout = TIMEOUT

    def log_message(self, *_: Any) -> None:
        """Nothing: a line for each request tells a visitor nothing."""

    def do_GET(self) -> None:
        """A file, or the stream."""
        self._answer(self._stream if self.path == "/events" else self._file)

    def do_POST(self) -> None:
        """A wish."""
        self._answer(self._wish)

    def _answer(self, action: Any) -> None:
        try:
            self._check_address()
            action()
        except RefusedError as refusal:
            with contextlib.suppress(OSError):
                self._send(refusal.status, KINDS[".txt"], f"{refusal}\n".encode())
        except OSError:  # the page is gone
            self.close_connection = True

    def _check_address(self) -> None:
        """Refuses names that lead here by a trick of a foreign name server, and calls by other pages."""
        port = self.server.server_address[1]
        own = [f"127.0.0.1:{port}", f"localhost:{port}"]
        host, origin = self.headers.get("Host"), self.headers.get("Origin")
        if host not in own:
            raise RefusedError(403, f"foreign host: expected {own[0]}, got {host!r}")
        if origin is not None and origin != f"http://{host}":
            raise RefusedError(403, f"foreign origin: expected http://{host}, got {origin!r}")

    def _check_token(self) -> None:
        given = self.headers.get(TOKEN, "")
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            raise RefusedError(401, "wrong token: open the link that fastps-lab live has printed")

    def _send(self, status: int, kind: str, body: bytes = b"", length: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", POLICY)
        for name, value in (
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
            ("Connection", "close"),
        ):
            self.send_header(name, value)
        if length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/") or "index.html"
        body = self.server.files.get(path)
        if body is None:
            raise RefusedError(404, f"no such file: {path[:80]!r}")
        self._send(200, KINDS["." + path.rpartition(".")[2]], body)

    def _stream(self) -> None:
        """Frames, one JSON object a line, until the page goes away."""
        self._check_token()
        session = self.server.session
        listener = session.listen()
        try:
            self._send(200, "application/x-ndjson", length=False)
            while not self._is_gone():
                try:
                    line = listener.frames.get(timeout=BEAT)
                except queue.Empty:
                    line = b"\n"
                if line is None:
                    return
                self.wfile.write(line)
        finally:
            session.hub.leave(listener)

    def _is_gone(self) -> bool:
        """Returns whether the page has closed its end."""
        self.connection.setblocking(False)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        finally:
            self.connection.settimeout(TIMEOUT)

    def _wish(self) -> None:
        """``/set`` with all settings, or ``/act`` with ``{"what": ..., "number": ...}``; answers 204."""
        self._check_token()
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BODY:
            raise RefusedError(413, f"expected a body of at most {MOST_BODY} bytes, got {length[:20]!r}")
        try:
            given = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise RefusedError(400, "expected JSON, got something else") from None
        tab = self.headers.get(TAB, "")
        if not tab.isdecimal() or not self.server.session.hub.controls(int(tab)):
            raise RefusedError(409, "another page has the controls: this one watches")
        if not isinstance(given, dict):
            raise RefusedError(400, f"expected an object, got {type(given).__name__}")
        if self.path == "/set":
            self.server.session.set(given)
        elif self.path == "/act":
            what, number = given.get("what"), given.get("number", -1)
            if not isinstance(what, str) or not isinstance(number, int):
                raise RefusedError(400, 'expected {"what": text, "number": integer}, got something else')
            self.server.session.act(what, number)
        else:
            raise RefusedError(404, "no such call")
        self._send(204, KINDS[".txt"])
