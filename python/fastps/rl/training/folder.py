"""The folder of a run: its last and its best policy, and what a later run needs to continue the training."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fastps import checkpoint
from fastps._shared import tensor_file
from fastps._shared.kept import RETURNS, ROLLOUTS, SETTINGS
from fastps._shared.types import File
from fastps.errors import ConfigError, DamagedFileError
from fastps.parameter_server import ParameterServer
from fastps.rl import settings
from fastps.rl.learner import FRAMES, Task, observations_of
from fastps.rl.policy import Policy, Saved, read
from fastps.rl.totals import Totals

__all__ = ["Folder"]

#: Settings that a run which continues another one cannot change.
_SAME = ("algorithm", "environment", "model", "normalize")


class Folder:
    """Files of a run, each complete or not there.

    Args:
        path: The folder; `begin` creates it.
        resume: Continue the training that it has; else `begin` deletes its policies.

    Attributes:
        best: The path of the policy with the best evaluation.
        saved: The saved run to continue; None: a new one.

    Raises:
        ConfigError: There is nothing to continue.
        DamagedFileError: A file is not whole, or not what was written.
        ImportError: The package ``safetensors`` is not installed.
        OSError: A file cannot be read.
    """

    def __init__(self, path: File, resume: bool) -> None:
        tensor_file.library()
        self._path = folder = Path(path)
        self._last, self.best = folder / "model.safetensors", folder / "best.safetensors"
        self._training = folder / "training.safetensors"
        self.saved: Saved | None = None
        if resume:
            for needed in (self._last, self._training):
                if not needed.exists():
                    raise ConfigError(
                        f"there is no training to resume in {folder}", expected=needed.name, got="none"
                    )
            self.saved = read(self._last)
            self._arrays = checkpoint.arrays(self._training)  # verifies it

    def check(self, task: Task) -> None:
        """Raises `ConfigError` unless the task can continue the run that was saved."""
        if self.saved is None:
            return
        there, own = ({key: of.get(key) for key in _SAME} for of in (self.saved.settings, task.settings()))
        if there != own:
            raise settings.disagreement("a run continues one with the same settings", there, own)

    def begin(self, ps: ParameterServer, task: Task) -> None:
        """Deletes what a new run replaces, or gives the state of an earlier run to its registered tensors."""
        if self.saved is None:
            self._path.mkdir(parents=True, exist_ok=True)
            for old in (self._last, self.best, self._training):
                old.unlink(missing_ok=True)
            return
        there = self._arrays.get(SETTINGS)
        same = there is not None and settings.parsed(there) == settings.present(ps)
        # Returns of an unfinished version are those of its noise; so are rollouts.
        left = {SETTINGS} if same else {SETTINGS, RETURNS, ROLLOUTS}
        checkpoint.load(ps, self._training, names=self._arrays.keys() - left)
        Totals(ps, FRAMES, 1).add((self.saved.frames,))
        normalizer = observations_of(ps, task)
        if normalizer is not None and self.saved.moments is not None:
            normalizer.restore(self.saved.moments)

    def save(self, ps: ParameterServer, task: Task, policy: Policy) -> None:
        """Replaces the last policy and the state of the training."""
        policy.save(self._last)
        checkpoint.save(ps, self._training, [*task.tensors(), *task.algorithm.kept, SETTINGS])

    def best_so_far(self) -> tuple[float, int]:
        """Mean return and number of episodes of the best policy's evaluation."""
        with contextlib.suppress(FileNotFoundError, DamagedFileError):
            best = read(self.best)
            if best.mean_return is not None:
                return best.mean_return, best.episodes
        return float("-inf"), 0

    def clean(self) -> None:
        """Deletes what a process left that was killed while it wrote."""
        for path in (self._last, self.best, self._training):
            Path(f"{path}.tmp").unlink(missing_ok=True)
