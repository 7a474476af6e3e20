"""Studies in tests need not survive a power cut: without fsync they take a third of the time."""

import pytest
import sqlalchemy


@pytest.fixture(autouse=True)
def _sqlite_without_fsync():
    def relax(connection, record):
        connection.execute("PRAGMA synchronous=OFF")

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", relax)
    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", relax)
