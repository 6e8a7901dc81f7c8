"""``fastps run kill RANK``: asks a launcher of this user on this machine to kill one of its workers."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from fastps._shared.process import EXIT_OK, CommandError

__all__ = ["Door", "kill"]

#: Beginning of the answer after a kill.
DONE = "killed"
#: Seconds to wait for a launcher's answer, and for the question of one who asks.
_PATIENCE, _QUESTION = 30.0, 1.0


def _folder() -> Path:
    """The folder of this user's launchers, each of which has a socket there."""
    folder = Path(tempfile.gettempdir(), f"fastps-run-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise CommandError(f"{folder} belongs to another user: set TMPDIR to another folder")
    return folder


class Door:
    """The socket of a launcher. Without a folder for it, nobody can ask."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._path: Path | None = None
        with contextlib.suppress(OSError, CommandError):
            path = _folder() / f"{os.getpid()}.sock"
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))
            self._path = path
            self._socket.listen()
            self._socket.setblocking(False)

    def answer(self, to_kill: Callable[[int], str]) -> None:
        """Answers those who have asked: `to_kill` takes a rank, and says what became of it."""
        while self._path is not None:
            try:
                asker, _ = self._socket.accept()
            except OSError:
                return
            with asker, contextlib.suppress(OSError, ValueError):
                asker.settimeout(_QUESTION)
                asker.sendall(to_kill(int(asker.recv(32))).encode())

    def close(self) -> None:
        """Removes the socket, and the folder of the last launcher."""
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # that of other launchers is not empty
                self._path.parent.rmdir()


def kill(words: list[str]) -> int:
    """Kills the worker of a rank; `words`: the rank, and the launcher's process if there are several."""
    if not 1 <= len(words) <= 2 or not all(word.isdecimal() for word in words):
        got = " ".join(words) or "none"
        raise CommandError(
            f"fastps run kill takes a rank, and the launcher's process if several run; got {got}"
        )
    with contextlib.ExitStack() as stack:
        launchers = {}
        for path in sorted(_folder().glob("*.sock")):
            asked = stack.enter_context(socket.socket(socket.AF_UNIX))
            asked.settimeout(_PATIENCE)
            try:
                asked.connect(str(path))
            except OSError:  # of a launcher that was killed
                path.unlink(missing_ok=True)
            else:
                launchers[path.stem] = asked
        of = launchers if len(words) == 1 else {pid: one for pid, one in launchers.items() if pid == words[1]}
        if not of:
            raise CommandError(
                f"no fastps run {' '.join(words[1:])} of this user is on this machine".replace("  ", " ")
            )
        if len(of) > 1:
            raise CommandError(
                f"several fastps run: give one of {', '.join(of)}, as in fastps run kill {words[0]} {min(of)}"
            )
        (launcher,) = of.values()
        launcher.sendall(words[0].encode())
        said = launcher.recv(1024).decode()
    if not said.startswith(DONE):
        raise CommandError(said or "the launcher has ended")
    print(said)
    return EXIT_OK
