"""Entry points of other packages: `trainformer.core.plugins`."""

import sys

import pytest

from plugin_packages import install  # noqa: F401 - a fixture
from trainformer.core import BadArgument
from trainformer.core.plugins import load_plugin, plugin_names


def test_names_are_listed_without_an_import(install):  # noqa: F811
    install("plugin_a", "value = 3", "loggers", second="value", first="value")
    assert plugin_names("loggers") == ["first", "second"]
    assert plugin_names("callbacks") == []
    assert "plugin_a" not in sys.modules
    assert load_plugin("loggers", "first") == 3
    assert "plugin_a" in sys.modules


def test_a_missing_plugin_is_none(install):  # noqa: F811
    install("plugin_a", "value = 3", "loggers", first="value")
    assert load_plugin("loggers", "other") is None
    assert load_plugin("tasks", "first") is None  # another kind


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("other = 3", "AttributeError: module 'plugin_a' has no attribute 'value'"),
    ],
)
def test_a_plugin_that_cannot_be_imported(install, code, error):  # noqa: F811
    install("plugin_a", code, "loggers", broken="value")
    assert plugin_names("loggers") == ["broken"]
    with pytest.raises(BadArgument, match=r"plugin 'broken' \(trainformer.loggers, plugin_a:value\) cannot") as caught:
        load_plugin("loggers", "broken")
    assert str(caught.value).endswith(error)


def test_two_packages_must_not_register_the_same_name(install):  # noqa: F811
    install("plugin_a", "value = 1", "loggers", shared="value")
    install("plugin_b", "value = 2", "loggers", shared="value")
    with pytest.raises(BadArgument, match=r"Two packages register 'shared' as trainformer.loggers: .*Uninstall one"):
        plugin_names("loggers")
    with pytest.raises(BadArgument, match=r"plugin_a:value"):
        load_plugin("loggers", "shared")


def test_a_package_that_is_found_twice_is_registered_once(install, monkeypatch):  # noqa: F811
    install("plugin_a", "value = 1", "loggers", first="value")
    monkeypatch.setattr(sys, "path", [sys.path[0], *sys.path])
    assert load_plugin("loggers", "first") == 1
