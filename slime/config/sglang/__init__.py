"""SGLang's flags: tables, values that follow, rules."""
