"""Helpers for Python scripts that launch slime from outside: nothing in slime itself imports them."""
