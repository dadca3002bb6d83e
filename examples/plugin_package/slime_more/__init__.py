"""One row more in each of slime's tables: see docs/plugins.md. It imports none of them."""
