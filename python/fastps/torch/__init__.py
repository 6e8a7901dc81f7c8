"""PyTorch: an optimizer whose parameters, state and steps live in a parameter server; ways there and back."""

from fastps.torch.distributed import load_distributed, save_distributed
from fastps.torch.objective import Objective
from fastps.torch.optimizer import ParameterServerOptimizer
from fastps.torch.state import from_store, to_store

__all__ = [
    "Objective",
    "ParameterServerOptimizer",
    "from_store",
    "load_distributed",
    "save_distributed",
    "to_store",
]
