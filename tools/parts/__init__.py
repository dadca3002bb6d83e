"""Parts that several tools share."""
