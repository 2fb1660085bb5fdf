"""An unmodified script seen as events, and mixed precision put under it."""

from narrowcast.attach._attachment import Attachment
from narrowcast.attach._script import Script, run_script, seed_everything
from narrowcast.attach._watcher import Attached, Watcher

__all__ = ["Attached", "Attachment", "Script", "Watcher", "run_script", "seed_everything"]
