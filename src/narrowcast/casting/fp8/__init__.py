"""fp8 as the target of a rule: linear layers that multiply in fp8, with torchao's products and recipes."""

from narrowcast.casting.fp8._convert import Fp8Handle, apply_fp8, unconverted
from narrowcast.casting.fp8._linear import Fp8Linear, turn_back

__all__ = ["Fp8Handle", "Fp8Linear", "apply_fp8", "turn_back", "unconverted"]
