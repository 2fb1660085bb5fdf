"""Kernels on the autocast key: casts of operators, promotion, and watching them."""
