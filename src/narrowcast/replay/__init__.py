"""Run a skipped step again, and say where the first value that is not finite arose.

A skipped step changes no weight. So what went into the model's calls is held by reference while a step lasts,
and only after a skip the step is run again under hooks: at no cost until then.
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
