"""Model parallelism: one model over several processes, and many such replicas over the servers."""

from fastps.torch.parallel.errors import NodeError
from fastps.torch.parallel.graph import Graph, Handle
from fastps.torch.parallel.optimizer import NoParameters
from fastps.torch.parallel.portions import ReplicaPortions
from fastps.torch.parallel.replica import Replica
from fastps.torch.parallel.synthetic.gradient import SyntheticGradient

__all__ = ["Graph", "Handle", "NoParameters", "NodeError", "Replica", "ReplicaPortions", "SyntheticGradient"]
