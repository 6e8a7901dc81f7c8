"""How torch's kernels round on this CPU: whether results can have its bits."""

from __future__ import annotations

import torch


def fuses(dtype: torch.dtype = torch.float32) -> bool:
    """Returns whether torch rounds a product and a sum once, as fastps does on every CPU.

    Its kernels for AVX2 and for wider instruction sets do. Those for other x86 CPUs, which
    ``ATEN_CPU_CAPABILITY=default`` chooses, round twice.
    """
    eps = torch.finfo(dtype).eps
    factors = torch.full((67,), 1 + eps, dtype=dtype)  # also the rest of a vector
    # (1 + eps)² - (1 + 2 eps) is eps², which the product has lost if it was rounded separately.
    found = torch.full((67,), -(1 + 2 * eps), dtype=dtype).add_(factors, alpha=1 + eps)
    return bool((found == eps**2).all())
