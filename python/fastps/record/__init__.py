"""Records of training: what each step did, written to files and TensorBoard, or shown as a line.

``on_step=fastps.record.to("jsonl:steps.jsonl", "tensorboard:runs/0")`` of `fastps.Worker`,
`fastps.torch.ParameterServerOptimizer` and `fastps.jax.Worker`.
"""

from fastps.record.live import Live, live
from fastps.record.targets import Recorder, to

__all__ = ["Live", "Recorder", "live", "to"]
