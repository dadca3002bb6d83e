# Qwen2.5-32B; source it and pass "${MODEL_ARGS[@]}" to train.py.
# Qwen2.5-32B-Instruct has 1e-6 in its norms: give --norm-epsilon 1e-6 behind these.
MODEL_ARGS=(
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 27648
    --num-attention-heads 40
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --add-qkv-bias
    --vocab-size 152064
    --max-position-embeddings 131072
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 1000000
)
