"""Studies of tests need not survive a power cut: without waiting for the disk they take a third of the time."""

import pytest
import sqlalchemy


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk():
    def relax(connection, record):
        connection.execute("PRAGMA synchronous=OFF")

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", relax)
    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", relax)
