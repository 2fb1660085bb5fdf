"""End what ``amp.initialize`` put in force for the process, for which apex has no public name."""

from narrowcast.apex import amp
from narrowcast.apex.amp import _casts


def end_apex():
    """End the casts of every O1, and forget settings and registered functions; models stay as they are."""
    for handle in reversed(list(_casts.handles.values())):
        handle._deactivate()
    # PyTorch's own functions again: TorchScript compiles no wrapped ones.
    for owner, name in _casts._replaced:
        setattr(owner, name, getattr(owner, name).__wrapped__)
    _casts._replaced.clear()
    _casts.registered.clear()
    vars(amp._amp_state).update(vars(type(amp._amp_state)()))
