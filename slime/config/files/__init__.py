"""Files that stand for flags."""
