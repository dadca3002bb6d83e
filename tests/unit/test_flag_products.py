"""Products of flags that are accepted can be built: model, wrapper and optimizer, by Megatron's own assertions.

Each line is built on one rank of a world whose collectives do nothing (torch's fake process group): sizes and
contradictions show, numbers do not.
"""

from __future__ import annotations

import json
import multiprocessing
import traceback
from pathlib import Path
from random import Random
from typing import Any

import pytest

from slime.config.parse import CommandLine
from tests.unit.argument_mutations import HF_CONFIG, write_files
from tests.unit.megatron_fakes import OF_FAMILY, prepare_to_fork

FAMILIES = ("qwen3", "qwen3_moe", "glm4_moe")
LAYERS = 4
LINE = (
    "--accelerator cpu --model-args-from-hf --prompt-data data.jsonl --label-key label --rm-type math --colocate "
    "--rollout-batch-size 16 --n-samples-per-prompt 4 --global-batch-size 16 --num-rollout 3"
)
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
PARTS = f"""
--tensor-model-parallel-size 2 --sequence-parallel
--pipeline-model-parallel-size 2
--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1
--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t*4|L|
--context-parallel-size 2
--expert-model-parallel-size 2
--expert-tensor-parallel-size 1
{UNIFORM} 1
{UNIFORM} 3
--recompute-activations --recompute-modules core_attn mlp
--recompute-activations --recompute-modules layernorm
--recompute-activations --recompute-modules moe
--overlap-grad-reduce --overlap-param-gather
--overlap-grad-reduce --ddp-num-buckets 3
--ddp-average-in-collective
--ddp-reduce-scatter-with-fp32-accumulation
--calculate-per-token-loss
--num-distributed-optimizer-instances 2
--moe-grouped-gemm
--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1
--moe-router-topk 1
--cpu-offloading --cpu-offloading-num-layers 1
--fine-grained-activation-offloading --offload-modules core_attn attn_proj
--no-gradient-accumulation-fusion
--optimizer-cpu-offload --optimizer-offload-fraction 0.5
--use-precision-aware-optimizer --exp-avg-dtype bf16
--lr-decay-style cosine --lr-warmup-fraction 0.1
--decoupled-lr 1e-4
""".strip().splitlines()


def build(args: Any, failures: Any) -> None:
    """What a trainer does before its first step, and a step where there is one stage."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from slime.backends.megatron_utils import initialize, megatron_patch
    from slime.backends.megatron_utils.model.setup import setup_model_and_optimizer
    from slime.utils import accelerator
    from tests.unit.megatron_fakes import packed

    try:
        accelerator.activate("cpu")
        megatron_patch.apply("cpu")
        make_group, world = torch.distributed.new_group, args.actor_num_gpus_per_node
        torch.distributed.new_group = lambda ranks=None, **_: make_group(ranks=ranks, backend="fake")
        torch.distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        initialize.initialize_model_parallel(args)
        initialize.set_seeds(args.seed)
        state = setup_model_and_optimizer(args)
        spreads_tokens = args.expert_model_parallel_size > 1  # by counts that the others would have to send
        if args.pipeline_model_parallel_size == 1 and not spreads_tokens:
            ids, half = torch.zeros(1, 32, dtype=torch.long), 16 * args.context_parallel_size
            output = state.model[0](ids, torch.arange(32)[None], None, packed_seq_params=packed([half, half]))
            output.sum().backward()
            state.model[0].finish_grad_sync()
    except BaseException:  # noqa: BLE001  (a failure of any kind is the line's)
        failures.put(traceback.format_exc())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_accepted_product_of_flags_can_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    for family in FAMILIES:
        (tmp_path / family).mkdir()
        sizes = {"vocab_size": 100, "num_hidden_layers": LAYERS, "hidden_size": 32, "model_type": family}
        config = HF_CONFIG | sizes | OF_FAMILY[family]
        (tmp_path / family / "config.json").write_text(json.dumps(config))
        (tmp_path / family / "tokenizer.json").write_text("{}")
        (tmp_path / family / "model.safetensors").write_bytes(b"")
    command_line, random, context, built = CommandLine(), Random(0), multiprocessing.get_context("fork"), 0
    prepare_to_fork()
    while built < 200:
        gpus = random.choice(["2", "4", "8"])
        parts = random.sample(PARTS, random.randint(2, 4))
        words = f"{LINE} --hf-checkpoint {random.choice(FAMILIES)} {' '.join(parts)}".split()
        checked = command_line.check([*words, "--actor-num-gpus-per-node", gpus, "--rollout-num-gpus", gpus])
        if checked.problems.all():
            continue
        failures = context.SimpleQueue()
        child = context.Process(target=build, args=(checked.args, failures), daemon=True)
        child.start()
        child.join(60)
        assert failures.empty() and child.exitcode == 0, f"{' '.join(words)}\n{failures.get()}"
        built += 1
