"""Explain skipped steps: hold what a step is given, and run it again when it was skipped."""

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
    """Holds what the calls of a step were given, and says of a skipped step where it went wrong.

    Args:
        policy: that of the training.
        say: called with each story; by default it is logged.
        model: the module that is trained; None: each module that was called is one.
        wording: of advice.

    Attributes:
        recording: of the calls since the latest step.
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
        """The stories, in their order."""
        return list(self._stories.told)

    def step_ended(self, *, may_step_again: bool = False) -> None:
        """Let go of a step; if another optimizer may step on its calls, only when the next call begins."""
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
        """Run the step that was just skipped again, and tell where it went wrong.

        The arguments are those of ``SkipStories.tell``. Another optimizer may step on the same calls.
        """
        step = self.recording.recorded_step()
        self.recording.end_step()
        # The calls that are made again are not recorded.
        records = self.recording.records
        self.recording.records = False
        try:
            arose_in_backward = self._stories.tell(
                step,
                surroundings,
                number=number,
                scale=scale,
                lower_scale=lower_scale,
                names=names,
            )
        finally:  # the user may interrupt, and train on
            self.recording.records = records
        if arose_in_backward is not None:
            self.recording.hold_gradients(arose_in_backward)


def _log(story: str) -> None:
    logging.getLogger("narrowcast").warning("narrowcast: %s", story)
