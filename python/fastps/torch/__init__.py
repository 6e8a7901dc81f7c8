"""PyTorch: an optimizer whose parameters, state and steps live in a parameter server; ways there and back."""

from fastps.torch.distributed import load_distributed, save_distributed
from fastps.torch.optimizer import ParameterServerOptimizer
from fastps.torch.resume import resume, save
from fastps.torch.state import from_store, to_store

__all__ = [
    "ParameterServerOptimizer",
    "from_store",
    "load_distributed",
    "resume",
    "save",
    "save_distributed",
    "to_store",
]
