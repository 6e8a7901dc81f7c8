"""Old spellings still work, and warn with the new one."""

import importlib

import pytest

#: Each module, its old names and the new ones.
NAMES = {
    "fastps.simulate": {"Happened": "EventRecord", "StandstillError": "DeadlockError"},
}


@pytest.mark.parametrize("module", NAMES)
def test_old_names_are_the_new_ones(module):
    part = pytest.importorskip(module)
    for old, new in NAMES[module].items():
        with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is deprecated; use {module}\.{new}$"):
            assert getattr(part, old) is getattr(part, new)
        assert old not in part.__all__
    with pytest.raises(AttributeError, match="has no attribute 'none'"):
        importlib.import_module(module).none  # noqa: B018
