# GLM-4-32B-0414 and GLM-Z1-32B-0414; source it and pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
    --num-layers 61
    --hidden-size 6144
    --ffn-hidden-size 23040
    --num-attention-heads 48
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
    --post-self-attn-layernorm
    --post-mlp-layernorm
    --vocab-size 151552
    --max-position-embeddings 32768
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 10000
    --rotary-percent 0.5
    --rotary-interleaved
)
