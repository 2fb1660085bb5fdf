"""Rewrite apex in its canonical shapes, or refuse with the line and what to write there."""
