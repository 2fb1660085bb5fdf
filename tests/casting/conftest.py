"""What torch's compiler does to the process when it is first needed; here that is before any test."""

import setuptools  # noqa: F401 (puts packages of its own on the path)
from torch._inductor.runtime.cache_dir_utils import cache_dir

cache_dir()  # in the environment
