"""The lists of operators that torch tests its own autocast with; they ship with torch."""

import sys
import types
import unittest
from importlib import import_module
from unittest import mock

import torch

# The file around them wants torch's test tools, which want packages that do not ship.
TOOLS = types.ModuleType("torch.testing._internal.common_utils")
TOOLS.TEST_WITH_ROCM = torch.version.hip is not None
TOOLS.TestCase = unittest.TestCase
with mock.patch.dict(sys.modules, {TOOLS.__name__: TOOLS}):
    LISTS = import_module("torch.testing._internal.autocast_test_lists")
