"""Functions of ``torch``."""

import torch as MODULE

from narrowcast.apex._lists import TORCH_CASTS as CASTS
from narrowcast.apex._lists import TORCH_FP16 as FP16_FUNCS
from narrowcast.apex._lists import TORCH_FP32 as FP32_FUNCS
from narrowcast.apex._lists import TORCH_SEQUENCE_CASTS as SEQUENCE_CASTS

__all__ = ["CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]
