"""The path at which code written for upstream looks for the base class; generators are in `generators`."""
