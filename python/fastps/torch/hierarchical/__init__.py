"""All-reduce inside a machine, the parameter server between machines."""

from fastps.torch.hierarchical.optimizer import Hierarchical

__all__ = ["Hierarchical"]
