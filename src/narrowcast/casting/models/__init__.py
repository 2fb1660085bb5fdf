"""Models: apply, rules for their modules, bake and compile."""
