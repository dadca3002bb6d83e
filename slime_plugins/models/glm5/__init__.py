"""GLM-5 and DeepSeek-V3.2: --spec slime_plugins.models.glm5.glm5 get_glm5_spec."""
