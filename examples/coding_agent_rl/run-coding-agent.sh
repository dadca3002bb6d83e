#!/usr/bin/env bash
# GRPO of Qwen3-4B as a coding agent: one machine with 8 GPUs, rows of your own. Not run on GPUs yet.
#
#   usage: bash examples/coding_agent_rl/run-coding-agent.sh [flags of train.py]     flags given here override the script's
#          bash examples/coding_agent_rl/run-coding-agent.sh --dry-run               only the plan of the run
#
# Environment variables:
#   SLIME_HOME     where the model is and the checkpoints go       (/root)
#   PROMPT_DATA    rows with tasks: docs/agents.md                 ($SLIME_HOME/coding-tasks.jsonl)
#   AGENT_CONFIG   settings of slime.agent.generate                ($SLIME_HOME/agent.yaml)
#   AGENT_HARNESS  claude_code, codex, opencode, mini_swe_agent    (claude_code)
#
#   hf download Qwen/Qwen3-4B --local-dir $SLIME_HOME/Qwen3-4B
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3-4B.sh
MODEL=Qwen3-4B
. scripts/recipe.sh
recipe_checkpoints "${MODEL}_coding_agent"

ROLLOUT_ARGS=(
    --prompt-data "${PROMPT_DATA:-$SLIME_HOME/coding-tasks.jsonl}"
    --input-key prompt
    --rollout-shuffle
    --custom-generate-function-path slime.agent.generate
    --custom-config-path "${AGENT_CONFIG:-$SLIME_HOME/agent.yaml}"
    --agent-harness "${AGENT_HARNESS:-claude_code}"
    --num-rollout 100
    --rollout-batch-size 8
    --n-samples-per-prompt 8
    --rollout-max-context-len 40960
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --global-batch-size 64
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)

PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --context-parallel-size 4
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 10240
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
    --sglang-tool-call-parser qwen25
    --sglang-reasoning-parser qwen3
)

MISC_ARGS+=(--colocate)
recipe_train "$@"
