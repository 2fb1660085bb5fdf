"""Run a skipped step again, and say where the first value that is not finite arose.

A skipped step changes no weight, so it can be repeated afterwards. While a step lasts, references to the
inputs of the model's calls are held. After a skip these calls are made again, and each operator is watched.
"""

from narrowcast.replay._explainer import SkipExplainer
from narrowcast.replay._random_states import random_states, set_random_states
from narrowcast.replay._recording import called_modules
from narrowcast.replay._replay import Caller, Surroundings
from narrowcast.replay._stories import FOR_PYTHON, FOR_SCRIPTS

__all__ = [
    "FOR_PYTHON",
    "FOR_SCRIPTS",
    "Caller",
    "SkipExplainer",
    "Surroundings",
    "called_modules",
    "random_states",
    "set_random_states",
]
