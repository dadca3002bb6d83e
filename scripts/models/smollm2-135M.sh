# SmolLM2-135M(-Instruct): a Llama of 30 narrow layers; source it and pass "${MODEL_ARGS[@]}" to train.py.
MODEL_ARGS=(
    --num-layers 30
    --hidden-size 576
    --ffn-hidden-size 1536
    --num-attention-heads 9
    --group-query-attention
    --num-query-groups 3
    --kv-channels 64
    --vocab-size 49152
    --max-position-embeddings 8192
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --position-embedding-type rope
    --rotary-base 100000
)
