"""How the model of a rank is built, and the names of its weights."""
