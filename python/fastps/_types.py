"""Types shared by the face's modules."""

from __future__ import annotations

import os
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: A float32 NumPy array.
Array: TypeAlias = NDArray[np.float32]

#: Where a file is.
File: TypeAlias = str | os.PathLike[str]
