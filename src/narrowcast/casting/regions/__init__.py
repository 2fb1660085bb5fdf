"""Autocast regions, the rules that hold in them, and casts of weights."""
