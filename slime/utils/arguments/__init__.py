"""The command line: `parse_args()` turns it into checked, frozen `Args`.

Every flag is a field of a dataclass in this package: cluster, data, rollout, eval, algorithm (checkpoints, losses,
rewards), train, weight_sync, observability, debug. What follows from flags is in derive.py; what cannot work is in
validate.py (values; the rules by topic are in check_*.py), check_files.py (files and directories) and check_hooks.py;
parse.py puts it together. Files that stand for flags: custom_config.py and roles.py. Nothing here starts anything.
"""

from slime.utils.arguments.args import Args, publish_runtime, with_run_keys
from slime.utils.arguments.parse import Checked, CommandLine, accept, parse_args
from slime.utils.arguments.roles import parse_megatron_role_args

__all__ = [
    "Args",
    "Checked",
    "CommandLine",
    "accept",
    "parse_args",
    "parse_megatron_role_args",
    "publish_runtime",
    "with_run_keys",
]
