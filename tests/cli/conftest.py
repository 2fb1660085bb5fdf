"""Fixtures of the tests of the command."""

import pytest
from workshops import WIDE, Workshop


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", WIDE)


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)


@pytest.fixture
def here(workshop, monkeypatch):
    """The workshop's folder as the current one, without settings from the environment."""
    monkeypatch.chdir(workshop.folder)
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(workshop.cache))
    monkeypatch.delenv("NARROWCAST_POLICY", raising=False)
    return workshop


@pytest.fixture(scope="session")
def shared_workshop(tmp_path_factory):
    """One for all tests, for what takes long to make."""
    return Workshop(tmp_path_factory.mktemp("shared"))
