# Qwen3.5-35B-A3B: every 4th layer attends in full, the others are gated delta nets; source it and pass
# "${MODEL_ARGS[@]}" to train.py. 256 experts in every layer, 8 of them and a
# gated, shared one for a token. The part that sees images stays as it is.
MODEL_ARGS=(
    --num-layers 40
    --hidden-size 2048
    --ffn-hidden-size 512
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 2
    --kv-channels 256
    --qk-layernorm
    --attention-output-gate
    --vocab-size 248320
    --max-position-embeddings 262144
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --apply-layernorm-1p # weights are differences to 1
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 10000000
    --rotary-percent 0.25

    --experimental-attention-variant gated_delta_net
    --linear-attention-freq 4
    --linear-conv-kernel-dim 4
    --linear-key-head-dim 128
    --linear-value-head-dim 128
    --linear-num-key-heads 16
    --linear-num-value-heads 32

    --num-experts 256
    --moe-ffn-hidden-size 512
    --moe-layer-freq 1
    --moe-router-topk 8
    --moe-router-score-function softmax # of the best ones; HF divides the softmax of all by their sum, which is the same
    --moe-shared-expert-intermediate-size 512
    --moe-shared-expert-gate
)
