"""Where the first infinity or NaN of a step arose that was skipped: it is run again, and shows."""

from __future__ import annotations

import functools

from narrowcast.attach._regions import ScriptRegions
from narrowcast.attach._run import AttachedRun
from narrowcast.replay import FOR_PYTHON, FOR_SCRIPTS, SkipStories, Surroundings


class SkippedSteps:
    """Tell the story of the first skipped step of each kind, and let go of what steps hold."""

    def __init__(self, run: AttachedRun, regions: ScriptRegions) -> None:
        self._run = run
        self._regions = regions
        self._recording = regions.recording
        self._stories: SkipStories | None = None

    def step_ended(self) -> None:
        """Let go of a step that was taken, or of which is not known yet whether it was skipped."""
        self._recording.end_step()
        self._recording.clear()

    def explain(self, *, number: int, scale: float, lower_scale: float, names: tuple[str, ...]) -> None:
        """Run a skipped step again, and tell where it went wrong; arguments as for ``SkipStories.tell``."""
        step = self._recording.recorded_step()
        self._recording.end_step()
        stories = self._begun_stories()
        recorder = self._run.recorder
        module_calls = recorder.module_calls
        arose_in_backward = stories.tell(
            step,
            Surroundings(mixed=self._regions.call_again, fp32=self._regions.call_in_fp32),
            number=number,
            scale=scale,
            lower_scale=lower_scale,
            names=names,
        )
        recorder.module_calls = module_calls
        if arose_in_backward is not None:
            self._recording.hold_gradients(arose_in_backward)

    def _begun_stories(self) -> SkipStories:
        """Return the stories, which begin when the first call has decided the formats."""
        if self._stories is None:
            run = self._run
            wording = FOR_PYTHON if run.recorder.in_python else FOR_SCRIPTS
            say = functools.partial(run.recorder.note, at_once=True, told=True)
            self._stories = SkipStories(run.policy, self._regions.formats(), say, wording=wording)
        return self._stories
