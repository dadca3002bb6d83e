"""Filters that decide which finished groups a rollout keeps."""
