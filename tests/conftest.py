"""The fixtures of all tests. They are in `fixtures.py`, so that those of lab/tests have them, too."""

import pytest

pytest.register_assert_rewrite("fixtures")

from fixtures import *  # noqa: E402, F403
