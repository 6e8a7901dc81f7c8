"""The protocol cannot break unnoticed: a committed image, lints, and a fresh reference of all messages."""

from __future__ import annotations

import json
import os
import re
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
    """The declarations that peers rely on: of each field, value and call its number and types."""
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


def sections() -> dict[str, str]:
    """The page of verbs, by their names."""
    parts = re.split(r"^## ", (PROTOS / "VERBS.md").read_text(), flags=re.MULTILINE)[1:]
    return {title: text for title, _, text in (part.partition("\n") for part in parts)}


def requests(file: descriptor_pb2.FileDescriptorProto) -> set[str]:
    """The kinds of frames that a client sends."""
    (k,) = (k for k, enum in enumerate(file.enum_type) if enum.name == "Kind")
    comments = {tuple(one.path): one.leading_comments for one in file.source_code_info.location}
    named = {value.name: comments[(5, k, 2, j)] for j, value in enumerate(file.enum_type[k].value)}
    return {name for name, text in named.items() if text.startswith(" Request:") and "(reserved" not in text}


def test_every_verb_has_a_section(proto: descriptor_pb2.FileDescriptorProto) -> None:
    pages = sections()
    assert pages.pop("Every verb")
    control, _ = proto.service
    calls = {call.name: (call.input_type, call.output_type) for call in control.method}
    assert pages.keys() == calls.keys() | requests(proto)
    for name, text in pages.items():
        parts = re.findall(r"^- \*\*(\w+)\*\*:", text, re.MULTILINE)
        assert parts == ["Messages", "Order", "Repeat", "Errors"], name
        first = re.search(r"\*\*Messages\*\*: (.*)", text)[1]
        for message in calls.get(name, (".fastps.v1.Frame",)):
            short = message.rpartition(".")[2]
            assert f"[{short}](REFERENCE.md#{short.lower()})" in first, name


def test_the_page_of_verbs_names_what_there_is(proto: descriptor_pb2.FileDescriptorProto) -> None:
    """Fields, values, calls, and kinds of refusals."""
    kinds = {one["refusal"]["kind"] for one in json.loads((ROOT / "tests/vectors/statuses.json").read_text())}
    parts = {part for name in declared(proto) for part in re.split("[./]", name)}
    said = set(re.findall(r"`([A-Za-z_]+)`", (PROTOS / "VERBS.md").read_text()))
    assert said - kinds - parts == {"connection"}, "the client's own kind"
    assert kinds - said == set(), "no verb has these refusals"
