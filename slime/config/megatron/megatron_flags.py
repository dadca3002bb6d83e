"""What each of Megatron's options does here: one table, and the sentences that follow from it.

`used`: it has an effect on what is built today. `warned`: it is accepted, has no effect here, and one warning says
so, unless it asks for what is so anyway. `refused`: another value than the default stops a run, with the reason.
Options that slime's own dataclasses define (SLIMES) are not classified here; refused values are in flag_classes.py,
rules between options in arguments.py and layout_checks.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["used", "warned", "refused"]


class Group(NamedTuple):
    """Options that share a fate.

    Attributes:
        kind: see above.
        options: option strings, separated by white space.
        reason: of a warning or a refusal, as the end of a sentence.
    """

    kind: Kind
    options: str
    reason: str = ""


SLIMES = ["--mtp-num-layers", "--mtp-loss-scaling-factor", "--calculate-per-token-loss", "--lr", "--clip-grad"]

ALWAYS = "always so here"
"""Reason of warned options that ask for what is done anyway; no warning names those."""
NO_BOUND = "rotary positions have no end"
"""Reason of a bound that holds for any model here: every line for Megatron has to give it, so no warning names it."""

_EIGHT_BIT = """--fp8-quantizer-factory --fp8-margin --fp8-interval
    --fp8-amax-history-len --fp8-amax-compute-algo --no-fp8-wgrad --fp8-dot-product-attention
    --fp8-multi-head-attention --tp-only-amax-red --first-last-layers-bf16 --num-layers-at-start-in-bf16
    --num-layers-at-end-in-bf16 --reuse-grad-buf-for-mxfp8-param-ag --keep-fp8-transpose-cache
    --te-precision-config-file --fp4-format --fp4-recipe --fp4-param-gather --fp4-quantizer-factory
    --use-kitchen --use-kitchen-attention --kitchen-attention-backend"""

TABLE: tuple[Group, ...] = (
    # ------------------------------------------------------------------------------------------------------- used
    Group("used", "--memory-snapshot-path"),
    Group("used", "--fp8-format --fp8-recipe"),
    Group("used", "--exit-signal-handler --exit-signal --exit-duration-in-mins --save-retain-interval"),
    Group(
        "used",
        """--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --group-query-attention
        --num-query-groups --kv-channels --softmax-scale --vocab-size --make-vocab-size-divisible-by
        --padded-vocab-size --normalization --norm-epsilon
        --disable-bias-linear --add-qkv-bias --qk-layernorm --post-self-attn-layernorm --post-mlp-layernorm
        --swiglu --untie-embeddings-and-output-weights
        --position-embedding-type --use-rotary-position-embeddings --rotary-base --rotary-percent
        --rotary-seq-len-interpolation-factor
        --rotary-interleaved --use-rope-scaling --rope-scaling-factor --rope-scaling-low-freq-factor
        --rope-scaling-high-freq-factor --rope-scaling-original-max-position-embeddings
        --init-method-std --embedding-init-method-std --no-initialization
        --hidden-dropout --attention-dropout --fp32-residual-connection --no-clone-scatter-output-in-embedding""",
    ),
    Group(
        "used",
        """--num-experts --moe-layer-freq --moe-ffn-hidden-size --moe-router-topk --moe-router-pre-softmax
        --moe-router-score-function --moe-router-dtype --moe-router-topk-scaling-factor
        --expert-model-parallel-size --expert-tensor-parallel-size --moe-shared-expert-intermediate-size
        --moe-shared-expert-gate --moe-router-num-groups --moe-router-group-topk --moe-router-enable-expert-bias
        --moe-router-bias-update-rate --moe-router-load-balancing-type --moe-aux-loss-coeff --moe-z-loss-coeff
        --moe-grouped-gemm --moe-enable-deepep --moe-token-dispatcher-type""",
    ),
    Group(
        "used",
        """--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim
        --rope-type --rotary-scaling-factor --original-max-position-embeddings --beta-fast --beta-slow --mscale
        --mscale-all-dim""",
    ),
    Group(
        "used",
        """--spec --apply-layernorm-1p --attention-output-gate --experimental-attention-variant --linear-attention-freq
        --linear-conv-kernel-dim --linear-key-head-dim --linear-value-head-dim --linear-num-key-heads
        --linear-num-value-heads --dsa-indexer-n-heads --dsa-indexer-head-dim --dsa-indexer-topk""",
    ),
    Group(
        "used",
        """--tensor-model-parallel-size --sequence-parallel --deterministic-mode
        --recompute-granularity --recompute-activations --recompute-method --recompute-num-layers
        --recompute-modules --distribute-saved-activations --distribute-checkpointed-activations
        --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size --ddp-num-buckets --ddp-average-in-collective
        --ddp-pad-buckets-for-high-nccl-busbw --ddp-reduce-scatter-with-fp32-accumulation
        --no-gradient-accumulation-fusion --no-bias-swiglu-fusion
        --num-distributed-optimizer-instances --use-sharp --sharp-enabled-group --nccl-communicator-config-path""",
    ),
    Group(
        "used",
        """--pipeline-model-parallel-size --context-parallel-size
        --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank
        --microbatch-group-size-per-virtual-pipeline-stage --decoder-first-pipeline-num-layers
        --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
        --no-overlap-p2p-communication""",
    ),
    Group(
        "used",
        """--bf16 --fp16 --transformer-impl --attention-backend --use-flash-attn
        --disable-bf16-reduced-precision-matmul --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16
        --loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis
        --no-check-for-nan-in-loss-and-grad --check-for-large-grads --log-num-zeros-in-grad""",
    ),
    Group(
        "used",
        """--optimizer --sgd-momentum --muon-momentum --muon-use-nesterov --muon-scale-mode --muon-num-ns-steps
        --muon-extra-scale-factor --adam-beta1 --adam-beta2 --adam-eps --no-decoupled-weight-decay
        --weight-decay --start-weight-decay --end-weight-decay --weight-decay-incr-style
        --apply-wd-to-qk-layernorm --no-weight-decay-cond-type --decoupled-lr --decoupled-min-lr
        --min-lr --lr-decay-style --lr-decay-iters --lr-warmup-iters --lr-warmup-fraction --lr-warmup-init
        --lr-wsd-decay-style --lr-wsd-decay-iters --use-checkpoint-opt_param-scheduler""",
    ),
    Group(
        "used",
        """--cpu-offloading --cpu-offloading-num-layers --fine-grained-activation-offloading --offload-modules
        --min-offloaded-tensor-size --optimizer-cpu-offload --optimizer-offload-fraction
        --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params --use-precision-aware-optimizer
        --main-grads-dtype --exp-avg-dtype""",
    ),
    Group("used", "--ckpt-step --no-load-optim --no-load-rng --finetune --exit-on-missing-checkpoint --ckpt-format"),
    # ----------------------------------------------------------------------------------------------------- warned
    Group(
        "warned",
        """--use-distributed-optimizer --attention-softmax-in-fp32 --use-mcore-models --variable-seq-lengths
        --override-opt_param-scheduler --use-dist-ckpt --dist-ckpt-format --dist-ckpt-optim-fully-reshardable
        --ckpt-fully-parallel-save --no-batch-p2p-sync""",
        ALWAYS,
    ),
    Group(
        "warned",
        "--cpu-offloading-double-buffering",
        "a layer's offloaded activations always come back while the layer behind it goes backward",
    ),
    Group(
        "warned",
        "--use-torch-optimizer-for-cpu-offload --no-store-param-remainders",
        "torch's kernel updates whole fp32 weights in any case",
    ),
    Group(
        "warned",
        """--no-rope-fusion --no-masked-softmax-fusion
        --no-bias-gelu-fusion --no-bias-dropout-fusion --no-persist-layer-norm
        --memory-efficient-layer-norm --te-rng-tracker --inference-rng-tracker --fused-single-qkv-rope
        --use-fused-weighted-squared-relu --no-async-tensor-model-parallel-allreduce
        --disable-parameter-transpose-cache --use-te-activation-func --activation-func-fp8-input-store
        --tp-comm-overlap --tp-comm-overlap-cfg --disable-tp-comm-bulk-wgrad --disable-tp-comm-bulk-dgrad
        --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad
        --disable-tp-comm-split-ag --tp-comm-atomic-ag --disable-tp-comm-split-rs --tp-comm-atomic-rs
        --tp-comm-overlap-disable-qkv --tp-comm-overlap-disable-fc1 --tp-comm-bootstrap-backend
        --delay-wgrad-compute --enable-autocast --moe-permute-fusion --moe-router-fusion""",
        "it belongs to kernels of TransformerEngine and Apex that slime does without",
    ),
    Group(
        "warned",
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl --fp16-lm-cross-entropy",
        "slime computes log-probs itself",
    ),
    Group(
        "warned",
        "--fp8-param-gather",
        "weights stay in 16 bit, and are quantised where they are multiplied",
    ),
    Group(
        "warned",
        "--seq-length",
        "packed samples have lengths of their own",
    ),
    Group("warned", "--check-for-spiky-loss", "the trackers get the loss of every step, and have alarms of their own"),
    Group(
        "warned",
        """--use-cpu-initialization --onnx-safe --local-rank --lazy-mpu-init --no-position-embedding
        --use-tp-pp-dp-mapping --config-logger-dir --enable-experimental""",
        "slime has another way",
    ),
    Group(
        "warned",
        """--use-ring-exchange-p2p --pipeline-model-parallel-comm-backend --no-scatter-gather-tensors-in-pipeline
        --no-align-param-gather --no-align-grad-reduce --num-microbatches-with-partial-activation-checkpoints
        --defer-embedding-wgrad-compute --wgrad-deferral-limit""",
        "pipeline stages send whole tensors over NCCL or gloo, reduce and gather when they are ready, and treat all "
        "micro-batches alike",
    ),
    Group("warned", "--max-position-embeddings", NO_BOUND),
    Group("warned", "--cp-comm-type", "context-parallel ranks gather each other's keys and values"),
    Group(
        "warned",
        "--train-iters --train-samples --eval-iters --full-validation --exit-interval",
        "--num-rollout, --num-epoch and --eval-interval say how long a run is",
    ),
    Group(
        "warned",
        """--log-params-norm --log-throughput --log-progress --log-energy --log-interval --log-memory-interval
        --log-device-memory-used --log-straggler --disable-straggler-on-startup --straggler-ctrlr-port
        --straggler-minmax-count --logging-level --timing-log-level --timing-log-option --tensorboard-dir
        --tensorboard-log-interval --tensorboard-queue-size --log-timers-to-tensorboard
        --log-batch-size-to-tensorboard --log-learning-rate-to-tensorboard --no-log-learnig-rate-to-tensorboard
        --no-log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard
        --log-world-size-to-tensorboard --wandb-exp-name --wandb-entity --wandb-save-dir
        --no-barrier-with-level-1-timing --moe-per-layer-logging""",
        "slime logs by itself: see --output-dir, --use-wandb and --use-tensorboard",
    ),
    Group(
        "warned",
        """--use-persistent-ckpt-worker --ckpt-assume-constant-structure --ckpt-fully-parallel-load
        --no-ckpt-fully-parallel-save --dist-ckpt-save-pre-mcore-014 --auto-detect-ckpt-format
        --dist-ckpt-strictness --distrib-optim-fully-reshardable-mem-efficient""",
        "slime's checkpoints are torch_dist, complete and readable by any layout",
    ),
    Group(
        "warned",
        """--num-workers --dataloader-type --split --data-cache-path --no-mmap-bin-files --reset-position-ids
        --reset-attention-mask --eod-mask-loss --no-create-attention-mask-in-dataloader
        --tokenizer-type --tokenizer-model --vocab-file --merge-file --vocab-extra-ids""",
        "data come from --prompt-data and the tokenizer from --hf-checkpoint",
    ),
    Group(
        "warned",
        """--manual-gc --manual-gc-interval --no-manual-gc-eval --empty-unused-memory-level --train-sync-interval
        --check-weight-hash-across-dp-replicas-interval --disable-gloo-process-groups
        --high-priority-stream-groups --symmetric-ar-type --disable-symmetric-registration""",
        "it does not change results, and slime does not have it",
    ),
    Group(
        "warned",
        """--inference-sampling-seed --flash-decode --use-inference-optimized-layers --inference-fuse-tp-communication
        --mlp-chunks-for-prefill --cache-mla-latents""",
        "it is about inference, which SGLang does",
    ),
    # --------------------------------------------------------------------------------------------- refused, later
    Group(
        "refused",
        "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank",
        "all micro-batches are spread over --context-parallel-size ranks; --max-tokens-per-gpu bounds what each holds",
    ),
    Group(
        "refused",
        "--hierarchical-context-parallel-sizes",
        "it belongs to the a2a+p2p exchange of TransformerEngine; context-parallel ranks gather keys and values here",
    ),
    Group(
        "refused",
        "--overlap-param-gather-with-optimizer-step",
        "all chunks of a rank take one optimizer step; --overlap-param-gather overlaps with the forward pass",
    ),
    Group(
        "refused",
        "--overlap-p2p-communication-warmup-flush",
        "Megatron 0.16.1 waits for ever in passes without gradients with it",
    ),
    Group("refused", "--mtp-standalone", "it follows from --pipeline-model-parallel-layout"),
    Group(
        "refused",
        "--dsa-indexer-loss-coeff --dsa-indexer-use-sparse-loss",
        "indexers of sparse attention are not trained here and stay as the checkpoint has them",
    ),
    Group("refused", "--linear-attention-type", "use --experimental-attention-variant gated_delta_net"),
    Group(
        "refused",
        "--window-size --window-attn-skip-freq --qk-l2-norm --no-rope-freq --mrope-section",
        "it is of attention that no family of docs/model_families.md has, and slime's own attention has no such part",
    ),
    Group(
        "refused",
        "--softmax-type",
        "a learnable sink is in --spec slime_plugins.models.learnable_softmax_attention get_learnable_softmax_spec",
    ),
    Group(
        "refused",
        "--apply-query-key-layer-scaling",
        "it rescales scores for fp16 in Megatron's own attention; slime's computes the softmax in fp32",
    ),
    Group(
        "refused",
        """--apply-residual-connection-post-layernorm --squared-relu --quick-geglu --openai-gelu
        --glu-linear-offset --activation-func-clamp-value --heterogeneous-layers-config-path
        --heterogeneous-layers-config-encoded-json""",
        "it makes a layer that no family of docs/model_families.md has, so that no weights could be loaded into it or "
        "sent to engines; a model of your own is built by --spec or --custom-model-provider-path",
    ),
    Group(
        "refused",
        "--init-method-xavier-uniform",
        "weights are loaded and never random; --init-method-std says the spread of those that are replaced",
    ),
    Group(
        "refused",
        "--no-cpu-offloading-activations --cpu-offloading-weights",
        "weights stay on the GPU, where every micro-batch needs them; --cpu-offloading is about activations",
    ),
    Group(
        "refused",
        "--main-params-dtype --exp-avg-sq-dtype",
        "16 bit weights to update and second moments stand still under small updates, unless TransformerEngine scales "
        "them, which slime does without; they stay in fp32",
    ),
    Group(
        "refused",
        _EIGHT_BIT,
        "training in 8 and 4 bit needs the kernels of TransformerEngine or Kitchen, which slime does without",
    ),
    Group(
        "refused",
        "--batch-invariant-mode",
        "Megatron's batch-invariant kernels replace those of TransformerEngine, which slime does without; "
        "--deterministic-mode repeats a run bit for bit, and use_tis and its relatives correct what is left of the "
        "difference between engine and trainer",
    ),
    Group(
        "refused",
        "--use-nccl-ub",
        "what registered buffers are for, reductions inside the NVLink switch (NVLS), is off in trainers and engines: "
        "the group that carries weights between them fails with it",
    ),
    Group(
        "refused",
        "--muon-no-split-qkv --muon-fp32-matmul-prec --muon-tp-mode",
        "Muon is --train-backend fsdp's, whose query, key and value are matrices of their own, which orthogonalises "
        "whole matrices in bf16",
    ),
    Group(
        "refused",
        "--qk-clip --qk-clip-alpha --qk-clip-threshold --log-max-attention-logit",
        "the largest attention logit is measured by the library TransformerEngine, which slime does without",
    ),
    Group(
        "refused",
        """--non-persistent-save-interval --non-persistent-ckpt-type --non-persistent-global-ckpt-dir
        --non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo --replication --replication-jump
        --replication-factor""",
        "Megatron's local and replicated checkpoints need nvidia_resiliency_ext, which slime does not install; "
        "--save-interval with --keep-checkpoints and --async-save keeps few and recent ones",
    ),
    # --------------------------------------------------------------------------------------- refused, with a reason
    Group(
        "refused",
        """--moe-expert-capacity-factor --moe-pad-expert-input-to-capacity --moe-token-drop-policy
        --moe-token-dropping --moe-input-jitter-eps --moe-router-force-load-balancing""",
        "a token's experts would depend on chance or on other tokens, and the policy would not be the engine's",
    ),
    Group(
        "refused",
        """--moe-flex-dispatcher-backend --moe-deepep-num-sms --moe-hybridep-num-sms
        --moe-shared-expert-overlap --overlap-moe-expert-parallel-comm --ep-overlap-early-attn-memory-release
        --moe-use-legacy-grouped-gemm --moe-latent-size --moe-router-padding-for-quantization
        --moe-router-padding-for-fp8 --moe-extended-tp""",
        "it belongs to DeepEP, TransformerEngine or a removed part of Megatron; tokens go to experts by all-to-all",
    ),
    Group("refused", "--moe-router-topk-limited-devices", "use --moe-router-num-groups and --moe-router-group-topk"),
    Group("refused", "--moe-enable-routing-replay", "use --use-routing-replay"),
    Group("refused", "--moe-layer-recompute", "use --recompute-granularity selective --recompute-modules moe"),
    Group(
        "refused", "--moe-use-upcycling --moe-upcycling-granularity", "slime trains models with experts as they are"
    ),
    Group(
        "refused", "--moe-apply-probs-on-input", "no model that slime trains multiplies inputs by the router's weights"
    ),
    Group(
        "refused",
        """--use-megatron-fsdp --use-custom-fsdp --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward
        --data-parallel-sharding-strategy --outer-dp-sharding-strategy --enable-full-sharding-in-hsdp
        --no-gradient-reduce-div-fusion --suggested-communication-unit-size --no-preserve-fp32-weights
        --fsdp-double-buffer --fsdp-manual-registration --init-model-with-meta-device""",
        "slime shards the optimizer's state with Megatron's distributed optimizer, not with FSDP",
    ),
    Group(
        "refused",
        """--enable-cuda-graph --external-cuda-graph --cuda-graph-impl --cuda-graph-scope --cuda-graph-warmup-steps
        --cuda-graph-use-single-mempool --cuda-graph-retain-backward-graph""",
        "CUDA graphs need micro-batches of one shape, and packed samples have many",
    ),
    Group(
        "refused",
        """--mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads --disable-mamba-mem-eff-path
        --hybrid-attention-ratio --hybrid-mlp-ratio --hybrid-override-pattern --encoder-num-layers
        --decoder-num-layers --encoder-seq-length --encoder-tensor-model-parallel-size
        --encoder-pipeline-model-parallel-size --pipeline-model-parallel-split-rank --use-legacy-models --test-mode""",
        "slime trains decoder-only transformers",
    ),
    Group(
        "refused",
        "--lr-decay-samples --lr-warmup-samples --lr-wsd-decay-samples --warmup",
        "slime counts train steps; use --lr-decay-iters, --lr-warmup-iters or --lr-wsd-decay-iters",
    ),
    Group(
        "refused",
        "--batch-size --rampup-batch-size --decrease-batch-size-if-needed",
        "batches follow from --rollout-batch-size, --n-samples-per-prompt and --global-batch-size",
    ),
    Group("refused", "--skip-train", "use --num-rollout 0, which only evaluates"),
    Group(
        "refused",
        "--data-path --train-data-path --valid-data-path --test-data-path --mock-data",
        "data come from --prompt-data",
    ),
    Group("refused", "--yaml-cfg", "settings come from --custom-config-path and --megatron-config-path"),
    Group("refused", "--pretrained-checkpoint", "initial weights come from --ref-load or --hf-checkpoint"),
    Group("refused", "--data-parallel-random-init", "all data-parallel ranks train one model"),
    Group("refused", "--no-save-rng", "--checkpoint-contents model,optimizer says so"),
    Group(
        "refused",
        """--use-checkpoint-args --use-mp-args-from-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args""",
        "the flags decide, and a checkpoint that differs is refused; --model-args-from-hf saves typing",
    ),
    Group(
        "refused",
        """--load-main-params-from-ckpt --load-model-opt-format --ckpt-convert-format --ckpt-convert-save
        --ckpt-convert-update-legacy-dist-opt-format""",
        "slime reads and writes torch_dist checkpoints and HF directories; tools/ converts",
    ),
)
