"""Report mistakes in hand-written mixed precision."""
