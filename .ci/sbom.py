#!/usr/bin/env python3
"""Makes the bills of materials in the wheels of a folder repeatable, and writes each one beside its wheel.

maturin puts a bill (CycloneDX) into every wheel; it names the folder of the source and has a random number.
It also covers fastps-server, which a wheel contains. Usage: .ci/sbom.py FOLDER
"""

import base64
import hashlib
import json
import sys
import zipfile
from pathlib import Path

SOURCE = f"file://{Path.cwd()}"


def plain(bill: bytes) -> bytes:
    """The bill of a build in no folder."""
    content = json.loads(bill.replace(SOURCE.encode(), b"file:///fastps"))
    content.pop("serialNumber", None)
    return json.dumps(content, indent=2).encode()


def rewrite(wheel: Path) -> None:
    """Replaces the bill of a wheel, and its digest in RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        files = {member: archive.read(member) for member in archive.infolist()}
    (bill,) = (member for member in files if member.filename.endswith(".cyclonedx.json"))
    (record,) = (member for member in files if member.filename.endswith(".dist-info/RECORD"))
    files[bill] = plain(files[bill])
    digest = base64.urlsafe_b64encode(hashlib.sha256(files[bill]).digest()).rstrip(b"=").decode()
    line = f"{bill.filename},sha256={digest},{len(files[bill])}"
    lines = files[record].decode().splitlines()
    kept = [line if old.startswith(f"{bill.filename},") else old for old in lines]
    files[record] = ("\n".join(kept) + "\n").encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content, member.compress_type, 9)
    wheel.with_suffix(".cyclonedx.json").write_bytes(files[bill])


for wheel in Path(sys.argv[1]).glob("fastps-*.whl"):
    rewrite(wheel)
