# Qwen2.5-1.5B(-Instruct); source it and pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 1536
    --ffn-hidden-size 8960
    --num-attention-heads 12
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
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
