"""Model families: what their config.json says."""
