"""Public path of process groups that can be destroyed and made again, in slime.utils.accelerator."""

from slime.utils.accelerator.reloadable_process_group import (
    ReloadableProcessGroup,
    destroy_process_groups,
    install,
    reload_process_groups,
    uninstall,
)

__all__ = [
    "ReloadableProcessGroup",
    "destroy_process_groups",
    "install",
    "reload_process_groups",
    "uninstall",
]
