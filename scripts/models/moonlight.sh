# Moonlight-16B-A3B(-Instruct): DeepSeek-V3's architecture; source it and pass "${MODEL_ARGS[@]}" to train.py.
# 64 experts behind one dense layer, 6 of them and two shared ones for a token.
MODEL_ARGS=(
    --num-layers 27
    --hidden-size 2048
    --ffn-hidden-size 11264
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 16
    --kv-channels 128
    --qk-layernorm
    --vocab-size 163840
    --max-position-embeddings 8192
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 50000

    --multi-latent-attention
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --rope-type rope

    --num-experts 64
    --moe-ffn-hidden-size 1408
    --moe-layer-freq "[0]*1+[1]*26"
    --moe-router-topk 6
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-topk-scaling-factor 2.446
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0 # pre-training balances the load with it; here it is the model's
    --moe-shared-expert-intermediate-size 2816
)
