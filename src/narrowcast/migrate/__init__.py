"""Scripts rewritten: apex and deprecated names to ``torch.amp`` or narrowcast, and mistakes found."""

from narrowcast.migrate._changes import Finding
from narrowcast.migrate._driver import Outcome, migrate_text
from narrowcast.migrate._settings import Settings

__all__ = ["Finding", "Outcome", "Settings", "migrate_text"]
