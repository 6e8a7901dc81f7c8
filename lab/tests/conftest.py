"""The fixtures of tests/, and its modules: the lab's tests are like those of the library."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
pytest.register_assert_rewrite("fixtures")

from fixtures import *  # noqa: E402, F403
