"""A token file, and files with the tokens of its principals, written from the documents only."""

from __future__ import annotations

import hashlib
import secrets
import zlib
from pathlib import Path


def new_token() -> str:
    """256 random bits with the checksum."""
    body = f"fps_{secrets.token_hex(32)}"
    return f"{body}{zlib.crc32(body.encode()):08x}"


class Tokens:
    """The principals of a server: `file` has their hashes, and each has a file with its token."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: dict[str, str] = {}
        self.file = folder / "tokens"
        self.text: dict[str, str] = {}
        self._write()

    def add(self, name: str, role: str, scope: str = "*", *options: str) -> str:
        """Gives a principal a new token; the file with it, as `token_file` takes it."""
        self.text[name] = new_token()
        digest = hashlib.sha256(self.text[name].encode()).hexdigest()
        self._lines[name] = " ".join([name, role, scope, digest, *options])
        self._write()
        return self.write_secret(name, self.text[name])

    def write_secret(self, name: str, text: str) -> str:
        """A file that only its owner can read."""
        file = self._folder / f"{name}.token"
        file.touch(mode=0o600)
        file.write_text(f"{text}\n")
        return str(file)

    def revoke(self, name: str) -> None:
        """Removes the line of a principal."""
        del self._lines[name]
        self._write()

    def _write(self) -> None:
        new = self.file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text("".join(f"{line}\n" for line in self._lines.values()))
        new.rename(self.file)
