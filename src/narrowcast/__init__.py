"""Mixed-precision training for PyTorch that you can steer, trust and explain.

Names are imported on first use (PEP 562), so that ``narrowcast --help`` runs without importing torch.
Packages that are not in ``__all__`` are internal and change without notice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from narrowcast.errors import NarrowcastError, did_you_mean

if TYPE_CHECKING:
    from narrowcast import apex, errors, formats, integrations, observe, scaling, training, weights
    from narrowcast.attach import attached
    from narrowcast.casting import apply, autocast, bake, compile, custom_bwd, custom_fwd, drop_casts
    from narrowcast.gradients import GradScaler, StepResult
    from narrowcast.policy import Policy, rule
    from narrowcast.training import Stepper
    from narrowcast.verify import Certificate, Explanation, certify, explain

__version__ = "0.1.0"

__all__ = [
    "Certificate",
    "Explanation",
    "GradScaler",
    "NarrowcastError",
    "Policy",
    "StepResult",
    "Stepper",
    "__version__",
    "apex",
    "apply",
    "attached",
    "autocast",
    "bake",
    "certify",
    "compile",
    "custom_bwd",
    "custom_fwd",
    "drop_casts",
    "errors",
    "explain",
    "formats",
    "integrations",
    "observe",
    "rule",
    "scaling",
    "training",
    "weights",
]

_HOME_OF = {
    "Certificate": "verify",
    "Explanation": "verify",
    "GradScaler": "gradients",
    "Policy": "policy",
    "StepResult": "gradients",
    "Stepper": "training",
    "apply": "casting",
    "attached": "attach",
    "autocast": "casting",
    "bake": "casting",
    "certify": "verify",
    "compile": "casting",
    "custom_bwd": "casting",
    "custom_fwd": "casting",
    "drop_casts": "casting",
    "explain": "verify",
    "rule": "policy",
}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        value: object = getattr(import_module(f"narrowcast.{_HOME_OF[name]}"), name)
    elif name in __all__:
        value = import_module(f"narrowcast.{name}")
    else:
        raise AttributeError(f"module 'narrowcast' has no attribute {name!r}. {did_you_mean(name, __all__)}")
    # From now on Python finds the name without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
