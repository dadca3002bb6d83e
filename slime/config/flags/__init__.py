"""slime's flags, one dataclass per group."""
