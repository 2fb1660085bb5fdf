"""Functions of ``torch.nn.functional``."""

from torch.nn import functional as MODULE

from narrowcast.apex._lists import FUNCTIONAL_BANNED as BANNED_FUNCS
from narrowcast.apex._lists import FUNCTIONAL_FP16 as FP16_FUNCS
from narrowcast.apex._lists import FUNCTIONAL_FP32 as FP32_FUNCS

__all__ = ["BANNED_FUNCS", "FP16_FUNCS", "FP32_FUNCS", "MODULE"]
