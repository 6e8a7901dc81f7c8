"""Groups of the tensors that fastps keeps beside a model: no optimizer trains them."""

from __future__ import annotations

__all__ = [
    "BUFFERS",
    "DIRECTION",
    "FRAMES",
    "HEADS",
    "NOTES",
    "OBSERVATIONS",
    "REPLAY",
    "RETURNS",
    "ROLLOUTS",
    "SETTINGS",
    "SPREAD",
    "is_kept",
]

#: Small tensors by which the workers of a run agree on something.
NOTES = "fastps"
#: Suffix of the group of a model's buffers, after the name of the parameters' group.
BUFFERS = ".buffers"
#: Tensors of reinforcement learning; each is the only tensor of its group, under the same name.
FRAMES, OBSERVATIONS, SETTINGS, RETURNS = "rl.frames", "rl.observations", "rl.settings", "es.returns"
#: Standard deviations of the cross-entropy method, for two versions of the model.
SPREAD = "cem.spread"
#: Of trust region policy optimization: the steps of a version, and the direction of the model's next one.
ROLLOUTS, DIRECTION = "trpo.rollouts", "trpo.direction"
#: The transitions of a global replay, and where each of its actors writes next.
REPLAY, HEADS = "rl.replay", "rl.replay.heads"


def is_kept(group: str) -> bool:
    """Returns whether a group's tensors are kept beside a model; the name of its run may precede it."""
    own = group.rpartition("/")[2]
    kept = (NOTES, FRAMES, OBSERVATIONS, SETTINGS, RETURNS, SPREAD, ROLLOUTS, DIRECTION, REPLAY, HEADS)
    return own.endswith(BUFFERS) or own in kept
