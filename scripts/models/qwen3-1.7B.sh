# Qwen3-1.7B; source it and pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm
    --vocab-size 151936
    --max-position-embeddings 40960
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --position-embedding-type rope
    --rotary-base 1000000
)
