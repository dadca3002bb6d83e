"""The three dicts between a finished rollout and a loss, key by key: TrainData -> RolloutBatch -> MicroBatch.

`S` = samples of the rollout (TrainData) or of one DP rank (RolloutBatch) or of one micro-batch; `R` = response tokens
of one sample; `T` = packed tokens. Extra columns that a converter adds travel along untouched. These are types only:
nothing here builds or checks a dict.

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
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

if TYPE_CHECKING:
    import torch


class TrainData(TypedDict):
    """A whole rollout; written by slime.rollout.train_data, read and split by slime.ray.rollout.shares."""

    tokens: list[list[int]]
    """[S][prompt + R] token ids."""
    response_lengths: list[int]
    """[S] R of each sample."""
    rewards: list[float]
    """[S] after group normalisation (slime.rollout.rewards); read by the advantages."""
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
    total_lengths: NotRequired[list[int]]
    """[S] prompt + R; written by the split, read by the schedule and by packing."""


class RolloutBatch(TypedDict, total=False):
    """One DP rank's share: lists by the split, tensors by slime.backends.megatron_utils.data, completed by the actor.

    The trainer adds, each a list of [R] tensors: `log_probs` (policy before the update), `ref_log_probs`, `kl`,
    `advantages`, `returns`.
    """

    tokens: list[torch.Tensor]
    """[S][prompt + R] int64."""
    response_lengths: list[int]
    total_lengths: list[int]
    rewards: list[float]
    raw_reward: list[float]
    truncated: list[int]
    sample_indices: list[int]
    rollout_ids: list[int]
    loss_masks: list[torch.Tensor]
    """[S][R]."""
    rollout_mask_sums: list[int]
    rollout_log_probs: list[torch.Tensor]
    log_probs: list[torch.Tensor]
    """[S][R] by the trainer, before the update; absent when the first pass of the loss gives them."""
    ref_log_probs: list[torch.Tensor]
    kl: list[torch.Tensor]
    advantages: list[torch.Tensor]
    returns: list[torch.Tensor]
    partition: list[int]
    """[S] positions of this rank's samples in TrainData."""
    weight_version: int
    micro_batch_indices: list[list[int]]
    """Positions within this rank's share, one list per micro-batch, in the order of the train steps."""
    num_microbatches: list[int]
    """Per train step, micro-batches of each rank."""
    global_batch_sizes: list[int]
    """Per train step, executions over all ranks."""


class MicroBatch(TypedDict, total=False):
    """What the model and a loss see at once; written by slime.backends.megatron_utils.data for each micro-batch."""

    tokens: torch.Tensor
    """[1, T] packed, padded with 0."""
    unconcat_tokens: list[torch.Tensor]
    """[S][prompt + R]."""
    packed_seq_params: Any
    """Megatron's PackedSeqParams: cumulative lengths of the packed samples."""
    full_loss_masks: torch.Tensor
    """[1, T] 1 where the logits predict a trained token."""
    total_lengths: list[int]
    response_lengths: list[int]
    loss_masks: list[torch.Tensor]
    rollout_mask_sums: list[int]
    log_probs: list[torch.Tensor]
    ref_log_probs: list[torch.Tensor]
    rollout_log_probs: list[torch.Tensor]
    advantages: list[torch.Tensor]
    returns: list[torch.Tensor]
