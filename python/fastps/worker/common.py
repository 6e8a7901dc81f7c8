"""What the steps of all modes have in common."""

from __future__ import annotations

from typing import NamedTuple

from fastps import _fastps
from fastps._shared.types import Array
from fastps.worker.fetches import Fetches
from fastps.worker.pushes import Pushes
from fastps.worker.run.together import Together
from fastps.worker.tally import Tally

__all__ = ["Common"]


class Common(NamedTuple):
    """The parts of a worker that its steps use: its client, its arrays by name, and what moves them."""

    native: _fastps.Client
    params: dict[str, Array]
    pushes: Pushes
    fetches: Fetches
    together: Together
    tally: Tally
