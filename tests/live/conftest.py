"""The victims of the fault tests are also the ones that are controlled here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))


@pytest.fixture(scope="session")
def undisturbed_run(tmp_path_factory):
    """For a case, the folder of a run that nobody asked for anything."""
    from harness import complete

    folders = {}

    def run(case):
        if case not in folders:
            folders[case] = complete(case, tmp_path_factory.mktemp("undisturbed"))
        return folders[case]

    return run


@pytest.fixture
def undisturbed(undisturbed_run):
    from victim import Case

    return undisturbed_run(Case())
