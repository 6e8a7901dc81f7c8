"""Checks of the optimizer's arguments."""

from __future__ import annotations

import torch

from fastps import optim
from fastps._shared.checks import invalid
from fastps.codecs import Codec
from fastps.modes import Async, Mode
from fastps.worker.arguments import check_codec, check_mode, like

__all__ = ["check_buffers", "check_optimizer", "mode_of"]


def check_optimizer(optimizer: object) -> None:
    """Raises unless it is an optimizer of fastps."""
    if not isinstance(optimizer, optim.Optimizer):
        kind = type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        raise invalid("optimizer", f"one such as {like(optim.Optimizer, kind, 'Adam')}", optimizer)


def mode_of(mode: Mode | None, codec: Codec | None, push_in_backward: bool) -> Mode:
    """The mode, or the default one; raises unless it goes with the other arguments."""
    mode = Async() if mode is None else mode
    check_mode(mode)
    if codec is not None:
        check_codec(codec)
    if push_in_backward and mode.after_warm_up.local_lr is not None:
        raise invalid("mode", "another mode than fastps.Local with push_in_backward", mode)
    return mode


def check_buffers(buffers: object, model: torch.nn.Module | None) -> None:
    """Raises unless it is a way to keep buffers, and there is a model if they are pushed."""
    if buffers not in (None, "average", "latest", "local"):
        raise invalid("buffers", "'average', 'latest', 'local' or None", buffers)
    if model is None and buffers in ("average", "latest"):
        raise invalid("model", f"the model whose buffers are pushed (buffers={buffers!r})", model)
