"""A module that cannot be imported."""

import surely_not_installed  # noqa: F401
