"""An unmodified script seen as events, and mixed precision put under it."""

from narrowcast.attach._attachment import Attachment
from narrowcast.attach._script import Script, run_script, seed_everything

__all__ = ["Attachment", "Script", "run_script", "seed_everything"]
