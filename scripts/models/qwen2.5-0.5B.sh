# Qwen2.5-0.5B(-Instruct); source it and pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 896
    --ffn-hidden-size 4864
    --num-attention-heads 14
    --group-query-attention
    --num-query-groups 2
    --kv-channels 64
    --add-qkv-bias
    --vocab-size 151936
    --max-position-embeddings 32768
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --position-embedding-type rope
    --rotary-base 1000000
)
