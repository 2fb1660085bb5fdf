"""Twenty small trainings with one fault each, written by somebody who had not read how a replay works."""
