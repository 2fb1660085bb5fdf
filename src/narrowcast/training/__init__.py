"""A training step in its one right order: region, backward, unscale, clip, step, scheduler, zero."""

__all__: list[str] = []
