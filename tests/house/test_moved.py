"""Old names of modules still lead to what replaced them."""

import importlib
import subprocess
import sys

import pytest

from kbitq import _moved


@pytest.mark.parametrize(("old", "new"), sorted(_moved.MOVED.items()))
def test_an_old_name_leads_to_the_module_of_today(old: str, new: str) -> None:
    today = importlib.import_module(f"kbitq.{new}")
    name = next(n for n in vars(today) if not n.startswith("_") and callable(vars(today)[n]))
    with pytest.warns(DeprecationWarning, match=f"kbitq.{old} is now kbitq.{new}"):
        assert getattr(importlib.import_module(f"kbitq.{old}"), name) is vars(today)[name]


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
