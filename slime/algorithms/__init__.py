"""Arithmetic of policy optimisation that every trainer backend shares: estimators, baselines, returns, losses, KL.

`estimators` imports without torch, so the command line reads the rows there. Functions take tensors and
values, never `args`.
"""
