"""torch names its Inductor cache in the environment when it first needs it; here that is before any test."""

from torch._inductor.runtime.cache_dir_utils import cache_dir

cache_dir()
