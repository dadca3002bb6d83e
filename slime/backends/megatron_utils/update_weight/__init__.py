"""Sending the trainer's weights to the engines: one interface, one class per transport."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from slime.backends.megatron_utils.update_weight.base import NoLinkError, WeightSyncError, WeightUpdater
from slime.config.args import Args
from slime.config.megatron.lora_plan import served_plan
from slime.utils.misc import load_function
from slime.weights.transports import ADAPTERS, WeightTransport, transport_of

__all__ = [
    "NoLinkError",
    "WeightSyncError",
    "WeightUpdater",
    "build_weight_updater",
    "connected_weight_updater",
    "over_files_instead",
]

logger = logging.getLogger(__name__)


def connected_weight_updater(
    args: Args,
    model: Any,
    engines: Sequence[Any],
    *,
    engine_sizes: Sequence[int],
    colocated: bool,
    weight_version: int,
    updater: WeightUpdater | None = None,
) -> WeightUpdater:
    """The updater for this run's transport, connected; over files, where engines and trainer cannot form a group.

    Collective over the trainer's ranks.

    Args:
        args: the run's flags.
        model: this rank's Megatron model chunks, or the `WeightSource` of another backend.
        engines: see `WeightUpdater.connect`.
        engine_sizes: likewise.
        colocated: see `build_weight_updater`.
        weight_version: of the last sync; the next one sends the version after it.
        updater: the one that there is already, which gets these engines in place of others.

    Raises:
        NoLinkError: they cannot, and there is no --update-weight-disk-dir.
    """
    if updater is None:
        updater = build_weight_updater(args, model, colocated=colocated)
    updater.weight_version = weight_version
    try:
        updater.connect(engines, engine_sizes=engine_sizes)
    except NoLinkError as error:
        if args.update_weight_disk_dir is None:
            raise
        updater = _over_files(updater, error)
    return updater


def over_files_instead(updater: WeightUpdater, error: WeightSyncError) -> WeightUpdater:
    """An updater that goes on over files where weights do not come through to engines that do answer.

    Collective over the trainer's ranks, which all have the error.

    Args:
        updater: whose sync failed.
        error: with which it did.

    Raises:
        WeightSyncError: `error`, where files would not help or there is no --update-weight-disk-dir; another one,
            where they have not begun.
    """
    has_other_way = updater.args.update_weight_disk_dir is not None and not updater.is_over_files
    may_help = isinstance(error, NoLinkError) or not error.is_final
    if not (has_other_way and may_help and updater.is_answered()):
        raise error
    return _over_files(updater, error)


def _over_files(updater: WeightUpdater, error: WeightSyncError) -> WeightUpdater:
    """An updater that takes the place of one that failed, with the same engines."""
    from slime.backends.megatron_utils.update_weight.from_disk import DiskWeightUpdater

    if updater.is_source:
        where = f"--update-weight-disk-dir {updater.args.update_weight_disk_dir}"
        logger.warning("weights go to the engines as files in %s, which is slower: %s", where, error)
    updater.close()
    other = DiskWeightUpdater(updater.args, updater.model)
    other.weight_version = updater.weight_version
    other.connect(updater.engines, engine_sizes=updater.engine_sizes)
    return other


def way_of(args: Args, *, colocated: bool) -> WeightTransport:
    """Return the way in which this run's weights, or its adapters, get to engines."""
    if served_plan(args):
        return ADAPTERS
    return transport_of(args.update_weight_transport, args.update_weight_mode, colocated=colocated)


def build_weight_updater(args: Args, model: Any, *, colocated: bool) -> WeightUpdater:
    """The updater for this run's transport.

    Args:
        args: the run's flags.
        model: this rank's Megatron model chunks, or the `WeightSource` of another backend.
        colocated: trainer and engines share their slots, so that memory can be handed over.
    """
    # Found by name: some of them reach SGLang's classes, which takes seconds to import.
    return cast(WeightUpdater, load_function(way_of(args, colocated=colocated).updater)(args, model))
