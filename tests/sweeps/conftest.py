"""What tests of tracking share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests, since creating one takes seconds; each test has its own experiment."""
    return f"sqlite:///{tmp_path_factory.mktemp('with space')}/mlflow.db"
