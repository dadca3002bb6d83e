"""Calls of user functions: whether their signatures fit, what they may return, and errors that name them."""
