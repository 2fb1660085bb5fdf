"""Explain skipped steps: hold the inputs of a step, and run the step again if it was skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from narrowcast.policy import Policy
from narrowcast.replay._recording import Recording
from narrowcast.replay._replay import Surroundings
from narrowcast.replay._stories import FOR_PYTHON, SkipStories, Wording

_LATE_FLAGS = (
    "a skipped step is not run again here, to say where it went wrong: a fused optimizer on a GPU tells only "
    "after the next step has begun whether one was skipped"
)


class SkipExplainer:
    """Holds the inputs of a step's calls, and says where a skipped step went wrong.

    Args:
        policy: the policy of the training.
        say: called with each story; by default stories are logged.
        model: the module that is trained, from which paths in rules start; None if each called module is a
            model of its own.
        wording: how advice is written.

    Attributes:
        recording: holds the calls since the latest step.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        say: Callable[[str], None] | None = None,
        model: nn.Module | None = None,
        wording: Wording = FOR_PYTHON,
    ) -> None:
        self.recording = Recording()
        self._say = say or _log
        self._stories = SkipStories(policy, self._say, model, wording=wording)
        self._told_of_late_flags = False

    @property
    def told(self) -> list[str]:
        """The stories so far, the oldest first."""
        return list(self._stories.told)

    def step_ended(self, *, may_step_again: bool = False) -> None:
        """Release the calls of a step.

        If another optimizer may step on them too, they are released only when the next call begins.
        """
        self.recording.end_step()
        if not may_step_again:
            self.recording.clear()

    def tell_of_late_flags(self) -> None:
        """Say, once, that a skip which becomes known only during the next step is not run again."""
        if not self._told_of_late_flags:
            self._told_of_late_flags = True
            self._say(_LATE_FLAGS)

    def explain(
        self,
        surroundings: Surroundings,
        *,
        number: int,
        scale: float,
        lower_scale: float,
        names: tuple[str, ...],
    ) -> None:
        """Repeat the step that was just skipped, and say where it went wrong.

        The arguments are those of ``SkipStories.tell``. The calls are held until the next call begins, as
        another optimizer may step on them too.
        """
        step = self.recording.recorded_step()
        self.recording.end_step()
        # Do not record the repeated calls.
        recorded_before = self.recording.records
        self.recording.records = False
        try:
            needs_gradients = self._stories.tell(
                step,
                surroundings,
                number=number,
                scale=scale,
                lower_scale=lower_scale,
                names=names,
            )
        finally:  # also if the user interrupts the replay and then continues to train
            self.recording.records = recorded_before
        # To tell more of the next step that goes wrong like this one, its gradients must be held.
        if needs_gradients is not None:  # None: the step was not run again
            self.recording.hold_gradients(needs_gradients)


def _log(story: str) -> None:
    logging.getLogger("narrowcast").warning("narrowcast: %s", story)
