# Kimi-K2-Thinking; source it and pass "${MODEL_ARGS[@]}" to train.py.
# DeepSeek-V3's architecture; 384 experts behind one dense layer, 8 of them and a shared one for a token.
MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 64
    --kv-channels 128
    --qk-layernorm
    --vocab-size 163840
    --max-position-embeddings 262144
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 50000

    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --rope-type yarn
    --rotary-scaling-factor 64
    --original-max-position-embeddings 4096
    --beta-fast 32
    --beta-slow 1
    --mscale 1
    --mscale-all-dim 1

    --num-experts 384
    --moe-ffn-hidden-size 2048
    --moe-layer-freq "[0]*1+[1]*60"
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-topk-scaling-factor 2.827
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0 # pre-training balances the load with it; here it is the model's
    --moe-shared-expert-intermediate-size 2048
)
