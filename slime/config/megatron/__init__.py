"""Megatron's flags: tables, values that follow, rules."""
