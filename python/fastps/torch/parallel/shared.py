"""Parameters that several parts share: the lowest part has the values, and gets the sum of the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastps.torch.parallel.links.mailbox import Key, Mailbox
from fastps.torch.parallel.links.messages import Kind, Message
from fastps.torch.parallel.modules import Modules
from fastps.torch.parallel.plan import Plan

__all__ = ["Shared"]


class Shared:
    """The shared parameters of some parts.

    Args:
        plan: The plan.
        parts: The parts: one, or all.
        modules: Their modules.
        mailbox: Of the part, unless it is all.
    """

    def __init__(self, plan: Plan, parts: Sequence[int], modules: Modules, mailbox: Mailbox | None) -> None:
        self._keys, self._count = list(plan.shared().items()), plan.parts
        self._parts, self._modules, self._mailbox = parts, modules, mailbox

    def spread(self, call: int, step: int) -> None:
        """Gives the lowest part's values to the others."""
        for number, (key, (lowest, *others)) in enumerate(self._keys):
            if lowest in self._parts:
                for k, param in enumerate(self._of(lowest, key)):
                    for part in others:
                        if part in self._parts:
                            _copy(self._of(part, key)[k], param)
                        else:
                            self._send(
                                Message(Kind.PARAMETER, number, call, step, k, tensor=param.detach()), part
                            )
                continue
            for part in set(others) & set(self._parts):
                for k, param in enumerate(self._of(part, key)):
                    what = f'the values of the shared parameters "{key}"'
                    values = self._wait((call, Kind.PARAMETER, number, k), lowest, what, step)
                    assert values is not None
                    _copy(param, values)

    def collect(self, call: int, step: int) -> None:
        """Sums the gradients on the lowest part, in the order of parts; the others have none after it."""
        kind = Kind.PARAMETER_GRADIENT
        for number, (key, (lowest, *others)) in enumerate(self._keys):
            for part in others:
                if part in self._parts:
                    for k, param in enumerate(self._of(part, key)):
                        if lowest in self._parts:
                            _add(self._of(lowest, key)[k], param.grad)
                        else:
                            at = k * self._count + part
                            self._send(Message(kind, number, call, step, at, tensor=_dense(param)), lowest)
                        param.grad = None
                elif lowest in self._parts:
                    for k, param in enumerate(self._of(lowest, key)):
                        what = f'the gradients of the shared parameters "{key}"'
                        at = k * self._count + part
                        _add(param, self._wait((call, kind, number, at), part, what, step))

    def _of(self, part: int, key: str) -> list[torch.nn.Parameter]:
        return self._modules.shared(part, key)

    def _send(self, message: Message, part: int) -> None:
        assert self._mailbox is not None
        self._mailbox.tell(message, [part])

    def _wait(self, key: Key, source: int, what: str, step: int) -> torch.Tensor | None:
        assert self._mailbox is not None
        return self._mailbox.wait(key, source, what, step).tensor


def _dense(param: torch.nn.Parameter) -> torch.Tensor | None:
    grad = param.grad
    return grad.to_dense() if grad is not None and grad.layout != torch.strided else grad


@torch.no_grad()
def _copy(param: torch.nn.Parameter, values: torch.Tensor) -> None:
    param.copy_(values)


def _add(param: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        gradient = gradient.to(param.device)
        param.grad = gradient if param.grad is None else param.grad + gradient
