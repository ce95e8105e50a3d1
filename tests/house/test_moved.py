"""Old names of modules still lead to what replaced them."""

import importlib
import subprocess
import sys
import warnings

import pytest

from kbitq import _moved


@pytest.mark.parametrize(("old", "new"), sorted(_moved.MOVED.items()))
def test_an_old_name_leads_to_the_module_of_today(old: str, new: tuple[str, str]) -> None:
    module, names = new
    today, before = importlib.import_module(f"kbitq.{module}"), importlib.import_module(f"kbitq.{old}")
    for name in names.split():
        with pytest.warns(DeprecationWarning, match=f"kbitq.{old} is now kbitq.{module}"):
            assert getattr(before, name) is getattr(today, name)


def test_asking_every_module_wakes_nothing_up() -> None:
    """As torch's compiler does when it looks for caches to clear."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not [name for name in _moved.MOVED if hasattr(sys.modules[f"kbitq.{name}"], "cache_clear")]


def test_every_way_of_importing_an_old_name() -> None:
    program = """
import sys, kbitq
assert "torch" not in sys.modules
from kbitq.budget import Budget
import kbitq.selection
from kbitq import roles
assert Budget.__module__ == "kbitq.choose.knapsack"
assert kbitq.selection.Selection and roles.role_of
assert "TensorRule" in dir(kbitq.selection)
try:
    from kbitq.budget import nothing
except ImportError as error:
    assert "nothing" in str(error)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
