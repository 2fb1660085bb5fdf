"""Mixed-precision training for PyTorch that a person can steer, trust and explain.

Names are resolved on first use, so that ``narrowcast --help`` answers without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowcast import (
        apex,
        attach,
        casting,
        formats,
        gradients,
        machine,
        observe,
        policy,
        scaling,
        training,
        verify,
        weights,
    )
    from narrowcast.casting import apply, autocast, bake, compile, custom_bwd, custom_fwd
    from narrowcast.errors import NarrowcastError
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
    "attach",
    "autocast",
    "bake",
    "casting",
    "certify",
    "compile",
    "custom_bwd",
    "custom_fwd",
    "explain",
    "formats",
    "gradients",
    "machine",
    "observe",
    "policy",
    "rule",
    "scaling",
    "training",
    "verify",
    "weights",
]

_HOME_OF = {
    "Certificate": "narrowcast.verify",
    "Explanation": "narrowcast.verify",
    "GradScaler": "narrowcast.gradients",
    "NarrowcastError": "narrowcast.errors",
    "Policy": "narrowcast.policy",
    "StepResult": "narrowcast.gradients",
    "Stepper": "narrowcast.training",
    "apply": "narrowcast.casting",
    "autocast": "narrowcast.casting",
    "bake": "narrowcast.casting",
    "certify": "narrowcast.verify",
    "compile": "narrowcast.casting",
    "custom_bwd": "narrowcast.casting",
    "custom_fwd": "narrowcast.casting",
    "explain": "narrowcast.verify",
    "rule": "narrowcast.policy",
}
_ROOMS = (
    "apex",
    "attach",
    "casting",
    "formats",
    "gradients",
    "machine",
    "observe",
    "policy",
    "scaling",
    "training",
    "verify",
    "weights",
)


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        value: object = getattr(import_module(_HOME_OF[name]), name)
    elif name in _ROOMS:
        value = import_module(f"narrowcast.{name}")
    else:
        raise AttributeError(f"module 'narrowcast' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
