"""What is built on slime and loaded by path: nothing in slime imports it, as nothing imports a user's hook."""
