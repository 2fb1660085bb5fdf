"""Without our kernels."""

from contextlib import contextmanager

from narrowcast.casting import _kernels


@contextmanager
def torch_alone():
    """No kernel of ours is on an operator meanwhile, whatever policies other tests keep.

    For what torch itself does: our kernels cast weights without its cache, and so without its traps.
    """
    taken = [(library, op) for library in _kernels._libraries.values() for op in library.installed]
    for library, op in taken:
        library.drop(op)
    try:
        yield
    finally:
        for library, op in taken:
            if op in library.users and op not in library.installed:
                library.add(op)
