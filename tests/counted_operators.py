"""Counts the operators that are dispatched, as each costs the host some microseconds and a GPU a launch."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class CountedOperators(TorchDispatchMode):
    """Counts each operator by its name while it is entered."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operators_of(step, warm_up=2):
    """The operators of one call of ``step``, after some that make state."""
    for _ in range(warm_up):
        step()
    with CountedOperators() as counted:
        step()
    return counted.counts
