"""What torch's compiler does to the process when it is first needed; here that is before any test."""

import pytest
import setuptools  # noqa: F401 (puts packages of its own on the path)
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from narrowcast.casting.regions import _scopes
from torch_alone import torch_alone

cache_dir()  # in the environment


@pytest.fixture
def fresh_dynamo(monkeypatch):
    torch._dynamo.reset()
    # Room for marks is made now, and not in the middle of a test that counts graphs.
    monkeypatch.setattr(_scopes, "_SPARE_MARKS", len(_scopes._MARKS))
    _scopes.make_room_for_marks()
    monkeypatch.setattr(_scopes, "_SPARE_MARKS", 0)
    yield
    torch._dynamo.reset()


@pytest.fixture(name="torch_alone")
def _torch_alone():
    with torch_alone():
        yield
