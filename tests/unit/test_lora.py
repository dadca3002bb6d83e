"""The flags of LoRA: which adapters they ask for, and what they refuse, at the parse."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from slime.backends.megatron_utils.layers.lora_linear import Adapter
from slime.backends.megatron_utils.update_weight import WeightSyncError, from_adapters
from slime.backends.megatron_utils.update_weight.from_adapters import AdapterUpdater
from slime.backends.sglang_utils.server_args import EnginePlace, EngineSpec, adapter_defaults, build_server_args
from slime.backends.sglang_utils.weight_transfer import (
    in_shared_memory,
)
from slime.checkpoints.paths import MODEL_SHAPE_FILE, TRACKER_FILE
from slime.config.megatron.lora_plan import LoraPlan, base_of
from slime.config.roles import parse_megatron_role_args
from slime.training.micro_batches import needs_old_log_probs
from slime.utils.errors import UsageError
from slime.utils.misc import needed
from tests.unit.argument_lines import Check, check, command_line
from tests.unit.megatron_fakes import make_hf_model
from tools.convert_torch_dist_to_hf import saved_shape

__all__ = ["check", "command_line"]

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def plan_of(check: Check, flags: str) -> LoraPlan:
    checked = check(flags)
    assert not checked.problems.all(), checked.problems.all()
    plan = LoraPlan.of(checked.args)
    assert plan is not None
    return plan


def test_without_more_flags_every_projection_has_an_adapter_of_scale_two(check: Check) -> None:
    plan = plan_of(check, "--lora-rank 8")
    assert (plan.rank, plan.alpha, plan.scale, list(plan.target_modules)) == (8, 16.0, 2.0, ALL)
    assert plan_of(check, "--lora-rank 8 --lora-target-modules all-linear") == plan
    some = plan_of(check, "--lora-rank 8 --lora-alpha 4 --lora-target-modules down_proj v_proj k_proj q_proj")
    assert (some.scale, list(some.target_modules)) == (0.5, ["q_proj", "k_proj", "v_proj", "down_proj"])
    assert some.linears == ["self_attention.linear_qkv", "mlp.linear_fc2"]


def test_the_output_layer_has_an_adapter_where_it_is_named(check: Check) -> None:
    """As with PEFT, all-linear does not stand for it."""
    for flags in ("all-linear lm_head", " ".join([*ALL, "lm_head"])):
        plan = plan_of(check, f"--lora-rank 8 --lora-target-modules {flags}")
        assert (plan.target_modules, plan.has_output_layer) == ([*ALL, "lm_head"], True)
    alone = plan_of(check, "--lora-rank 8 --lora-target-modules lm_head")
    assert (alone.linears, alone.target_modules) == (["output_layer"], ["lm_head"])


def test_an_output_layer_that_is_the_embedding_is_not_merged(check: Check, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    flags = "--lora-rank 8 --lora-target-modules all-linear lm_head"
    merging = ("--lora-serve merged", "--save ckpt --save-hf out", "--save ckpt --checkpoint-contents model hf")
    for is_tied in (False, True):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))
        assert not check(flags).problems.all()
        for more in merging:
            told = check(f"{flags} {more}").problems.all()
            assert any("the model's output layer is its embedding" in text for text in told) == is_tied, (more, told)


def test_a_critic_has_adapters_of_its_trunk_alone(check: Check, tmp_path: Path) -> None:
    (tmp_path / "roles.yaml").write_text(json.dumps({"megatron": [{"role": "critic", "overrides": {"lr": 1e-5}}]}))
    ppo = "--advantage-estimator ppo --no-offload-train --megatron-config-path roles.yaml --lora-rank 8"
    found = check(f"{ppo} --lora-target-modules all-linear lm_head")
    critic = LoraPlan.of(parse_megatron_role_args(found.args, "critic"))
    assert critic is not None and critic.target_modules == ALL
    [told] = found.problems.all()  # without --strict-flags it is a warning
    assert "has no effect for a critic, which has a value head in the output layer's place" in told
    [told] = check(f"{ppo} --lora-target-modules lm_head").problems.all()
    assert "lm_head is nothing for a critic, which has a value head in the output layer's place; name" in told


REFUSED = {
    "--lora-rank 0": "--lora-rank 0",
    "--lora-rank 8 --lora-alpha 0": "--lora-alpha 0: adapters are multiplied by alpha / rank, so it must be above 0",
    "--lora-rank 8 --lora-alpha -4": "--lora-alpha -4: adapters",
    "--lora-rank 8 --lora-target-modules embed_tokens": "--lora-target-modules embed_tokens: embeddings have none; "
    "adapters are built for q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head.",
    "--lora-rank 8 --lora-target-modules lm_head --sglang-enable-fp32-lm-head": "with an adapter in the model's own",
    "--lora-rank 8 --lora-exclude-modules router": "--lora-exclude-modules router: the model has no such",
    "--lora-rank 8 --lora-exclude-modules k_proj": "--lora-exclude-modules k_proj lacks k_proj: q_proj, k_proj",
    "--lora-rank 8 --lora-exclude-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj": "leaves no",
    "--lora-rank 8 --lora-dropout 1": "--lora-dropout 1",
    "--lora-rank 8 --lora-init pissa": "--lora-init",
    "--lora-rank 8 --lora-adapter-path nowhere": "give a PEFT directory",
    "--lora-dropout 0.1": "--lora-dropout",
    "--lora-rank 8 --lora-target-modules q_proj v_proj": "lacks k_proj: q_proj, k_proj, v_proj are one weight",
    "--lora-rank 8 --lora-target-modules up_proj": "lacks gate_proj",
    "--lora-rank 8 --moe-router-enable-expert-bias": "--moe-router-bias-update-rate 0.001 with --lora-rank 8",
    "--lora-rank 8 --freeze-params-name-list mlp": "--freeze-params-name-list does not go with --lora-rank 8",
    "--lora-rank 8 --only-train-params-name-list mlp": "--only-train-params-name-list does not go with --lora-rank 8",
    "--lora-rank 8 --update-weight-mode delta --update-weight-transport disk": "--update-weight-mode delta does not",
    "--lora-rank 8 --transformer-impl transformer_engine": "use --transformer-impl local",
    "--lora-rank 8 --mtp-num-layers 1": "--mtp-num-layers does not go with --lora-rank 8",
    "--lora-rank 8 --sglang-max-lora-rank 4": "--lora-rank 8 is over --sglang-max-lora-rank 4",
    "--lora-rank 8 --sglang-max-loras-per-batch 1": "takes one of these places; give 2 or more",
    "--lora-rank 8 --sglang-lora-target-modules q_proj": "the run gives them, as of --lora-target-modules",
    "--lora-rank 8 --sglang-quantization fp8": "--sglang-quantization fp8 does not go with --lora-serve adapter",
    "--lora-rank 8 --lora-target-modules foo": "--lora-target-modules foo: the model has no such projection; adapters",
    "--lora-rank 8 --sglang-load-format dummy": "engines keep the base that they start",
    "--lora-rank 8 --sglang-torchao-config int8wo": "--sglang-torchao-config int8wo does not go with --lora-serve",
    "--lora-rank 8 --sglang-dp-size 2 --sglang-enable-dp-attention": "whose ranks have different requests is not",
    "--lora-rank 8 --sglang-max-loaded-loras 1": "--sglang-max-loaded-loras 1 does not go with --lora-serve adapter",
    "--lora-rank 8 --sglang-enable-lora-overlap-loading": "--sglang-enable-lora-overlap-loading True does not go with",
    "--lora-rank 8 --sglang-experts-shared-outer-loras": "each expert of the trainer has an A and a B of its own",
    "--lora-rank 8 --sglang-pp-size 2 --rollout-num-gpus-per-engine 2": "--sglang-pp-size 2 does not go with --lora",
    "--lora-rank 8 --sglang-tokenizer-worker-num 2": "one process of an engine has to know which version is served",
    "--lora-rank 8 --prefill-num-servers 1 --rollout-num-gpus 2": "which could serve two versions",
    "--lora-rank 8 --check-weight-update-equal": "it overwrites the engines' model, which is never sent",
    "--lora-rank 8 --elastic-rollout --use-fault-tolerance --rollout-num-gpus 1": "engines that join from other hosts",
    "--lora-rank 8 --load other": "--load other holds no adapters, and the base of --lora-rank 8 is --hf-",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_adapters_do_not_go_with_is_refused(check: Check, flags: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    assert any(REFUSED[flags] in problem for problem in check(flags).problems.all()), check(flags).problems.all()


def test_adapters_are_served_over_a_quantised_base_and_not_merged_into_it(check: Check, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    assert not check("--lora-rank 8").problems.all()
    problems = check("--lora-rank 8 --lora-serve merged").problems.all()
    assert any("hf is quantised: with --lora-serve merged adapters of --lora-rank 8" in s for s in problems), problems
    roles = {"megatron": [{"role": "critic", "overrides": {"lr": 1e-5}}]}
    (tmp_path / "roles.yaml").write_text(json.dumps(roles))
    ppo = "--advantage-estimator ppo --no-offload-train --lora-rank 8 --megatron-config-path roles.yaml"
    assert not any("quantised" in text for text in check(ppo).problems.all()), "no engine serves a critic"


def saved(root: Path, **adapters: Any) -> None:
    (root / "iter_0000003").mkdir(parents=True)
    (root / TRACKER_FILE).write_text("3")
    (root / "iter_0000003" / MODEL_SHAPE_FILE).write_text(json.dumps({"lora": adapters}))


def test_a_checkpoint_of_adapters_asks_for_their_flags(check: Check, tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", rank=4, alpha=8.0, target_modules=ALL, use_rslora=False, has_experts=False)
    assert not check("--load ckpt --lora-rank 4").problems.all()
    (problem,) = check("--load ckpt").problems.all()
    assert problem == (
        "--load ckpt holds LoRA adapters alone; add --lora-rank 4 --lora-alpha 8 --lora-target-modules "
        f"{' '.join(ALL)}."
    )
    (problem,) = check("--load ckpt --lora-rank 8").problems.all()
    assert problem == "--load ckpt holds adapters with rank 4, alpha 8.0; repeat its --lora-* flags."
    (problem,) = check("--ref-load ckpt --use-kl-loss --kl-loss-coef 0.1 --lora-rank 4").problems.all()
    assert problem == "--ref-load ckpt holds LoRA adapters alone; give the model under them."


def test_reference_and_start_are_one_iteration_of_the_base(check: Check, tmp_path: Path) -> None:
    """Two would give the reference the start's weights, and a resumed run would find another base."""
    for iteration in (3, 5):
        (tmp_path / "base" / f"iter_{iteration:07d}").mkdir(parents=True)
    (tmp_path / "base" / TRACKER_FILE).write_text("5")
    told = "training starts from base/iter_0000003, and the reference is base/iter_0000005; adapters have one base"
    for load in ("--load base --ref-load base", "--ref-load base"):
        flags = f"{load} --lora-rank 8 --ckpt-step 3"
        assert any(told in problem for problem in check(flags).problems.all()), check(flags).problems.all()
        assert not any(
            "adapters have one base" in problem for problem in check(f"{flags} --ref-ckpt-step 3").problems.all()
        )
    assert not any("adapters have one base" in text for text in check("--ref-load base --lora-rank 8").problems.all())
    full = check("--load base --ref-load base --ckpt-step 3")
    assert not any("adapters have one base" in text for text in full.problems.all())


def test_the_converter_takes_adapters_for_no_model(tmp_path: Path) -> None:
    saved(tmp_path, rank=4, alpha=8.0, target_modules=ALL)
    with pytest.raises(UsageError, match="holds LoRA adapters alone"):
        saved_shape(tmp_path / "iter_0000003", {})


def test_a_family_with_other_projections_is_refused(check: Check, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"model_type": "glm4"}))
    problems = check("--lora-rank 8").problems.all()
    assert any("the model has gate_proj and up_proj as one gate_up_proj" in text for text in problems)


def test_engines_of_a_cpu_get_adapters_of_experts_merged_and_those_of_a_gpu_serve_them(
    check: Check, tmp_path: Path
) -> None:
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config |= {"model_type": "qwen3_moe", "decoder_sparse_step": 1, **experts}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    told = (
        "--lora-serve adapter: engines on the CPU have no kernel for adapters of gate_proj, up_proj, down_proj; use "
        "--lora-serve merged (with an unquantised base), or --lora-exclude-modules gate_proj up_proj down_proj."
    )
    assert told in check("--lora-rank 8").problems.all()
    others = ("--lora-serve merged", "--lora-exclude-modules gate_proj up_proj down_proj", "--accelerator cuda")
    for more in others:
        assert not any("no kernel" in text for text in check(f"--lora-rank 8 {more}").problems.all()), more
    on_gpu = check("--lora-rank 8 --accelerator cuda").args
    assert adapter_defaults(on_gpu, needed(LoraPlan.of(on_gpu)))["moe_runner_backend"] == "triton"
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    told = "no kernel of SGLang's is proven over a quantised base for adapters of gate_proj, up_proj, down_proj"
    assert any(told in text for text in check("--lora-rank 8 --accelerator cuda").problems.all())
    without = check("--lora-rank 8 --accelerator cuda --lora-exclude-modules gate_proj up_proj down_proj")
    assert not any("quantised" in text for text in without.problems.all())


def test_latent_attention_has_projections_of_its_own(check: Check, tmp_path: Path) -> None:
    make_hf_model(tmp_path / "latent", "deepseek_v3")
    (tmp_path / "hf" / "config.json").write_text((tmp_path / "latent" / "config.json").read_text())
    flags = "--lora-rank 8 --lora-target-modules"
    problems = check(f"{flags} all-linear").problems.all()
    assert any("no kernel for adapters of kv_b_proj, gate_proj" in text for text in problems), problems
    problems = check(f"{flags} kv_a_proj_with_mqa").problems.all()
    assert any("lacks q_a_proj: q_a_proj, kv_a_proj_with_mqa are one weight" in text for text in problems), problems
    problems = check(f"{flags} q_a_proj kv_a_proj_with_mqa q_b_proj o_proj").problems.all()
    assert not any("--lora" in text for text in problems), problems


@pytest.mark.parametrize(
    "flags",
    ["--sglang-quantization fp8", "--check-weight-update-equal", "--sglang-max-lora-rank 4"],
)
def test_engines_that_get_merged_weights_need_none_of_that(check: Check, flags: str) -> None:
    told = " ".join(check(f"--lora-rank 8 --lora-serve merged {flags}").problems.all())
    assert "--lora-serve" not in told and "is over" not in told


def test_engines_that_serve_adapters_get_room_for_them_and_keep_their_prefixes(check: Check, tmp_path: Path) -> None:
    def server(flags: str, **spec: Any) -> dict[str, Any]:
        place = EnginePlace("127.0.0.1", port=1, nccl_port=2, bootstrap_port=3, dist_init_port=4)
        args = check(flags).args
        return build_server_args(args, EngineSpec(0, str(tmp_path / "hf"), **spec), place)

    served = server("--lora-rank 8 --lora-target-modules o_proj")
    assert (served["enable_lora"], served["max_lora_rank"], served["lora_target_modules"]) == (True, 8, ["o_proj"])
    assert served["max_loras_per_batch"] == 2, "the newest version and the base"
    in_flight = server("--lora-rank 8 --update-weights-in-flight")
    assert in_flight["max_loras_per_batch"] == 4 and "disable_radix_cache" not in in_flight
    assert server("--lora-rank 8", settings={"max_lora_rank": 16})["max_lora_rank"] == 16
    assert server("--lora-rank 8", releases_memory=True)["enable_weights_cpu_backup"] is True
    assert "enable_lora" not in server("--lora-rank 8 --lora-serve merged")
    assert "enable_lora" not in server("--lora-rank 8", takes_weights=False), "a judge has none"


def test_old_log_probs_are_computed_without_dropout(check: Check) -> None:
    """One update needs no pass for them otherwise: the loss's own gives the same numbers."""
    assert not needs_old_log_probs(check("--lora-rank 8").args, 1)
    assert needs_old_log_probs(check("--lora-rank 8 --lora-dropout 0.1").args, 1)


@pytest.mark.parametrize(("largest", "is_asked"), [(1e-8, False), (1e-2, True)])
def test_an_adapter_too_small_for_16_bit_ends_no_run(check: Check, largest: float, is_asked: bool) -> None:
    """A warm-up's first step leaves B at 1e-8; an engine in bf16 answers as without it. A larger one must show."""
    updater = AdapterUpdater.__new__(AdapterUpdater)
    fleet = mock.Mock(engines={})
    fleet.wait.return_value = []
    args, shared = check("--lora-rank 8").args, in_shared_memory({"q.lora_B.weight": torch.full((2, 8), largest)})
    of_one = from_adapters._Adapter(None, {"r": 8, "lora_alpha": 16.0}, {}, shared)
    vars(updater).update(args=args, _is_unseen=True, _fleet=fleet, _adapters=[of_one], _tries=4)
    updater.see_that_it_is_served()
    assert (fleet.start.called, updater._is_unseen) == (is_asked, not is_asked)


BASE_SAYS, TRAINED_SAYS = [-1.0, -2.0, -3.0], [-1.5, -2.5, -2.0]
ANSWERS = {
    "as the trainer": (TRAINED_SAYS, BASE_SAYS, 1.0, None),
    "hardly as the trainer": ([-1.05, -2.05, -2.9], BASE_SAYS, 1.0, "serves slime-v3 otherwise than it was trained"),
    "with the base changed": (TRAINED_SAYS, [-1.45, -2.5, -2.1], 1.0, "has changed its base with slime-v3"),
    "moved too little to say": (BASE_SAYS[:2] + [-3.01], BASE_SAYS, 0.001, None),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_engines_have_to_move_as_the_trainer_did_and_their_base_not(check: Check, case: str) -> None:
    ours, base, share, told = ANSWERS[case]
    trained = [b + share * (t - b) for t, b in zip(TRAINED_SAYS, BASE_SAYS, strict=True)]
    updater, fleet = AdapterUpdater.__new__(AdapterUpdater), mock.Mock(engines={0: SimpleNamespace()})
    fleet.wait.side_effect = [[base], [ours]]
    shared = in_shared_memory({"q.lora_B.weight": torch.ones(2, 8)})
    of_one = from_adapters._Adapter(None, {"r": 8, "lora_alpha": 16.0}, {}, shared, (trained, BASE_SAYS))
    args = check("--lora-rank 8").args
    vars(updater).update(args=args, _is_unseen=True, _fleet=fleet, _adapters=[of_one], _tries=4, weight_version=3)
    with mock.patch.object(from_adapters, "contact_of", lambda engine, number: f"engine {number}"):
        if told is not None:
            with pytest.raises(WeightSyncError, match=told):
                updater.see_that_it_is_served()
            return
        updater.see_that_it_is_served()
    assert updater._is_unseen == (share < 1), "what has hardly moved is looked at again"


def test_dropout_leaves_out_a_share_of_an_adapters_inputs_in_training_alone() -> None:
    """The layer is Megatron's in what an adapter reads of it: a column-parallel one on one rank."""
    count, share = 4096, 0.25
    plan = LoraPlan(1, 1.0, {}, dropout=share)
    group, config = SimpleNamespace(size=lambda: 1, rank=lambda: 0), SimpleNamespace(sequence_parallel=False)
    layer = SimpleNamespace(is_expert=False, config=config, tp_group=group)
    parts = {"projections": ["q_proj"], "sizes": [1], "groups": 0, "peft_names": ["q_proj"]}
    adapter = Adapter(layer, torch.zeros(1, count), name="q", plan=plan, seed=0, **parts)
    adapter.take(0, torch.ones(1, count), torch.ones(1, 1), source="ones")
    x = torch.ones(1, 1, count)
    of_training, of_pass = (adapter.train(mode).add_to(torch.zeros(1, 1, 1), x).item() for mode in (True, False))
    assert of_pass == count, "all inputs"
    left = of_training * (1 - share)
    assert left == pytest.approx(round(left), abs=0.05) and left == pytest.approx(count * (1 - share), rel=0.1)


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_the_rank(check: Check) -> None:
    plan = plan_of(check, "--lora-rank 16 --lora-alpha 8 --lora-use-rslora --lora-exclude-modules o_proj")
    assert plan.scale == 8 / 16**0.5 and "o_proj" not in plan.target_modules


def test_an_adapter_of_other_flags_or_another_base_is_refused(check: Check, tmp_path: Path) -> None:
    (tmp_path / "peft").mkdir()
    fitting = {"r": 8, "lora_alpha": 16, "target_modules": ALL, "base_model_name_or_path": "maker/HF"}

    def problems(**changes: Any) -> list[str]:
        (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(fitting | changes))
        return check("--lora-rank 8 --lora-adapter-path peft").problems.all()

    assert not problems()
    wrong = {
        "r": (4, "has rank 4; give --lora-rank 4"),
        "lora_alpha": (32, "is multiplied by 4; give --lora-alpha 32"),
        "target_modules": (["q_proj"], "give --lora-target-modules q_proj"),
        "use_dora": (True, "use_dora True of its adapter_config.json is not built"),
        "init_lora_weights": ("pissa_niter_4", "init_lora_weights pissa_niter_4 of its adapter_config.json changes"),
        "base_model_name_or_path": ("maker/Other", "holds an adapter of maker/Other, and the base is"),
    }
    for name, (value, text) in wrong.items():
        assert any(text in problem for problem in problems(**{name: value})), name


def test_a_critic_with_a_load_of_its_own_has_adapters_over_that(check: Check, tmp_path: Path) -> None:
    reward = tmp_path / "reward"
    reward.mkdir()
    (reward / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    flags = "--advantage-estimator ppo --no-offload-train --lora-rank 4 --megatron-config-path roles.yaml"

    def checked(**entry: Any) -> tuple[list[str], Any]:
        roles = {"megatron": [{"role": "critic", "overrides": entry}]}
        (tmp_path / "roles.yaml").write_text(json.dumps(roles))
        found = check(flags)
        return found.problems.all(), parse_megatron_role_args(found.args, "critic")

    problems, critic = checked(load="reward")
    assert not problems and (critic.load, base_of(critic), critic.lora_adapter_path) == ("reward", "reward", None)
    problems, _ = checked(load="reward", ref_load="hf")
    assert len(problems) == 1 and "the critic's entry: --load reward holds no adapters, and the base" in problems[0]
    saved(tmp_path / "adapters", rank=8, alpha=16.0, target_modules=ALL, use_rslora=False, has_experts=False)
    problems, _ = checked(load="adapters")
    assert len(problems) == 1 and "--load adapters holds adapters with rank 8, alpha 16.0" in problems[0]
