"""Methods of ``torch.Tensor``."""

from torch import Tensor as MODULE

from narrowcast.apex._lists import TENSOR_CASTS as CASTS
from narrowcast.apex._lists import TENSOR_FP16 as FP16_FUNCS
from narrowcast.apex._lists import TENSOR_FP32 as FP32_FUNCS
from narrowcast.apex._lists import TENSOR_SEQUENCE_CASTS as SEQUENCE_CASTS

__all__ = ["CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]
