# GLM-4.5-Air; source it and pass "${MODEL_ARGS[@]}" to train.py.
# 128 experts behind one dense layer, 8 of them and a shared one for a token.
MODEL_ARGS=(
    --num-layers 46
    --hidden-size 4096
    --ffn-hidden-size 10944
    --num-attention-heads 96
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --add-qkv-bias
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

    --num-experts 128
    --moe-ffn-hidden-size 1408
    --moe-layer-freq "[0]*1+[1]*45"
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0 # pre-training balances the load with it; here it is the model's
    --moe-shared-expert-intermediate-size 1408
)
