"""Types shared by the face's modules."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: A float32 NumPy array.
Array: TypeAlias = NDArray[np.float32]
