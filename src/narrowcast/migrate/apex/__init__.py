"""Rewrite apex in its canonical shape, or keep its calls and import them from ``narrowcast.apex``."""
