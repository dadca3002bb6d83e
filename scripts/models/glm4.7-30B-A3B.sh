# GLM-4.7-Flash: latent attention; source it and pass "${MODEL_ARGS[@]}" to train.py.
# 64 experts behind one dense layer, 4 of them and a shared one for a token.
MODEL_ARGS=(
    --num-layers 47
    --hidden-size 2048
    --ffn-hidden-size 10240
    --num-attention-heads 20
    --group-query-attention
    --num-query-groups 20
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
    --q-lora-rank 768
    --kv-lora-rank 512
    --qk-head-dim 192
    --qk-pos-emb-head-dim 64
    --v-head-dim 256
    --rope-type rope

    --num-experts 64
    --moe-ffn-hidden-size 1536
    --moe-layer-freq "[0]*1+[1]*46"
    --moe-router-topk 4
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-topk-scaling-factor 1.8
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0 # pre-training balances the load with it; here it is the model's
    --moe-shared-expert-intermediate-size 1536
)
