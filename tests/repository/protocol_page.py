"""The reference of all messages, made from the comments of the proto."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

ROOT = Path(__file__).resolve().parents[2]
HEADER = """# Messages of version 1

Generated from [`fastps/v1/fastps.proto`](fastps/v1/fastps.proto). [README.md](README.md) has rules and bytes.
`FASTPS_REGENERATE=1 pytest tests/repository/test_protocol.py` writes this page.
"""
Field = descriptor_pb2.FieldDescriptorProto


def descriptors(folder: Path) -> descriptor_pb2.FileDescriptorProto:
    """The proto with its comments; `folder` is for a temporary file."""
    out = folder / "descriptors"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", "--include_source_info"]
    subprocess.run([*command, f"--descriptor_set_out={out}", "fastps/v1/fastps.proto"], check=True)
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def page(file: descriptor_pb2.FileDescriptorProto) -> str:
    """The page."""
    comments = {
        tuple(location.path): " ".join(location.leading_comments.split())
        for location in file.source_code_info.location
    }
    return HEADER + "\n".join([*services(file, comments), *enums(file, comments), *messages(file, comments)])


Comments = dict[tuple[int, ...], str]


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def link(name: str) -> str:
    short = name.rpartition(".")[2]
    return f"[{short}](#{short.lower()})"


def services(file: descriptor_pb2.FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for i, service in enumerate(file.service):
        yield f"\n## Service {service.name}\n\n{comments[(6, i)]}\n"
        yield "| call | least role | request | answer | |\n|---|---|---|---|---|"
        for j, method in enumerate(service.method):
            of = (
                "stream of " if method.client_streaming else "",
                "stream of " if method.server_streaming else "",
            )
            types = (of[0] + link(method.input_type), of[1] + link(method.output_type))
            role = least_role(method.options, file)
            yield f"| `{method.name}` | {role} | {types[0]} | {types[1]} | {cell(comments[(6, i, 2, j)])} |"


def least_role(options: Message, file: descriptor_pb2.FileDescriptorProto) -> str:
    """The role in the options of a call or a kind of frame; empty: none."""
    (roles,) = (enum for enum in file.enum_type if enum.name == "Role")
    names = {role.number: role.name.removeprefix("ROLE_").lower() for role in roles.value if role.number}
    extensions = {extension.number for extension in file.extension}
    numbers = [field.data for field in UnknownFieldSet(options) if field.field_number in extensions]
    return "".join(names.get(number, "") for number in numbers)


def roles(file: descriptor_pb2.FileDescriptorProto) -> str:
    """The table of roles: for each, the calls and frames that it is the least role of."""
    calls: dict[str, list[str]] = {}
    for service in file.service:
        for method in service.method:
            calls.setdefault(least_role(method.options, file), []).append(f"`{method.name}`")
    (kinds,) = (enum for enum in file.enum_type if enum.name == "Kind")
    for kind in kinds.value:
        role = least_role(kind.options, file)
        calls.setdefault(role, []).append(f"`{kind.name}`")
    (ranks,) = (enum for enum in file.enum_type if enum.name == "Role")
    lines = ["| role | its calls and frames, besides those of the roles above |", "|---|---|"]
    for rank in ranks.value[1:]:
        role = rank.name.removeprefix("ROLE_").lower()
        lines.append(f"| `{role}` | {', '.join(calls[role])} |")
    return "\n".join(lines) + "\n"


def enums(file: descriptor_pb2.FileDescriptorProto, comments: Comments) -> Iterator[str]:
    yield "\n## Enums"
    for i, enum in enumerate(file.enum_type):
        yield f"\n### {enum.name}\n\n{comments[(5, i)]}\n\n| number | name | |\n|---|---|---|"
        for j, value in enumerate(enum.value):
            role = least_role(value.options, file)
            text = comments[(5, i, 2, j)] + (f" Least role: {role}." if role else "")
            yield f"| {value.number} | `{value.name}` | {cell(text)} |"


def messages(file: descriptor_pb2.FileDescriptorProto, comments: Comments) -> Iterator[str]:
    yield "\n## Messages"
    for i, message in enumerate(file.message_type):
        yield f"\n### {message.name}\n\n{comments[(4, i)]}"
        if message.field:
            yield "\n| number | field | type | |\n|---|---|---|---|"
        for j, field in enumerate(message.field):
            text = cell(comments.get((4, i, 2, j), ""))
            yield f"| {field.number} | `{field.name}` | {kind(field, message)} | {text} |"


def kind(field: Field, message: descriptor_pb2.DescriptorProto) -> str:
    """The type of a field, as the proto has it."""
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith("." + nested.name):
            key, value = nested.field
            return f"map of {kind(key, message)} to {kind(value, message)}"
    scalar = Field.Type.Name(field.type).removeprefix("TYPE_").lower()
    plain = link(field.type_name) if field.type_name else scalar
    if field.label == Field.LABEL_REPEATED:
        return f"repeated {plain}"
    return f"optional {plain}" if field.proto3_optional else plain
