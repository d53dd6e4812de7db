"""Examples in docstrings give what they say."""

import doctest
import importlib
import pkgutil

import pytest

import jaxpipe
import jaxpipe.schedules

PACKAGES = (jaxpipe, jaxpipe.schedules)
MODULES = sorted(
    {package.__name__ for package in PACKAGES}
    | {
        module.name
        for package in PACKAGES
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    }
)


def test_all_packages_are_looked_at():
    assert {"jaxpipe.api", "jaxpipe.scheduling.dsl", "jaxpipe.schedules.vee"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_hold(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} failed"
