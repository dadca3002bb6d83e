"""What cannot work or has no effect, by topic."""
