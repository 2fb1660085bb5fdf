"""Runs of a script in processes of their own, and the probes that observe them."""
