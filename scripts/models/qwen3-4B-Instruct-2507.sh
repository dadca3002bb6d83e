# Qwen3-4B-Instruct-2507; source it and pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2560
    --ffn-hidden-size 9728
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm
    --vocab-size 151936
    --max-position-embeddings 262144
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --position-embedding-type rope
    --rotary-base 5000000
)
