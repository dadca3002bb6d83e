"""Checkpoints of any size from one form into another: what the tools of that purpose have in common.

Tensors are read, changed and written one by one, so that memory holds a few of them, whatever the size of a file.
Which tensors there are and what becomes of them is the tools' business.
"""
