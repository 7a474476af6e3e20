"""The runs that are controlled here are those of the fault tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))


@pytest.fixture(autouse=True)
def remove_dead_sockets(tmp_path):
    """Tests kill runs; remove the sockets that those leave in the temporary folder of the system."""
    from trainformer.live import address

    yield
    for file in tmp_path.rglob(address.FILE):
        known = address.read(file.parent)
        if known is not None and known.path is not None and not address.is_there(known):
            address.withdraw(file.parent, known)


@pytest.fixture(scope="session")
def undisturbed_run(tmp_path_factory):
    """The folder of an uncontrolled run of a case."""
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
