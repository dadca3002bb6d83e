"""The three dicts between a finished rollout and a loss, key by key: TrainData -> RolloutBatch -> MicroBatch.

`S` = samples of the rollout (TrainData) or of one DP rank (RolloutBatch) or of one micro-batch; `R` = response tokens
of one sample; `T` = packed tokens. Extra columns that a converter adds travel along untouched.

Example: two samples of one prompt (2 prompt tokens; responses of 3 and 1 tokens; rewards 1 and 0), as TrainData::

    tokens             = [[5, 6, 21, 22, 2], [5, 6, 2]]
    response_lengths   = [3, 1]
    loss_masks         = [[1, 1, 1], [1]]
    raw_reward         = [1.0, 0.0]
    rewards            = [0.707, -0.707]       # mean 0.5 taken off, divided by the unbiased deviation 0.707
    truncated          = [0, 0]
    sample_indices     = [0, 1]
    rollout_ids        = [0, 1]
    rollout_mask_sums  = [3, 1]
    rollout_log_probs  = [[-0.1, -0.2, 0.0], [-2.3]]

Columns of one value per token travel from process to process as one array each (`flatten_columns`). As lists of Python
numbers they cost more to pickle and unpickle than everything else of a rollout together; arrays are read where they
lie in shared memory. Measured for 512 samples of 576 tokens on one core of a CPU: 11 ms to pickle and 21 ms to
unpickle lists; 12 ms to make arrays of them, 1 ms for the rest.

Example:
    >>> sent = flatten_columns({"tokens": [[5, 6, 21], [5, 6]], "rewards": [1.0, 0.0]})
    >>> sent["tokens"].values
    array([ 5,  6, 21,  5,  6])
    >>> restore_columns(sent)
    {'tokens': [array([ 5,  6, 21]), array([5, 6])], 'rewards': [1.0, 0.0]}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

import numpy as np

if TYPE_CHECKING:
    import torch

    from slime.config.args import Args


class TrainData(TypedDict):
    """A whole rollout; written by slime.rollout.train_data, read and split by slime.ray.rollout.shares."""

    tokens: list[list[int]]
    """[S][prompt + R] token ids."""
    response_lengths: list[int]
    """[S] R of each sample."""
    rewards: list[float]
    """[S] after group normalisation (slime.rollout.train_data); read by the advantages."""
    raw_reward: list[float]
    """[S] as scored; logged."""
    truncated: list[int]
    """[S] 1 = ended by a length limit; logged."""
    sample_indices: list[int]
    """[S] Sample.index; names the samples in dumps."""
    rollout_ids: list[int]
    """[S] execution that a sample came from; the schedule keeps an execution in one train step."""
    loss_masks: list[list[int]]
    """[S][R] 1 = trained."""
    rollout_mask_sums: list[int]
    """[S] trained tokens of the sample's whole execution; the per-rollout mean divides by it."""
    rollout_log_probs: NotRequired[list[list[float]]]
    """[S][R] by the engine."""
    teacher_log_probs: NotRequired[list[list[float]]]
    """[S][R] by the teacher (slime.rollout.on_policy_distillation)."""
    token_rewards: NotRequired[list[list[float]]]
    """[S][R] what trained tokens earned beside `rewards`, after the group's baseline; 0 elsewhere
    (slime.rollout.hooks.process_rewards)."""
    rollout_routed_experts: NotRequired[list[Any]]
    """[S] arrays [prompt + R - 1, layers, topk]: the experts that the engine chose (--use-rollout-routing-replay)."""
    round_number: NotRequired[list[int]]
    """[S] turns of a multi-turn sample (metadata["round_number"]); logged."""
    metadata: NotRequired[list[dict[str, Any] | None]]
    """[S] Sample.train_metadata; read by custom losses."""
    source_names: NotRequired[list[str]]
    """[S] data set of the prompt; logged."""
    weight_version: NotRequired[int]
    """Of the engines when the rollout was begun, written by the rollout manager; read by --keep-old-actor. Absent
    where no engine takes the trainer's weights."""
    recorded_indices: NotRequired[frozenset[int]]
    """`sample_indices` of the samples that are recorded, where not all are (--rollout-record-fraction)."""
    multimodal_train_inputs: NotRequired[list[dict[str, np.ndarray] | None]]
    """[S] arrays for the forward pass, by the processor's names ("pixel_values" [patches, numbers of one],
    "image_grid_thw" [images, 3]); None for samples without images. Samples of a prompt share the arrays, so each is
    sent once. Present where some sample has images, as the next."""
    image_spans: NotRequired[list[list[list[int]]]]
    """[S] lists of [start, length] in `tokens`, one for each image."""
    total_lengths: NotRequired[list[int]]
    """[S] prompt + R; written by the split, read by the schedule and by packing."""


class TokenColumns(TypedDict, total=False):
    """What a rank has of each sample, S of its share in a RolloutBatch, S of one micro-batch in a MicroBatch.

    Lists of tensors [R] are of whole responses, also with context parallelism.
    """

    response_lengths: list[int]
    """[S] R."""
    total_lengths: list[int]
    """[S] prompt + R."""
    loss_masks: list[torch.Tensor]
    """[S][R] int32, 1 = trained."""
    rewards: list[float]
    raw_reward: list[float]
    truncated: list[int]
    sample_indices: list[int]
    rollout_ids: list[int]
    rollout_mask_sums: list[int]
    """These six as in TrainData."""
    rollout_log_probs: list[torch.Tensor]
    """[S][R] float32 by the engine; the split."""
    teacher_log_probs: list[torch.Tensor]
    """[S][R] by the teacher; the split, or a pass of the trainer (--opd-type megatron)."""
    token_rewards: list[torch.Tensor]
    """[S][R] float32 as in TrainData; read by the advantages."""
    log_probs: list[torch.Tensor]
    """[S][R] by the trainer before the update; a pass, absent when the first pass of the loss gives them."""
    ref_log_probs: list[torch.Tensor]
    """[S][R] by the reference; a pass."""
    values: list[torch.Tensor]
    """[S][R] by the critic before the update; a pass of the critic, PPO only."""
    kl: list[torch.Tensor]
    """[S][R] policy from reference; slime.algorithms.advantages, as the next three."""
    advantages: list[torch.Tensor]
    """[S][R] float32."""
    returns: list[torch.Tensor]
    """[S][R] float32."""
    opd_reverse_kl: list[torch.Tensor]
    """[S][R] log-prob of the student minus the teacher's; --use-opd only."""
    entropy: list[torch.Tensor]
    """[S][R] of the policy before the update; a pass, --use-rollout-entropy only."""
    routed_experts: list[torch.Tensor]
    """[S][rows, layers, topk] int16, the choices to replay; passes.routing_replay."""
    round_number: list[int]
    metadata: list[dict[str, Any] | None]
    source_names: list[str]
    """These three as in TrainData."""


class RolloutBatch(TokenColumns, total=False):
    """One DP rank's share: lists by the split, tensors by slime.training.micro_batches; the trainer adds some.

    Example: the share of the two samples above, on one rank, with advantages of GRPO::

        tokens              = [tensor([5, 6, 21, 22, 2]), tensor([5, 6, 2])]
        total_lengths       = [5, 3]
        response_lengths    = [3, 1]
        loss_masks          = [tensor([1, 1, 1]), tensor([1])]
        advantages          = [tensor([.707, .707, .707]), tensor([-.707])]
        micro_batch_indices = [[0, 1]]      # one micro-batch of both
        num_microbatches    = [1]           # in the only train step
        global_batch_sizes  = [2]           # which is of two executions
    """

    tokens: list[torch.Tensor]
    """[S][prompt + R] int64."""
    partition: list[int]
    """[S] positions of this rank's samples in TrainData."""
    weight_version: int
    recorded_indices: frozenset[int]
    """These two as in TrainData."""
    multimodal_train_inputs: list[dict[str, np.ndarray] | None]
    image_spans: list[list[list[int]]]
    """These two as in TrainData."""
    rollout_routed_experts: list[Any]
    """As in TrainData; taken out once the layers have it."""
    micro_batch_indices: list[list[int]]
    """Positions within this rank's share, one list per micro-batch, in the order of the train steps."""
    num_microbatches: list[int]
    """Per train step, micro-batches of each rank."""
    global_batch_sizes: list[int]
    """Per train step, executions over all ranks."""


class MicroBatch(TokenColumns, total=False):
    """What the model and a loss see at once; written by slime.training.micro_batches for each micro-batch.

    Columns that a converter or a hook added come along, by their names.

    Example: both samples above in one row, filled up to 10 tokens. Row p of the logits predicts the token at p + 1::

        tokens              = [[5, 6, 21, 22, 2, 5, 6, 2, 0, 0]]
        position_ids        = [[0, 1,  2,  3, 4, 0, 1, 2, 0, 1]]
        full_loss_masks     = [[0, 1,  1,  1, 0, 0, 1, 0, 0, 0]]
        padding             =  [0, 0,  0,  0, 0, 0, 0, 0, 1, 1]
        response_rows       =     [1,  2,  3,       6]
        response_tokens     =    [21, 22,  2,       2]
        response_row_counts = [3, 1]
        sample_rows         = [5, 3]
    """

    tokens: torch.Tensor
    """[1, T] packed, padded with 0; with context parallelism this rank's chunks, as all that is of T."""
    position_ids: torch.Tensor
    """[1, T] place in the sample; [4, 1, T] with images: that, and the three of M-RoPE."""
    packed_seq_params: Any
    """Megatron's PackedSeqParams: cumulative lengths of the packed samples."""
    unconcat_tokens: list[torch.Tensor]
    """[S][prompt + R]."""
    full_loss_masks: torch.Tensor
    """[1, T] int32, 1 where the logits predict a trained token."""
    padding: torch.Tensor
    """[T] bool, True where there is no token of a sample."""
    sample_rows: list[int]
    """[S] rows of each sample on this rank."""
    response_rows: torch.Tensor
    """[n] rows of the logits that predict response tokens; n = sum of R without context parallelism."""
    response_tokens: torch.Tensor
    """[n] the tokens that they predict."""
    response_row_counts: list[int]
    """[S] how many of them are each sample's."""
    response_places: torch.Tensor
    """[n] which of the sum of R tokens each row predicts; with context parallelism only."""
    further_tokens: list[torch.Tensor]
    """Per prediction layer (--enable-mtp-training, as the next four) the tokens that it embeds, [1, T]."""
    prediction_rows: list[torch.Tensor]
    prediction_places: list[torch.Tensor]
    prediction_targets: list[torch.Tensor]
    """Per prediction layer as `response_rows`, `response_places` and `response_tokens`."""
    first_pass: dict[str, torch.Tensor]
    """[sum of R] `log_probs` and `entropy` of the loss's first pass; written by slime's losses, read by records."""
    image_rows: torch.Tensor
    """[n] rows that are tokens of images; only where the rollout has some, as the next two."""
    image_tokens: torch.Tensor
    """[n] which of the tokens of `multimodal_train_inputs` each is."""
    multimodal_train_inputs: dict[str, torch.Tensor]
    """The processor's tensors (`pixel_values`, `image_grid_thw`, ...) of the micro-batch's images, joined along their
    first axis; those of one prompt are there once, however many samples it has. Empty without images."""
    predictions: list[Any]
    """Per prediction layer its logits (DeferredLogits); written when the model has run."""


FETCH_DEADLINE_S = 1800.0  # a share of a rollout, which the driver waited for: only the way here is left
PER_TOKEN: dict[str, type[np.generic]] = {
    "tokens": np.int64,
    "loss_masks": np.int32,
    "rollout_log_probs": np.float32,
    "teacher_log_probs": np.float32,
    "token_rewards": np.float32,
}
"""Name and type of the columns, as the trainer takes them."""


@dataclass(frozen=True)
class FlatColumn:
    """The values of all samples, one after the other.

    Attributes:
        values: [sum of lengths]; a tensor where NIXL carries it.
        lengths: [S] of each sample.
    """

    values: np.ndarray
    lengths: list[int]


def flatten_columns(share: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's share of a rollout with each column of `PER_TOKEN` as a `FlatColumn`; the others as they are.

    A column that is no list of samples stays as it is, too: whoever reads it says what is wrong with it.
    """
    return {
        name: _flat(values, PER_TOKEN[name]) if name in PER_TOKEN and isinstance(values, list) and values else values
        for name, values in share.items()
    }


def restore_columns(share: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `flatten_columns`: a list of an array per sample, which is a read-only view where it came out of the object
    store."""
    return {
        name: np.split(np.asarray(column.values), np.cumsum(column.lengths)[:-1])
        if isinstance(column, FlatColumn)
        else column
        for name, column in share.items()
    }


def _flat(samples: list[Any], dtype: type[np.generic]) -> FlatColumn:
    arrays = [np.asarray(sample, dtype=dtype) for sample in samples]
    return FlatColumn(np.concatenate(arrays), [len(array) for array in arrays])


def process_rollout_data(args: Args, rollout_data_ref: list[Any], dp_rank: int, dp_size: int) -> RolloutBatch:
    """Fetch this DP rank's share of a rollout out of Ray's object store.

    Args:
        args: unused by the object-store transport; part of the public signature.
        rollout_data_ref: one `Box` of an object reference per DP rank.
        dp_rank: whose share.
        dp_size: must equal the number of references.

    Returns:
        a RolloutBatch; its columns of one value per token (`PER_TOKEN`) are lists of read-only arrays.
    """
    import ray  # the one lazy import that the layering rule grants this module

    if (shares := len(rollout_data_ref)) != dp_size:
        raise ValueError(f"the rollout was split into {shares} shares, but there are {dp_size} data-parallel ranks")
    return cast(RolloutBatch, restore_columns(ray.get(rollout_data_ref[dp_rank].inner, timeout=FETCH_DEADLINE_S)))


def mask_sums(rollout_ids: Sequence[int], loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """[S] trained tokens of each sample's whole execution."""
    total: dict[int, int] = defaultdict(int)
    for rollout_id, mask in zip(rollout_ids, loss_masks, strict=True):
        total[rollout_id] += int(sum(mask))
    return [total[rollout_id] for rollout_id in rollout_ids]
