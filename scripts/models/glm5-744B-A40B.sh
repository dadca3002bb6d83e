# GLM-5: latent attention to 2048 keys that an indexer chooses; source it and pass "${MODEL_ARGS[@]}" to train.py.
# 256 experts behind three dense layers, 8 of them and a shared one for a token.
MODEL_ARGS=(
    --num-layers 78
    --hidden-size 6144
    --ffn-hidden-size 12288
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 64
    --kv-channels 256
    --qk-layernorm
    --vocab-size 154880
    --max-position-embeddings 202752
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 1000000

    --multi-latent-attention
    --q-lora-rank 2048
    --kv-lora-rank 512
    --qk-head-dim 192
    --qk-pos-emb-head-dim 64
    --v-head-dim 256
    --rope-type rope

    --experimental-attention-variant dsa
    --dsa-indexer-n-heads 32
    --dsa-indexer-head-dim 128
    --dsa-indexer-topk 2048

    --num-experts 256
    --moe-ffn-hidden-size 2048
    --moe-layer-freq "[0]*3+[1]*75"
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0 # pre-training balances the load with it; here it is the model's
    --moe-shared-expert-intermediate-size 2048
)
