# Written by tools/make_args_stubs.py.

class MegatronValues:
    swiglu: bool
    squared_relu: bool
    quick_geglu: bool
    openai_gelu: bool
    onnx_safe: bool
    untie_embeddings_and_output_weights: bool
    group_query_attention: bool
    vocab_size: int | None
    make_vocab_size_divisible_by: int
    padded_vocab_size: int | None
    vocab_extra_ids: int
    seq_length: int | None
    encoder_seq_length: int | None
    max_position_embeddings: int | None
    position_embedding_type: str
    add_position_embedding: bool
    rotary_base: float
    rotary_percent: float
    rotary_seq_len_interpolation_factor: int | None
    use_rope_scaling: bool
    rope_scaling_factor: float
    rope_scaling_low_freq_factor: float
    rope_scaling_high_freq_factor: float
    rope_scaling_original_max_position_embeddings: int
    rope_type: str | None
    no_rope_freq: int | list[int] | None
    window_size: tuple[int, int] | None
    window_attn_skip_freq: int | list[int] | None
    linear_attention_freq: int | list[int] | None
    linear_attention_type: str | None
    post_self_attn_layernorm: bool
    post_mlp_layernorm: bool
    spec: list[str] | None
    enable_experimental: bool
    hybrid_attention_ratio: float
    hybrid_mlp_ratio: float
    hybrid_override_pattern: str | None
    heterogeneous_layers_config_path: str | None
    heterogeneous_layers_config_encoded_json: str | None
    init_method_xavier_uniform: bool
    te_precision_config_file: str | None
    cuda_graph_scope: list[str] | str
    bias_swiglu_fusion: bool
    bias_gelu_fusion: bool
    moe_layer_freq: int | list[int]
    moe_router_load_balancing_type: list[str] | str
    moe_aux_loss_coeff: float | list[float]
    moe_use_upcycling: bool
    moe_upcycling_granularity: int
    num_layers_per_virtual_pipeline_stage: int | None
    num_virtual_stages_per_pipeline_rank: int | None
    pipeline_model_parallel_layout: str | None
    pipeline_model_parallel_split_rank: int | None
    encoder_tensor_model_parallel_size: int
    encoder_pipeline_model_parallel_size: int
    encoder_num_layers: int | None
    decoder_num_layers: int | None
    cp_comm_type: list[str] | str
    scatter_gather_tensors: bool
    no_align_param_gather: bool
    no_align_grad_reduce: bool
    use_tp_pp_dp_mapping: bool
    tp_comm_overlap_cfg: str | None
    use_sharp: bool
    sharp_enabled_group: str | None
    nccl_communicator_config_path: str | None
    high_priority_stream_groups: list[str] | None
    enable_gloo_process_groups: bool
    use_torch_fsdp2: bool
    torch_fsdp2_no_reshard: bool
    enable_full_sharding_in_hsdp: bool
    ddp_num_buckets: int | None
    local_rank: int | None
    lazy_mpu_init: bool
    bf16: bool
    fp16: bool
    fp16_lm_cross_entropy: bool
    grad_reduce_in_bf16: bool
    attention_backend: str
    use_flash_attn: bool
    attention_softmax_in_fp32: bool
    check_for_nan_in_grad: bool
    fp8_param_gather: bool
    main_grads_dtype: str
    main_params_dtype: str
    exp_avg_dtype: str
    exp_avg_sq_dtype: str
    optimizer: str
    start_weight_decay: float | None
    end_weight_decay: float | None
    weight_decay_incr_style: str
    no_weight_decay_cond_type: str | None
    lr_decay_style: str
    lr_decay_iters: int | None
    lr_decay_samples: int | None
    lr_wsd_decay_style: str
    lr_wsd_decay_iters: int | None
    lr_wsd_decay_samples: int | None
    lr_warmup_iters: int
    lr_warmup_samples: int
    lr_warmup_fraction: float | None
    lr_warmup_init: float
    warmup: int | None
    override_opt_param_scheduler: bool
    use_checkpoint_opt_param_scheduler: bool
    check_for_spiky_loss: bool
    recompute_granularity: str | None
    train_iters: int | None
    train_samples: int | None
    skip_train: bool
    batch_size: int | None
    rampup_batch_size: list[int] | None
    decrease_batch_size_if_needed: bool
    data_parallel_random_init: bool
    exit_interval: int | None
    exit_duration_in_mins: int | None
    exit_signal_handler: bool
    exit_signal: str
    train_sync_interval: int | None
    check_weight_hash_across_dp_replicas_interval: int | None
    empty_unused_memory_level: int
    manual_gc: bool
    manual_gc_interval: int
    manual_gc_eval: bool
    use_mcore_models: bool
    use_legacy_models: bool
    eval_iters: int
    full_validation: bool
    yaml_cfg: str | None
    distribute_saved_activations: bool
    ckpt_step: int | None
    no_load_optim: bool
    no_load_rng: bool
    no_save_rng: bool
    finetune: bool
    pretrained_checkpoint: str | None
    save_retain_interval: int | None
    exit_on_missing_checkpoint: bool
    use_checkpoint_args: bool
    use_mp_args_from_checkpoint_args: bool
    use_tokenizer_model_from_checkpoint_args: bool
    load_main_params_from_ckpt: bool
    load_model_opt_format: bool
    ckpt_format: str
    dist_ckpt_format: str | None
    use_dist_ckpt: bool
    auto_detect_ckpt_format: bool
    ckpt_convert_format: str | None
    ckpt_convert_save: str | None
    ckpt_convert_update_legacy_dist_opt_format: bool
    dist_ckpt_strictness: str
    dist_ckpt_save_pre_mcore_014: bool
    dist_ckpt_optim_fully_reshardable: bool
    distrib_optim_fully_reshardable_mem_efficient: bool
    ckpt_fully_parallel_save_deprecated: bool
    ckpt_fully_parallel_save: bool
    ckpt_fully_parallel_load: bool
    ckpt_assume_constant_structure: bool
    use_persistent_ckpt_worker: bool
    replication: bool
    replication_jump: int | None
    replication_factor: int
    non_persistent_save_interval: int | None
    non_persistent_ckpt_type: str | None
    non_persistent_global_ckpt_dir: str | None
    non_persistent_local_ckpt_dir: str | None
    non_persistent_local_ckpt_algo: str
    log_params_norm: bool
    log_throughput: bool
    log_progress: bool
    log_energy: bool
    log_interval: int
    log_memory_interval: int | None
    log_device_memory_used: bool
    log_straggler: bool
    disable_straggler_on_startup: bool
    straggler_ctrlr_port: int
    straggler_minmax_count: int
    logging_level: int | None
    timing_log_level: int
    timing_log_option: str
    tensorboard_dir: str | None
    tensorboard_log_interval: int
    tensorboard_queue_size: int
    log_timers_to_tensorboard: bool
    log_batch_size_to_tensorboard: bool
    log_learning_rate_to_tensorboard: bool
    log_no_learning_rate_to_tensorboard: bool
    log_loss_scale_to_tensorboard: bool
    log_validation_ppl_to_tensorboard: bool
    log_memory_to_tensorboard: bool
    log_world_size_to_tensorboard: bool
    wandb_exp_name: str
    wandb_entity: str
    wandb_save_dir: str
    memory_snapshot_path: str
    data_path: list[str] | None
    train_data_path: list[str] | None
    valid_data_path: list[str] | None
    test_data_path: list[str] | None
    data_cache_path: str | None
    mock_data: bool
    split: str | None
    num_workers: int
    dataloader_type: str | None
    mmap_bin_files: bool
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    create_attention_mask_in_dataloader: bool
    tokenizer_type: str | None
    tokenizer_model: str | None
    vocab_file: str | None
    merge_file: str | None
    tensor_model_parallel_size: int
    pipeline_model_parallel_comm_backend: str | None
    pipeline_model_parallel_size: int
    sequence_parallel: bool
    context_parallel_size: int
    hierarchical_context_parallel_sizes: list[int] | None
    max_seqlen_per_dp_cp_rank: int | None
    hybrid_context_parallel: bool
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    moe_extended_tp: bool
    perform_initialization: bool
    use_cpu_initialization: bool | None
    deterministic_mode: bool
    enable_autocast: bool
    num_microbatches_with_partial_activation_checkpoints: int | None
    gradient_accumulation_fusion: bool
    async_tensor_model_parallel_allreduce: bool
    use_te_rng_tracker: bool
    tp_comm_overlap: bool
    tp_comm_bulk_wgrad: bool
    tp_comm_bulk_dgrad: bool
    tp_comm_overlap_ag: bool
    tp_comm_overlap_rs: bool
    tp_comm_overlap_rs_dgrad: bool
    tp_comm_split_ag: bool
    tp_comm_atomic_ag: bool
    tp_comm_split_rs: bool
    tp_comm_atomic_rs: bool
    cross_entropy_loss_fusion: bool
    cross_entropy_fusion_impl: str
    tp_comm_overlap_disable_qkv: bool
    tp_comm_overlap_disable_fc1: bool
    tp_comm_bootstrap_backend: str
    overlap_moe_expert_parallel_comm: bool
    delay_wgrad_compute: bool
    ep_overlap_early_attn_memory_release: bool
    variable_seq_lengths: bool
    overlap_p2p_comm: bool
    batch_p2p_sync: bool
    use_ring_exchange_p2p: bool
    defer_embedding_wgrad_compute: bool
    wgrad_deferral_limit: int
    overlap_p2p_comm_warmup_flush: bool
    microbatch_group_size_per_vp_stage: int | None
    mtp_standalone: bool
    cpu_offloading: bool
    cpu_offloading_num_layers: int
    cpu_offloading_activations: bool
    cpu_offloading_weights: bool
    cpu_offloading_double_buffering: bool
    barrier_with_L1_time: bool
    num_layers: int | None
    mtp_num_layers: int | None
    mtp_loss_scaling_factor: float
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    hidden_size: int | None
    num_attention_heads: int | None
    softmax_scale: float | None
    softmax_type: str
    num_query_groups: int
    ffn_hidden_size: int | None
    kv_channels: int | None
    hidden_dropout: float
    attention_dropout: float
    fp32_residual_connection: bool
    apply_residual_connection_post_layernorm: bool
    layernorm_epsilon: float
    layernorm_zero_centered_gamma: bool
    add_bias_linear: bool
    add_qkv_bias: bool
    activation_func_fp8_input_store: bool
    glu_linear_offset: float
    activation_func_clamp_value: float | None
    num_moe_experts: int | None
    rotary_interleaved: bool
    normalization: str
    qk_layernorm: bool
    qk_l2_norm: bool
    qk_clip: bool
    qk_clip_alpha: float
    qk_clip_threshold: float
    log_max_attention_logit: bool
    attention_output_gate: bool
    test_mode: bool
    calculate_per_token_loss: bool
    multi_latent_attention: bool
    experimental_attention_variant: str | None
    dsa_indexer_n_heads: int | None
    dsa_indexer_head_dim: int | None
    dsa_indexer_topk: int | None
    dsa_indexer_loss_coeff: float | None
    dsa_indexer_use_sparse_loss: bool
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    init_method_std: float
    embedding_init_method_std: float | None
    init_model_with_meta_device: bool
    apply_query_key_layer_scaling: bool
    disable_bf16_reduced_precision_matmul: bool
    masked_softmax_fusion: bool
    persist_layer_norm: bool
    memory_efficient_layer_norm: bool
    bias_dropout_fusion: bool
    apply_rope_fusion: bool
    use_fused_weighted_squared_relu: bool
    fused_single_qkv_rope: bool
    recompute_method: str | None
    recompute_num_layers: int | None
    recompute_modules: list[str] | None
    fp8: str | None
    fp8_recipe: str
    fp8_quantizer_factory: str | None
    fp8_margin: int
    fp8_interval: int
    fp8_amax_history_len: int
    fp8_amax_compute_algo: str
    fp8_wgrad: bool
    fp8_dot_product_attention: bool
    fp8_multi_head_attention: bool
    tp_only_amax_red: bool
    first_last_layers_bf16: bool
    num_layers_at_start_in_bf16: int
    num_layers_at_end_in_bf16: int
    use_kitchen: bool
    use_kitchen_attention: bool
    kitchen_attention_backend: str
    fp4: str | None
    fp4_recipe: str
    fp4_param: bool
    fp4_quantizer_factory: str | None
    moe_shared_expert_intermediate_size: int | None
    moe_shared_expert_gate: bool
    moe_shared_expert_overlap: bool
    moe_ffn_hidden_size: int | None
    moe_router_topk: int
    moe_enable_routing_replay: bool
    moe_router_topk_limited_devices: int | None
    moe_router_padding_for_quantization: bool
    moe_router_padding_for_fp8: bool
    moe_router_num_groups: int | None
    moe_router_group_topk: int | None
    moe_router_pre_softmax: bool
    moe_router_topk_scaling_factor: float | None
    moe_router_score_function: str
    moe_router_dtype: str | None
    moe_router_enable_expert_bias: bool
    moe_router_bias_update_rate: float
    moe_router_force_load_balancing: bool
    moe_grouped_gemm: bool
    moe_use_legacy_grouped_gemm: bool
    moe_z_loss_coeff: float | None
    moe_input_jitter_eps: float | None
    moe_token_dropping: bool
    moe_token_dispatcher_type: str
    moe_enable_deepep: bool
    moe_flex_dispatcher_backend: str
    moe_per_layer_logging: bool
    moe_expert_capacity_factor: float | None
    moe_pad_expert_input_to_capacity: bool
    moe_token_drop_policy: str
    moe_layer_recompute: bool
    moe_permute_fusion: bool
    moe_router_fusion: bool
    moe_apply_probs_on_input: bool
    moe_latent_size: int | None
    moe_deepep_num_sms: int
    moe_hybridep_num_sms: int
    enable_cuda_graph: bool
    cuda_graph_use_single_mempool: bool
    cuda_graph_retain_backward_graph: bool
    cuda_graph_warmup_steps: int
    external_cuda_graph: bool
    cuda_graph_impl: str
    clone_scatter_output_in_embedding: bool
    disable_parameter_transpose_cache: bool
    config_logger_dir: str
    flash_decode: bool
    batch_invariant_mode: bool
    use_te_activation_func: bool
    inference_rng_tracker: bool
    inference_sampling_seed: int
    symmetric_ar_type: str | None
    use_inference_optimized_layers: bool
    inference_fuse_tp_communication: bool
    mrope_section: list[int] | None
    mamba_state_dim: int
    mamba_head_dim: int
    mamba_num_groups: int
    mamba_num_heads: int | None
    use_mamba_mem_eff_path: bool
    mlp_chunks_for_prefill: int
    transformer_impl: str
    fine_grained_activation_offloading: bool
    offload_modules: list[str]
    min_offloaded_tensor_size: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    rotary_scaling_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    cache_mla_latents: bool
    lr: float | None
    min_lr: float
    decoupled_lr: float | None
    decoupled_min_lr: float | None
    weight_decay: float
    apply_wd_to_qk_layernorm: bool
    reuse_grad_buf_for_mxfp8_param_ag: bool
    use_precision_aware_optimizer: bool
    store_param_remainders: bool
    loss_scale: float | None
    initial_loss_scale: float
    min_loss_scale: float
    loss_scale_window: float
    hysteresis: int
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    decoupled_weight_decay: bool
    sgd_momentum: float
    muon_momentum: float
    muon_split_qkv: bool
    muon_use_nesterov: bool
    muon_scale_mode: str
    muon_fp32_matmul_prec: str
    muon_num_ns_steps: int
    muon_tp_mode: str
    muon_extra_scale_factor: float
    use_distributed_optimizer: bool
    overlap_param_gather: bool
    overlap_param_gather_with_optimizer_step: bool
    optimizer_cpu_offload: bool
    optimizer_offload_fraction: float
    use_torch_optimizer_for_cpu_offload: bool
    overlap_cpu_optimizer_d2h_h2d: bool
    pin_cpu_grads: bool
    pin_cpu_params: bool
    clip_grad: float
    log_num_zeros_in_grad: bool
    grad_reduce_in_fp32: bool
    overlap_grad_reduce: bool
    num_distributed_optimizer_instances: int
    check_for_large_grads: bool
    bucket_size: int | None
    pad_buckets_for_high_nccl_busbw: bool
    reduce_scatter_with_fp32_accumulation: bool
    average_in_collective: bool
    use_megatron_fsdp: bool
    use_custom_fsdp: bool
    data_parallel_sharding_strategy: str
    gradient_reduce_div_fusion: bool
    suggested_communication_unit_size: int | None
    preserve_fp32_weights: bool
    keep_fp8_transpose_cache: bool
    nccl_ub: bool
    fsdp_double_buffer: bool
    outer_dp_sharding_strategy: str
    disable_symmetric_registration: bool
    fsdp_manual_registration: bool
