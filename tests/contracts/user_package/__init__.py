"""A package as users write it, outside of slime: it imports only names of the public interface."""
