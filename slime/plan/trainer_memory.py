"""Bytes per GPU (slot) of the trainer, for each pipeline stage: what stays, and the peak of each phase.

    state      weights P + gradients G + optimizer O
               16 bit: P = 2 p, G = 2 p (4 p with --accumulate-allreduce-grads-in-fp32), O = 12 p / shards (fp32 master
               copy and two Adam moments, sharded by the distributed optimizer over DP x CP); fp32: P = 4 p, G = 4 p,
               O = 8 p / shards, for there the weights are the master copy. p = the stage's parameters on this rank;
               experts are sharded over the ranks that hold the same ones.
    log-probs  state + the larger of a layer's forward and the head's forward (nothing is kept)
    train      state + the larger of
               - forward/backward: what the layers keep (times the micro-batches in flight) + the larger of the
                 head and one layer's backward
               - the optimizer's step: 4 p / shards for Adam's denominators (our Adam makes one for all weights), and
                 another 4 p / shards for fp32 copies of 16-bit gradients
               - the end of backward on the first stage: the embedding's gradient (of a tied one both parts and
                 their sum)

With --optimizer-cpu-offload a share of O is host memory, and the gradients and weights of that share pass through
copies there, 4 p and P; Adam then works weight by weight, without temporaries of the model's size, as it does with
--use-precision-aware-optimizer (O = 10 p with --exp-avg-dtype bf16). With --cpu-offloading what N layers keep is host
memory, but for the two that are on their way.

SGD keeps one fp32 moment in place of Adam's two, Muon one of each matrix that is no table, and --use-stateless-adam
none (`moment_bytes`).

With --train-backend fsdp parameters are fp32 and sharded over all ranks of a copy of the model: P = 4 p / shards,
O = 8 p / shards with Adam; G = 4 p / shards during a train step alone. Passes also hold what is gathered, in the
type of the pass: the whole model where layers stay gathered, else the root's part (embedding, output layer) and two
groups of layers.

A tower that sees images is whole on every rank of Megatron's first stage, sharded with FSDP2, and there only where
images are trained on, or with FSDP2. It sees each image of a micro-batch once (`BatchPlan.image_tokens`).

With --lora-rank only the adapters have gradients and an optimizer. A critic is a second trainer without output layer
on the same GPUs. Without a GPU the reference's copy and the weights that it pushes aside lie in the same memory and
count too; with one they are host memory. Fragmentation is not counted: `Device.reserved_bytes` is for context
and libraries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slime.plan.activations import (
    Compute,
    HeadBytes,
    HeadRows,
    Recompute,
    deferred_head_bytes,
    final_norm_saved,
    head_bytes,
    layer_forward,
    layer_saved,
    layer_working,
    sent_saved,
    stage_saved,
)
from slime.plan.layout import BatchPlan, ParallelLayout
from slime.plan.tower import Tower, tower_layer_saved, tower_saved
from slime.utils.misc import num_weight_versions
from slime.utils.model_shape import ModelShape

if TYPE_CHECKING:
    from slime.config.args import Args


# Per token of a rank's share of a rollout: ids, positions, the packed row (int64 each) and two int32 masks
ROW_BYTES = 32
# Per response token: index and target (int64), log-probs of trainer, engine and reference, KL, advantage, return
RESPONSE_ROW_BYTES = 40

PRECISION_DEFAULTS: dict[str, Any] = {
    "grad_reduce_in_fp32": False,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 1.0,
    "use_precision_aware_optimizer": False,
    "exp_avg_dtype": "fp32",
    "optimizer": "adam",
}
OFFLOAD_DEFAULTS = {"cpu_offloading": False, "cpu_offloading_num_layers": 0}
RECOMPUTE_DEFAULTS = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
}


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each GPU of one pipeline stage."""

    stage: int
    params: int  # Parameters on one rank
    trained_params: int  # Of these, with gradients: fewer with LoRA
    weights: int
    gradients: int
    optimizer: int
    state: int  # The three together: what stays between rollouts
    # Reference, old actor, teacher and the weights that they push aside, and what is offloaded of optimizer and
    # activations; on CPU part of state's memory
    host_copies: int
    rollout_data: int
    activations: int  # What the layers keep for the backward pass, all micro-batches in flight
    head: int  # Logits and loss, the larger of forward and backward; 0 on stages without the output layer
    log_probs_peak: int
    train_peak: int
    peak_is: str  # What the training peak is made of: "forward/backward", "optimizer step" or "embedding gradient"


@dataclass(frozen=True)
class TrainerMemory:
    """Of the whole trainer."""

    stages: list[StageMemory]
    precision: str
    recompute: str  # In words

    @property
    def peak(self) -> StageMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: max(stage.train_peak, stage.log_probs_peak))


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter."""

    name: str
    weight: int
    gradient: int
    optimizer: float  # Sharded over the data-parallel ranks
    step: int  # More of it while the optimizer steps, sharded as well
    saved: int  # Of optimizer state in a checkpoint
    on_host: float = 0  # Of --optimizer-cpu-offload in host memory, sharded as well

    @classmethod
    def of(cls, args: Args) -> Precision:
        """What the precision flags make Megatron allocate."""
        flags = PRECISION_DEFAULTS | vars(args)
        found = cls("fp32", weight=4, gradient=4, optimizer=8, step=4, saved=8)
        if args.bf16 or args.fp16:
            in_fp32, name = flags["grad_reduce_in_fp32"], "bf16" if args.bf16 else "fp16"
            step = 4 if in_fp32 else 8
            found = cls(name, weight=2, gradient=4 if in_fp32 else 2, optimizer=12, step=step, saved=12)
        if args.use_stateless_adam:
            return replace(found, optimizer=found.optimizer - 8, saved=found.saved - 8)
        if not (flags["optimizer_cpu_offload"] or flags["use_precision_aware_optimizer"]):
            return found
        held = 12 - 2 * (flags["exp_avg_dtype"] == "bf16")
        share = float(flags["optimizer_offload_fraction"]) if flags["optimizer_cpu_offload"] else 0.0
        return replace(found, optimizer=(1 - share) * held, step=0, on_host=share * (held + 4 + found.weight))


def moment_bytes(args: Args, shape: ModelShape, trained: int) -> int:
    """Bytes of what the optimizer of --train-backend fsdp remembers of `trained` parameters, on all ranks."""
    kind, parts = (PRECISION_DEFAULTS | vars(args))["optimizer"], shape.components
    if kind == "adam":
        return 8 * trained
    tables = parts["embedding"] + parts["output layer"] + parts["norms and routers"]
    return 4 * (trained + (tables if kind == "muon" else 0))


def recompute_of(args: Args) -> Recompute:
    """The recomputation that the flags ask for."""
    values = RECOMPUTE_DEFAULTS | {name: value for name, value in vars(args).items() if name in RECOMPUTE_DEFAULTS}
    return Recompute(
        granularity=values["recompute_granularity"],
        method=values["recompute_method"],
        num_layers=values["recompute_num_layers"] or 1,
        modules=tuple(values["recompute_modules"] or ("core_attn",)),
    )


def trainer_memory(
    args: Args,
    shape: ModelShape,
    layout: ParallelLayout,
    batch: BatchPlan,
    *,
    is_critic: bool = False,
    tower: Tower | None = None,
) -> TrainerMemory:
    """Bytes of every pipeline stage of the trainer (see the module's docstring for the formula).

    A critic has one value per token in place of logits, and no reference.
    """
    precision, recompute = Precision.of(args), recompute_of(args)
    if is_critic:
        shape = replace(shape, is_tied=True)  # one embedding, and no output layer
    trainer = _Trainer(args, shape, layout, batch, is_critic, tower)
    stages = [trainer.stage(stage) for stage in range(layout.pp)]
    return TrainerMemory(stages, precision.name, describe(recompute))


def describe(recompute: Recompute) -> str:
    """The recomputation in words."""
    if recompute.granularity == "full":
        return f"full, {recompute.method or 'uniform'}, {recompute.num_layers} layer(s)"
    return f"selective: {', '.join(recompute.modules)}" if recompute.granularity else "none"


def rank_params(shape: ModelShape, layout: ParallelLayout, stage: int) -> tuple[int, int]:
    """(parameters outside experts, expert parameters) of one rank of a pipeline stage."""
    is_first, is_last = stage == 0, stage == layout.pp - 1
    layers = [shape.layer_params(layer) for layer in layout.stage_layers[stage]]
    if is_last:
        layers += [shape.mtp_params()] * shape.num_mtp_layers
    dense = sum((layer.attention + layer.mlp) // layout.tp + layer.replicated for layer in layers)
    # A tied output layer has a matrix of its own only where the embedding is on another stage.
    embeddings = is_first + (is_last and (not shape.is_tied or not is_first))
    dense += embeddings * shape.embedding_params // layout.tp + is_last * shape.norm_params
    return dense, sum(layer.experts for layer in layers) // (layout.ep * layout.etp)


def in_flight(layout: ParallelLayout, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once (1F1B; interleaved: in shares of the stage)."""
    if layout.pp == 1:
        return 1.0
    if layout.vpp == 1:
        return float(min(layout.pp - stage, micro_batches))
    warm_up = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.group_size + 1
    return min(warm_up, micro_batches * layout.vpp) / layout.vpp


def num_host_copies(args: Args) -> int:
    """Sets of weights kept in host memory: each other model, old versions, and what the first of them pushes aside."""
    others = [args.use_kl_loss or args.kl_coef != 0, args.use_opd and args.opd_type == "megatron"]
    count = sum(map(bool, others))
    if args.keep_old_actor:
        count += num_weight_versions(args.async_buffer_size, args.update_weights_interval)
    return count + 1 if count else 0


@dataclass(frozen=True)
class _Passes:
    """Bytes of one micro-batch on one stage, beside the state."""

    activations: int
    head: int
    forward_only: int
    backward: int  # Activations and what works beside them at the fullest moment


@dataclass(frozen=True)
class _Trainer:
    """What the memory of a stage depends on."""

    args: Args
    shape: ModelShape
    layout: ParallelLayout
    batch: BatchPlan
    is_critic: bool
    tower: Tower | None

    @property
    def precision(self) -> Precision:
        return Precision.of(self.args)

    @property
    def compute(self) -> Compute:
        is_cpu = self.args.accelerator == "cpu"
        is_fused, is_plain = self.args.bias_swiglu_fusion, self.args.train_backend == "fsdp"
        weight = self.precision.weight
        return Compute(is_cpu, weight, has_fused_gate=is_fused and not is_cpu, is_plain=is_plain and not is_cpu)

    @property
    def holds_both_ends(self) -> bool:
        """Whether one stage has the embedding and an output layer tied to it."""
        return self.shape.is_tied and self.layout.pp == 1 and not self.is_critic

    def stage(self, stage: int) -> StageMemory:
        if self.args.train_backend == "fsdp":
            return self.sharded()
        precision = self.precision
        params, trained, shards = self.num_params(stage)
        weights, gradients = params * precision.weight, trained * precision.gradient
        optimizer = round(shards * precision.optimizer)
        state = weights + gradients + optimizer
        host = 0 if self.is_critic else num_host_copies(self.args) * weights
        host += round(shards * precision.on_host) + self.offloaded(stage)
        passes = self.passes(stage)
        peaks = {
            "forward/backward": passes.backward,
            "optimizer step": round(shards * precision.step),
            "embedding gradient": (3 if self.holds_both_ends else 1) * self.embedding if stage == 0 else 0,
        }
        sizes = {"params": params, "trained_params": trained, "optimizer": optimizer, "state": state}
        sizes |= {"weights": weights, "gradients": gradients, "host_copies": host}
        return self.at_peak(stage, sizes, peaks, passes)

    def sharded(self) -> StageMemory:
        """Bytes of the only stage of --train-backend fsdp."""
        args, layout, passes = self.args, self.layout, self.passes(0)
        params, trained, _ = self.num_params(0)
        shards = layout.world_size // args.fsdp_replicate_size
        weights, gradients = 4 * params // shards, 4 * trained // shards
        optimizer = moment_bytes(args, self.shape, trained) // shards
        ends = (1 if self.shape.is_tied else 2) * self.shape.embedding_params + self.shape.norm_params
        in_layers = tower.num_layers * tower.layer_params if (tower := self.tower) else 0
        ends += self.tower_params(0) - in_layers
        of_layer = (params - in_layers - ends) / max(self.shape.num_layers, 1)
        group = max(of_layer, min(args.fsdp_min_group_params + of_layer, params - ends))
        keeps = shards == 1 or not args.fsdp_reshard_after_forward
        gathered = round((params if keeps else min(params, ends + 2 * group)) * self.precision.weight)
        host = 0 if self.is_critic else num_host_copies(args) * weights
        kept = gradients if self.batch.micro_batches_per_rank > 1 else 0
        at_end = 0 if args.lora_rank else ends
        peaks = {
            "forward/backward": gathered + kept + passes.backward,
            # the reduction's input and output in fp32, beside what is gathered
            "embedding gradient": gradients + at_end * (self.precision.weight + 4 + 4 // shards),
        }
        sizes = {"params": params, "trained_params": trained, "optimizer": optimizer, "state": weights + optimizer}
        sizes |= {"weights": weights, "gradients": gradients, "host_copies": host}
        return self.at_peak(0, sizes, peaks, replace(passes, forward_only=gathered + passes.forward_only))

    def at_peak(self, stage: int, sizes: dict[str, int], peaks: dict[str, int], passes: _Passes) -> StageMemory:
        """A stage of these sizes, where the largest of `peaks` comes on top of what stays during training."""
        data = _rollout_data(self.batch, self.layout)
        floor = sizes["state"] + data + (sizes["host_copies"] if self.compute.is_cpu else 0)
        largest = max(peaks, key=lambda name: peaks[name])
        return StageMemory(
            stage,
            rollout_data=data,
            activations=passes.activations,
            head=passes.head,
            log_probs_peak=floor + passes.forward_only,
            train_peak=floor + peaks[largest],
            peak_is=largest,
            **sizes,
        )

    @property
    def embedding(self) -> int:
        """Bytes of the embedding's gradient on one rank."""
        return 0 if self.args.lora_rank else self.shape.embedding_params // self.layout.tp * self.precision.weight

    def num_params(self, stage: int) -> tuple[int, int, float]:
        """(parameters, those with gradients, those whose optimizer state this rank keeps)."""
        layout, tower = self.layout, self.tower_params(stage)
        num_params = sum(rank_params(self.shape, layout, stage)) + tower
        if self.args.lora_rank:
            dense, experts = self.adapters(stage)
            shards = dense / layout.optimizer_shards + experts / layout.expert_optimizer_shards
            return num_params + dense + experts, dense + experts, shards
        if self.predictions(stage) and stage > 0:  # the first stage's embedding, lent
            num_params += self.shape.embedding_params // layout.tp
        # layers that predict further tokens are frozen unless they are trained
        trained = replace(self.shape, num_mtp_layers=self.predictions(stage))
        dense, experts = rank_params(trained, layout, stage)
        dense += tower * self.trains_tower
        return num_params, dense + experts, dense / layout.optimizer_shards + experts / layout.expert_optimizer_shards

    def tower_params(self, stage: int) -> int:
        """Parameters of the tower on one rank of a stage, before FSDP2 shards them."""
        args, tower = self.args, self.tower
        is_there = stage == 0 and (args.train_backend == "fsdp" or bool(args.multimodal_keys))
        return tower.num_params if tower is not None and is_there else 0

    @property
    def trains_tower(self) -> bool:
        return bool(self.args.multimodal_keys) and not self.args.freeze_vision_tower

    def tower_passes(self, stage: int) -> tuple[int, int]:
        """(bytes that the tower keeps of a micro-batch's images, that one of its layers works with)."""
        tower, recompute = self.tower, recompute_of(self.args)
        if tower is None or not self.tower_params(stage):
            return 0, 0
        patches = self.batch.image_tokens * tower.patches_per_token
        recomputes = self.args.train_backend == "fsdp" and recompute.granularity == "full"
        kept, layer = tower_saved(tower, self.compute, recomputes=recomputes)
        return kept * patches * self.trains_tower, max(layer, tower_layer_saved(tower, self.compute)) * patches

    def adapters(self, stage: int) -> tuple[int, int]:
        """(parameters of LoRA adapters outside experts, of experts) of one rank of a pipeline stage."""
        layout, rank = self.layout, self.args.lora_rank or 0
        layers = [self.shape.adapter_params(layer, rank) for layer in layout.stage_layers[stage]]
        dense = sum((layer.attention + layer.mlp) // layout.tp + layer.replicated for layer in layers)
        if stage == layout.pp - 1 and not self.is_critic:
            cut, whole = self.shape.output_adapter_params(rank)
            dense += cut // layout.tp + whole
        return dense, sum(layer.experts for layer in layers) // layout.ep

    def predictions(self, stage: int) -> int:
        """Layers of a stage that predict further tokens and are trained."""
        is_last = stage == self.layout.pp - 1
        return self.shape.num_mtp_layers if is_last and self.args.enable_mtp_training else 0

    def num_offloaded(self, stage: int) -> int:
        """Layers of a stage whose activations wait in host memory (--cpu-offloading)."""
        flags = OFFLOAD_DEFAULTS | vars(self.args)
        last = len(self.layout.stage_layers[stage]) - 1
        return max(0, min(int(flags["cpu_offloading_num_layers"]), last)) if flags["cpu_offloading"] else 0

    def offloaded(self, stage: int) -> int:
        """Bytes of host memory for those activations."""
        layers = self.layout.stage_layers[stage][: self.num_offloaded(stage)]
        kept = sum(layer_saved(self.shape, layer, self.layout, self.compute) for layer in layers)
        flying = in_flight(self.layout, stage, self.batch.micro_batches_per_rank)
        return round(kept * self.batch.micro_batch_tokens * flying)

    def passes(self, stage: int) -> _Passes:
        shape, layout, compute = self.shape, self.layout, self.compute
        tokens, layers = self.batch.micro_batch_tokens, layout.stage_layers[stage]
        if self.num_offloaded(stage) and not compute.is_cpu:
            layers = layers[max(0, self.num_offloaded(stage) - 2) :]  # two are on their way
        layers += (shape.num_layers - 1,) * self.predictions(stage)  # they are like the last layer
        kept, again = stage_saved(shape, layers, layout, compute, recompute_of(self.args))
        if layout.vpp > 1 and self.args.overlap_p2p_comm:
            kept += sent_saved(shape, layout, compute, layout.vpp - (stage == layout.pp - 1))
        of_images, of_a_tower_layer = self.tower_passes(stage)
        flying = in_flight(layout, stage, self.batch.micro_batches_per_rank)
        saved = round((kept * tokens + of_images) * flying)
        layer = layers[-1] if layers else 0
        working = max(again * tokens + layer_working(shape, layer, layout, compute, tokens), of_a_tower_layer)
        forward = max(layer_forward(shape, layer, layout, compute, self.batch.log_prob_tokens), of_a_tower_layer)
        head_size = 0
        if stage == layout.pp - 1:
            of_norm = final_norm_saved(shape, layout, compute) * tokens
            saved += of_norm
            working -= of_norm * compute.is_plain  # autograd frees it before the layers' turn
            if not self.is_critic:
                head, forward_head = self.heads()
                head_size, forward = max(head.forward, head.backward), max(forward, forward_head.forward)
            if self.holds_both_ends:
                working += self.embedding  # the output layer's part of its gradient waits for the other part
        return _Passes(saved, head_size, forward, saved + max(head_size, working))

    def heads(self) -> tuple[HeadBytes, HeadBytes]:
        """Of a train step, and of a pass without gradients, which makes whole logits with Megatron."""
        args, batch, chunk = self.args, self.batch, self.args.log_probs_chunk_size
        of_this = (self.shape, self.layout, self.compute)
        tokens, log_prob_tokens = batch.micro_batch_tokens, batch.log_prob_tokens
        responses = min(batch.micro_batch_response_tokens, tokens)
        log_prob_responses = min(batch.log_prob_response_tokens, log_prob_tokens)
        without = HeadRows(log_prob_tokens, log_prob_responses, chunk, False)
        rows = HeadRows(tokens, responses, chunk, args.entropy_coef != 0)
        head = head_without = head_bytes
        if args.recompute_loss_function and args.loss_type != "custom_loss":
            head = deferred_head_bytes
            head_without = deferred_head_bytes if args.train_backend == "fsdp" else head_bytes
        return head(*of_this, rows), head_without(*of_this, without)


def _rollout_data(batch: BatchPlan, layout: ParallelLayout) -> int:
    """A rank's share of a rollout as tensors, at its longest."""
    tokens = batch.samples_per_rollout * batch.lengths.longest
    responses = batch.samples_per_rollout * batch.lengths.max_response
    return (tokens * ROW_BYTES + responses * RESPONSE_ROW_BYTES) // layout.dp
