"""Tools of slime, each a script. A package of its own: no other package `tools` on the path is taken for it."""
