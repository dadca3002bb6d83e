"""Flags of the weight sync from trainer to engines. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.parser import flag


@dataclass
class WeightSyncFlags:
    """Weight sync."""

    update_weight_buffer_size: int = flag(512 * 1024**2, "bytes of one bucket of weights", at_least=1)
    update_weights_interval: int = flag(
        1, "train_async.py: sync the weights every N rollouts (train.py: every rollout, more is refused)", at_least=1
    )
    update_weights_in_flight: bool | None = flag(
        None,
        "requests stay in flight during a sync: engines put them aside and run without prefix cache (default: only "
        "with the fully async rollout)",
    )
    update_weight_transport: str = flag(
        "nccl",
        "how weights travel: nccl = the device's collective (NCCL, on CPU gloo), with --colocate through memory; disk "
        "= as files in --update-weight-disk-dir",
        choices=("nccl", "disk"),
    )
    update_weight_mode: str = flag(
        "full",
        "full = every weight in each sync, delta = the changed bytes (disk only); the first sync is always full",
        choices=("full", "delta"),
    )
    update_weight_disk_dir: str | None = flag(
        None,
        "directory that trainer and engines share, for weight_v000001 and so on; with --update-weight-transport nccl "
        "or --colocate it is used only where weights do not come through otherwise",
    )
    update_weight_disk_keep_files: bool = flag(
        False,
        "keep each version's directory after the engines have read it",
        needs="update_weight_transport=disk",
    )
    update_weight_delta_encoding: str = flag(
        "xor",
        "encoding of changed bytes: xor of old and new, or positions and new values",
        choices=("xor", "overwrite"),
        needs="update_weight_mode=delta",
    )
    update_weight_delta_checksum: str = flag(
        "xxh3-128",
        "checksum of each tensor in a delta",
        choices=("xxh3-128", "blake3", "adler32"),
        needs="update_weight_mode=delta",
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        "directory on each engine host for its copy of the weights, which deltas are applied to and engines load from",
        needs="update_weight_transport=disk",
    )
    custom_update_weight_post_write_path: str | None = flag(
        None,
        "hook: fn(args, version_dir, rollout_engines), on every rank, after the files are written and before engines "
        "read them",
        needs="update_weight_transport=disk",
    )
    check_weight_update_equal: bool = flag(
        False,
        "engines keep a copy of the weights they start with and overwrite them; the first sync must restore every bit",
    )
    release_train: bool = flag(
        False,
        "train.py: end the trainers while engines generate, and start them again from --save for each train step",
    )
