"""The protocol cannot break unnoticed: a committed image, lints, and a fresh reference of all messages."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from repository.protocol_page import ROOT, descriptors, page, roles

PROTOS = ROOT / "protos"
IMAGE = PROTOS / "image.binpb"


@pytest.fixture(scope="module")
def proto(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorProto:
    return descriptors(tmp_path_factory.mktemp("proto"))


def declared(file: descriptor_pb2.FileDescriptorProto) -> dict[str, tuple[object, ...]]:
    """What peers rely on: of each field, value and call its number and types."""
    found: dict[str, tuple[object, ...]] = {}
    for message in file.message_type:
        found[message.name] = ()
        for field in message.field:
            kind = (field.number, field.type, field.type_name, field.label, field.proto3_optional)
            found[f"{message.name}.{field.name}"] = kind
    for enum in file.enum_type:
        found |= {f"{enum.name}.{value.name}": (value.number,) for value in enum.value}
    for service in file.service:
        for call in service.method:
            ways = (call.client_streaming, call.server_streaming)
            found[f"{service.name}/{call.name}"] = (call.input_type, call.output_type, *ways)
    return found


def test_nothing_in_the_image_has_changed(proto: descriptor_pb2.FileDescriptorProto) -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString(IMAGE.read_bytes()).file
    (image,) = (file for file in files if file.name == proto.name)
    before, now = declared(image), declared(proto)
    assert {name: now.get(name) for name in before} == before, "this breaks clients of version 1"
    assert now.keys() == before.keys(), "new names: make protos-image"


def test_buf_finds_nothing_wrong() -> None:
    cache = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "go/bin"
    buf = shutil.which("buf", path=f"{os.environ['PATH']}:{cache}")
    if buf is None:
        pytest.skip("buf was not found; `make protos-image` builds it")
    for check in (["lint"], ["breaking", "--against", IMAGE]):
        done = subprocess.run([buf, *check], cwd=PROTOS, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_of_roles_is_fresh(proto: descriptor_pb2.FileDescriptorProto) -> None:
    guide = ROOT / "docs/how-to/security.md"
    text = guide.read_text()
    before, begin, rest = text.partition("<!-- generated: roles -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    assert begin
    assert end
    text = before + begin + roles(proto) + end + after
    if os.environ.get("FASTPS_REGENERATE"):
        guide.write_text(text)
    assert guide.read_text() == text


def test_the_reference_of_messages_is_fresh(proto: descriptor_pb2.FileDescriptorProto) -> None:
    reference, text = PROTOS / "REFERENCE.md", page(proto) + "\n"
    if os.environ.get("FASTPS_REGENERATE"):
        reference.write_text(text)
    assert reference.read_text() == text
