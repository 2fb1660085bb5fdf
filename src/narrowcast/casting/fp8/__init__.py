"""fp8 as the target of a rule: linear layers that multiply in fp8, with torchao's matmuls and recipes."""

from narrowcast.casting.fp8._convert import Fp8Handle, apply_fp8, is_fp8, policy_has_fp8, unconverted

__all__ = ["Fp8Handle", "apply_fp8", "is_fp8", "policy_has_fp8", "unconverted"]
