"""Types shared by the face's modules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: A float32 NumPy array.
Array: TypeAlias = NDArray[np.float32]

#: Where a file is.
File: TypeAlias = str | os.PathLike[str]

#: Learning rates in place of the optimizers': one, or names to them; None: theirs.
Rates: TypeAlias = float | Mapping[str, float] | None
