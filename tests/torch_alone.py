"""Without our kernels."""

from contextlib import contextmanager

from narrowcast.casting.kernels import _kernels


@contextmanager
def torch_alone():
    """No kernel of ours is on an operator meanwhile, whatever policies other tests keep.

    For what torch itself does: our kernels cast weights without its cache, and so without its traps.
    """
    for kernels in _kernels._kernels_on.values():
        for op in list(kernels.installed):
            kernels.drop(op)
    try:
        yield
    finally:
        with _kernels._lock:
            _kernels._update()
