"""Errors of a replica, which name part, node, message and step, and their encoding for other parts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from fastps.errors import (
    ConfigError,
    ConnectionLostError,
    DeadlineError,
    FastpsError,
    NonFiniteError,
)

__all__ = ["NodeError", "decode", "encode", "lost", "quoted"]


class NodeError(FastpsError):
    """A node of the graph failed. Every part of the replica raises this; the failed step counts nowhere.

    Attributes:
        part: The part that has the node.
        node: The node's name.

    On the part that has the node, the original exception is the ``__cause__``.

    >>> fastps.torch.parallel.NodeError("...", part=1, node="head").node
    'head'
    """

    part: int | None
    node: str | None

    def __init__(self, message: str = "", *, part: int | None = None, node: str | None = None) -> None:
        super().__init__(message)
        self.part = part
        self.node = node


_KINDS: dict[str, type[FastpsError]] = {
    kind.__name__: kind for kind in (ConfigError, ConnectionLostError, DeadlineError, NonFiniteError)
}


def encode(error: BaseException, part: int) -> torch.Tensor:
    """Encodes an error for the other parts; for them, an error from outside fastps means a part that left."""
    text: dict[str, Any] = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, NodeError):
        text |= {"part": error.part, "node": error.node}
    elif not isinstance(error, FastpsError):
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        text = {"kind": "ConnectionLostError", "text": f"part {part} has left the replica ({reason})"}
    return torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)


def decode(payload: torch.Tensor) -> FastpsError:
    """The error that `encode` wrote."""
    text = json.loads(bytes(payload.tolist()))
    if text["kind"] in _KINDS:
        return _KINDS[text["kind"]](text["text"])
    return NodeError(text["text"], part=text.get("part"), node=text.get("node"))


def lost(part: int, nodes: Iterable[str], waiting: str) -> ConnectionLostError:
    """The connection to a part is gone."""
    return ConnectionLostError(
        f"part {part} of the replica is gone (nodes {quoted(nodes)}): {waiting}; start the replica again"
    )


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
