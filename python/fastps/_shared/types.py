"""Types that several modules use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: A NumPy array of float32; of a float64 tensor, of float64, which static types do not tell.
Array: TypeAlias = NDArray[np.float32]

#: The path of a file.
File: TypeAlias = str | os.PathLike[str]

#: Learning rates that replace the optimizers': one rate, or rates by name; None leaves the optimizers'.
Rates: TypeAlias = float | Mapping[str, float] | None
