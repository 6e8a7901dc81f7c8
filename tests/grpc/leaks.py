"""Finds bytes or numbers that must stay secret in files and messages, in any encoding."""

from __future__ import annotations

import base64


def tells_bytes(data: bytes, value: bytes) -> bool:
    """Raw, in hex or base64, or as JSON's array of numbers."""
    numbers = ",".join(str(byte) for byte in value).encode()
    encoded = [base64.b64encode(value), base64.urlsafe_b64encode(value)]
    texts = [value.hex().encode(), *(text.rstrip(b"=") for text in encoded)]
    return any(form in data for form in (value, *texts)) or numbers in b"".join(data.split())


def tells_number(data: bytes, value: int) -> bool:
    """As a field of a protobuf message (fixed64, varint, zigzag varint), big-endian, in decimal or hex."""
    fixed = [value.to_bytes(8, "little"), value.to_bytes(8, "big")]
    texts = [b"%d" % value, b"%x" % value]
    return any(form in data for form in (*fixed, varint(value), varint(zigzag(value)), *texts))


def zigzag(value: int) -> int:
    """Of the 64 bits as a signed number."""
    signed = value - (value >> 63 << 64)
    return (signed << 1 ^ signed >> 63) & (1 << 64) - 1


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
