"""Pieces of a value: integers and slices of step 1, by dimension."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from fastps.errors import ConfigError

__all__ = ["Piece", "as_piece", "check_piece", "summed", "text_of"]

Piece: TypeAlias = tuple[int | slice, ...]


def as_piece(index: Any, node: str) -> Piece:
    """The index of a handle."""
    piece = index if isinstance(index, tuple) else (index,)
    for item in piece:
        bounds = (item.start, item.stop) if isinstance(item, slice) else (item,)
        whole = all(
            isinstance(b, int) and not isinstance(b, bool) for b in bounds if b is not None or item is None
        )
        if not whole or (isinstance(item, slice) and item.step not in (None, 1)):
            raise ConfigError(
                f'invalid piece of node "{node}"', expected="integers and slices of step 1", got=repr(item)
            )
    return piece


def text_of(piece: Piece) -> str:
    """Formats a piece like ``[:, -1:]``."""

    def bound(value: int | None) -> str:
        return "" if value is None else str(value)

    items = [f"{bound(i.start)}:{bound(i.stop)}" if isinstance(i, slice) else str(i) for i in piece]
    return f"[{', '.join(items)}]" if piece else ""


def check_piece(piece: Piece, value: torch.Tensor, name: str) -> None:
    """Raises `ConfigError` if a piece is not within a value; Python would cut slices short."""
    fits = len(piece) <= value.ndim
    for item, size in zip(piece, value.shape, strict=False):
        if isinstance(item, slice):
            fits &= all(bound is None or -size <= bound <= size for bound in (item.start, item.stop))
        else:
            fits &= -size <= item < size
    if not fits:
        shape = tuple(value.shape)
        raise ConfigError(
            f'piece out of range (node "{name}")',
            expected=f"a shape that has {text_of(piece)}",
            got=str(shape),
        )


def summed(
    gradients: Iterable[tuple[Piece, torch.Tensor | None]], value: torch.Tensor
) -> torch.Tensor | None:
    """The sum of gradients of pieces of a value, each at its place; None if there are none."""
    total: torch.Tensor | None = None
    for piece, gradient in gradients:
        if gradient is None:
            continue
        if not piece:
            total = gradient if total is None else total + gradient
        else:
            total = torch.zeros_like(value) if total is None else total.clone()
            total[piece] += gradient
    return total
