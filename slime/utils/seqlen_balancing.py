"""The public path of `get_seqlen_balanced_partitions`, which is in `slime.utils.dp_schedule`."""

from slime.utils.dp_schedule import get_seqlen_balanced_partitions

__all__ = ["get_seqlen_balanced_partitions"]
