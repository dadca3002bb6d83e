"""Layers of model families that Megatron's own layers do not make up, and the specifications that put them in.

slime loads a specification by its path: --spec, or a table in slime.config.megatron.derived.
"""
