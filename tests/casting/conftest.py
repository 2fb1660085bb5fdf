"""What torch's compiler does to the process when it is first needed; here that is before any test."""

import pytest
import setuptools  # noqa: F401 (puts packages of its own on the path)
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from narrowcast.casting import _kernels

cache_dir()  # in the environment


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def torch_alone():
    """No kernel of ours is on an operator meanwhile, whatever policies other tests keep.

    For what torch itself does: our kernels cast weights without its cache, and so without its traps.
    """
    libraries = list(_kernels._libraries.values())
    taken = [(library, op) for library in libraries for op in library.installed]
    for library, op in taken:
        library.drop(op)
    yield
    for library, op in taken:
        if op in library.users:
            library.add(op)
