# DeepSeek-V3.2: DeepSeek-V3 that attends to 2048 keys which an indexer chooses; source it and pass
# "${MODEL_ARGS[@]}" to train.py. 256 experts behind three dense layers, 8 of them and a shared one for a token.
MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --group-query-attention
    --num-query-groups 128
    --kv-channels 128
    --qk-layernorm
    --vocab-size 129280
    --max-position-embeddings 163840
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 10000

    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --rope-type yarn
    --rotary-scaling-factor 40
    --original-max-position-embeddings 4096
    --beta-fast 32
    --beta-slow 1
    --mscale 1
    --mscale-all-dim 1

    --experimental-attention-variant dsa
    --dsa-indexer-n-heads 64
    --dsa-indexer-head-dim 128
    --dsa-indexer-topk 2048

    --num-experts 256
    --moe-ffn-hidden-size 2048
    --moe-layer-freq "[0]*3+[1]*58"
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0 # pre-training balances the load with it; here it is the model's
    --moe-shared-expert-intermediate-size 2048
)
