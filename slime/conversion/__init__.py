"""Checkpoints from one form into another, tensor by tensor: memory holds a few tensors, whatever the size of a file.

`reader` reads HF directories, `writer` writes them; which tensors there are is decided by the tools.
"""
