# GLM-4.5; source it and pass "${MODEL_ARGS[@]}" to train.py.
# 160 experts behind three dense layers, 8 of them and a shared one for a token.
MODEL_ARGS=(
    --num-layers 92
    --hidden-size 5120
    --ffn-hidden-size 12288
    --num-attention-heads 96
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --add-qkv-bias
    --qk-layernorm
    --vocab-size 151552
    --max-position-embeddings 131072
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 0.5

    --num-experts 160
    --moe-ffn-hidden-size 1536
    --moe-layer-freq "[0]*3+[1]*89"
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0 # pre-training balances the load with it; here it is the model's
    --moe-shared-expert-intermediate-size 1536
)
