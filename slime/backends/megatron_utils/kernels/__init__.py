"""Kernels under the names by which users import them."""
