# MiniMax-M2: queries and keys normed over all heads together; source it and pass "${MODEL_ARGS[@]}" to train.py.
# 256 experts in every layer, 8 of them for a token.
MODEL_ARGS=(
    --num-layers 62
    --hidden-size 3072
    --ffn-hidden-size 1536
    --num-attention-heads 48
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm
    --vocab-size 200064
    --max-position-embeddings 196608
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 5000000
    --rotary-percent 0.5

    --spec slime_plugins.models.minimax_m2 get_minimax_m2_spec

    --num-experts 256
    --moe-ffn-hidden-size 1536
    --moe-layer-freq 1
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0 # pre-training balances the load with it; here it is the model's
)
