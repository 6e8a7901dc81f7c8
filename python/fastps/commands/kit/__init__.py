"""Parts that several commands share.

fastps-lab imports public names and this folder, which makes no promise to anyone else: the names below are
those of the library's private modules that its commands need.
"""

from fastps._fastps import VectorSpaces
from fastps._shared import tensor_file
from fastps._shared.checks import at_least
from fastps._shared.files import replaced
from fastps._shared.idioms.closing import Closing
from fastps._shared.process import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    CommandError,
    Interrupted,
    hold_on_to,
    run_as_init,
    signals_raise,
    watch_stdin,
)
from fastps._shared.stats import percentile
from fastps._shared.text import meant

__all__ = [
    "EXIT_FAILED",
    "EXIT_OK",
    "EXIT_USAGE",
    "Closing",
    "CommandError",
    "Interrupted",
    "VectorSpaces",
    "at_least",
    "hold_on_to",
    "meant",
    "percentile",
    "replaced",
    "run_as_init",
    "signals_raise",
    "tensor_file",
    "watch_stdin",
]
