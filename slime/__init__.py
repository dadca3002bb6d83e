"""slime: reinforcement learning for large language models on Megatron and SGLang.

A line of the prompt file becomes a `Sample` in the **data source**, is copied into a **group** of
`n_samples_per_prompt`, completed by an SGLang **engine** (tokens + rollout log-probs appended), scored by a **reward
function**, kept or dropped by the **dynamic filter**, converted with its batch to `TrainData` (rewards normalised by
group, loss masks filled), **scheduled** into equal numbers of micro-batches per DP rank and put in Ray's object store;
each Megatron rank takes its share as a `RolloutBatch`, adds reference and old log-probs, computes **advantages**, runs
the **policy loss** per micro-batch, reduces gradients and steps the optimizer; then the **weight updater** gathers
each parameter, renames it to its HF name, sends it to the paused engines as weight version *v+1*, and they resume
generating.

Layers, each importing only those below it (docs/architecture.md, tests/test_layering.py):

    5  train.py  train_async.py  tools/              drivers: schedule only
    4  slime.ray                                     placement, actor groups, RolloutManager: alone imports ray
    3  slime.backends.megatron_utils | slime.rollout siblings; never import each other
    2  slime.backends.sglang_utils                   start, control and configure an engine
    1  slime.observability                           loggers, timers, metrics over plain dicts
    0  slime.utils                                   types, pure maths, schedules, files, HTTP
"""
