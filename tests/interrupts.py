"""Ctrl-C at random instants of a training: how to deliver it, and what it must leave as it was."""

import contextlib
import os
import random
import signal
import sys
import time
import traceback

import torch

# Rules in force are stored as the autocast dtypes of device types that no tensor uses.
DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "ipu", "xla", "mtia")


def autocast_state():
    """Return what regions change in this thread."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return {
        "nesting": depth,
        "cache": torch.is_autocast_cache_enabled(),
        "enabled": {one: torch.is_autocast_enabled(one) for one in DEVICE_TYPES},
        "dtype": {one: torch.get_autocast_dtype(one) for one in DEVICE_TYPES},
    }


def changed(before):
    """Return what of autocast's state is not as before, with both values."""
    now = autocast_state()
    return {name: (before[name], now[name]) for name in before if now[name] != before[name]}


def clean_up(before):
    """Set back what an interrupt may have left.

    Gradients may be off: torch's own ``no_grad`` in an optimizer's step can be interrupted too. Autocast's
    state is set back, so that a test that fails here fails no other.
    """
    torch.set_grad_enabled(True)
    if not changed(before):
        return
    while autocast_state()["nesting"] > before["nesting"]:
        torch.autocast_decrement_nesting()
    while autocast_state()["nesting"] < before["nesting"]:
        torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(before["cache"])
    for one in DEVICE_TYPES:
        torch.set_autocast_enabled(one, before["enabled"][one])
        torch.set_autocast_dtype(one, before["dtype"][one])
    torch.clear_autocast_cache()


_REGIONS = os.path.join("narrowcast", "casting")


class Alarm:
    """Raise KeyboardInterrupt in the main thread after some time, as Ctrl-C does.

    Python runs the handler of a signal between two of its instructions. So the instants are those of a real
    Ctrl-C: after the call of a C function, at the start of a Python function, or at the end of a loop's body.
    But it waits for lines that open and close regions, whose ``finally`` an interrupt would end. It waits
    twice as long each time, since on a slow machine a wait of one length can always end inside this handler.

    Attributes:
        where: when it was delivered, and the lines that were running; None if it was not.
    """

    def __init__(self):
        self.where = None
        self._seconds = 0.0
        self._wait_s = 0.0
        self._armed = False

    def _ring(self, _number, frame):
        file = frame.f_code.co_filename
        if self._armed and (_REGIONS in file or file == __file__):
            self._wait_s *= 2
            signal.setitimer(signal.ITIMER_REAL, self._wait_s)
        elif self._armed:
            self._armed = False
            lines = "".join(traceback.format_stack(frame)[-4:])
            self.where = f"interrupted after {self._seconds * 1e3:.3f} ms, in\n{lines}"
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def after(self, seconds):
        """Interrupt what runs inside, if it runs so long."""
        self.where, self._seconds = None, seconds
        self._wait_s = 5e-6
        handler = signal.signal(signal.SIGALRM, self._ring)
        hook, sys.unraisablehook = sys.unraisablehook, _without_interrupts(sys.unraisablehook)
        self._armed = True
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, handler)
            sys.unraisablehook = hook


def _without_interrupts(hook):
    """Return a hook that ignores an interrupt in a finalizer, which Python can only print."""

    def ignoring(unraisable):
        if unraisable.exc_type is not KeyboardInterrupt:
            hook(unraisable)

    return ignoring


def random_instants(count, longest_s):
    """Return instants of what takes so long. pytest-randomly seeds them, and prints the seed."""
    return [random.uniform(0.0, longest_s) for _ in range(count)]


class Training:
    """Two steps of a small model, from the same weights each time."""

    def __init__(self, model, x):
        self.model, self.x = model, x
        self._weights = [parameter.detach().clone() for parameter in model.parameters()]

    def run(self):
        """Return the losses, and the weights after each step."""
        with torch.no_grad():
            for parameter, weight in zip(self.model.parameters(), self._weights, strict=True):
                parameter.copy_(weight)
                parameter.grad = None
        optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        found = []
        for _ in range(2):
            loss = self.model(self.x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.detach(), *(parameter.detach().clone() for parameter in self.model.parameters())]
        return found

    def seconds(self):
        """Return how long ``run`` takes."""
        started = time.perf_counter()
        self.run()
        return time.perf_counter() - started


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
