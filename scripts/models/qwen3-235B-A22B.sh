# Qwen3-235B-A22B: 128 experts in every layer, 8 of them for a token; source it and pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
    --num-layers 94
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --vocab-size 151936
    --max-position-embeddings 40960
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 1000000

    --num-experts 128
    --moe-ffn-hidden-size 1536
    --moe-layer-freq 1
    --moe-router-topk 8
    --moe-router-score-function softmax # of the 8 best; HF divides the softmax of all by the sum of the 8, which is the same
)
