#!/usr/bin/env bash
# GRPO on MiMo-7B-RL with the mathematics problems of DAPO, engines draft with the layer that predicts further tokens, and it is trained,
# too: one machine with 8 GPUs. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-mimo-7B-rl-eagle.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-mimo-7B-rl-eagle.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download XiaomiMiMo/MiMo-7B-RL --local-dir $SLIME_HOME/MiMo-7B-RL
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/mimo-7B-rl.sh
MODEL=MiMo-7B-RL
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
    --sglang-speculative-algorithm EAGLE
    --sglang-speculative-num-steps 1
    --sglang-speculative-eagle-topk 1
    --sglang-speculative-num-draft-tokens 2
)

# The layer learns what the policy has become; the policy's own gradients do not change.
GRPO_ARGS+=(
    --mtp-num-layers 1
    --enable-mtp-training
    --mtp-loss-scaling-factor 0.2
)

MISC_ARGS+=(--trust-remote-code) # the model's class is code that comes with the checkpoint

recipe_train "$@"
