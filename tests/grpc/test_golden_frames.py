"""Golden frames: their bytes are those of the fields beside them, and their payloads those of the codecs."""

from __future__ import annotations

import json
from pathlib import Path

import encoders
import numpy as np
from foreign_client import Stubs
from google.protobuf import json_format

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
FRAMES = json.loads((VECTORS / "frames.json").read_text())


def test_golden_frames_have_their_fields(stubs: Stubs) -> None:
    kinds = set()
    for golden in FRAMES:
        frame = json_format.ParseDict(golden["fields"], stubs.pb.Frame())
        raw = bytes.fromhex(golden["hex"])
        assert frame.SerializeToString(deterministic=True) == raw, golden["name"]
        assert stubs.pb.Frame.FromString(raw) == frame, golden["name"]
        assert json_format.MessageToDict(frame, preserving_proto_field_name=True) == golden["fields"]
        kinds.add(frame.header.kind)
        header = frame.header
        if header.kind == stubs.pb.KIND_GRADIENT and not header.parts and header.codec != encoders.FLOAT64:
            values = np.array([1, -2, 0.5, 0, -0.25], np.float32)
            assert frame.payload == encoders.encode(header.codec, values), golden["name"]
        if header.HasField("crc32c"):
            assert header.crc32c == encoders.crc32c(frame.payload), golden["name"]
    vectors = {"KIND_VECTOR", "KIND_PORTION", "KIND_SCALARS"}  # in vectors.hex
    reserved = {"KIND_UNSPECIFIED", "KIND_DELTA"}
    names = {stubs.pb.Kind.Name(kind) for kind in kinds}
    assert names == set(stubs.pb.Kind.keys()) - vectors - reserved
