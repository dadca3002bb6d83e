"""The critic as one rank of a trainer: its head, what it learns, its checkpoints, and the exchange with the actor."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from slime.config.args import Args
from slime.config.custom_config import FileValues
from slime.config.roles import parse_megatron_role_args, role_values
from slime.observability.timer import Timer
from tests.integration.trainer_world import make_train_data, trainer_args
from tests.unit.megatron_fakes import make_hf_model, run_world

FAR = 1e9
"""Of masked tokens, which must not show anywhere."""
UNPADDED = {"data_pad_size_multiplier": 1}
"""Rows that are trained lie on every rank: those of padding would fill the second one of sequence parallelism."""


@pytest.fixture(autouse=True)
def one_rank() -> None:
    """In place of this directory's: the ranks here are real."""


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    make_hf_model(path, tied=True)
    return path


def ppo_args(hf_path: Path, flags: str = "", *, critic: dict[str, Any] | None = None, **changes: Any) -> Args:
    """Args of a PPO run; `critic` are its overrides of a role file."""
    args = Args(**vars(trainer_args(hf_path, flags, advantage_estimator="ppo", **({"lr": 1e-2} | changes))))
    forced = role_values(args, {})
    args.megatron_role_values = {"actor": {}, "critic": {**forced["critic"], **(critic or {})}}
    return args


def start(args: Args, role: str) -> Any:
    from slime.backends.megatron_utils import actor

    cls = {"actor": actor.MegatronTrainActor, "critic": actor.MegatronCriticActor}[role]
    made = cls(parse_megatron_role_args(args, role), rank=0, world_size=0, master_addr="", master_port=0)
    if Timer().is_running("train_wait"):  # of the other role, which has its own process in a run
        Timer().end("train_wait")
    with mock.patch.object(actor.initialize, "init"):  # run_world has done it
        made.started = made.init()
    return made


def shares_of(args: Args, *, dp_size: int = 1, **columns: Any) -> list[dict[str, Any]]:
    from slime.ray.rollout.shares import split_train_data

    return split_train_data(args, make_train_data() | columns, {"dp_size": dp_size, "cp_size": 1})


def mine(actor: Any, shares: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(shares[actor.parallel_config()["dp_rank"]])


def in_world(args: Args, check: Callable[..., None], *more: Any) -> None:
    run_world(args.actor_num_gpus_per_node, check, args, *more)


# ---- the head


def check_fresh_head(args: Args) -> None:
    from slime.backends.megatron_utils.layers.value_head import value_head_of

    critic = start(args, "critic")
    values = critic.values_of(mine(critic, shares_of(args)))["values"]
    lengths = make_train_data()["response_lengths"]
    assert [len(row) for row in values] == lengths and not any(row.any() for row in values)
    head = value_head_of(critic.state.model[0])
    assert head.weight.shape == (1, 32) and head.weight.dtype == torch.float32
    head.weight.data.normal_()
    trunk = critic.state.model[0].module
    assert "embedding.word_embeddings.weight" in dict(trunk.named_parameters())
    with torch.no_grad():
        head.bfloat16()
    assert head.weight.dtype == torch.float32, "the head stays in fp32 where the model is cast"


def test_a_fresh_head_says_0_of_every_token_also_of_a_model_with_a_tied_embedding(hf_path: Path):
    in_world(ppo_args(hf_path), check_fresh_head)


def check_values_of_hidden_states(args: Args, hf_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from slime.backends.megatron_utils.layers.value_head import value_head_of

    critic = start(args, "critic")
    head = value_head_of(critic.state.model[0])
    weights = torch.randn(1, 32, generator=torch.Generator().manual_seed(3))
    head.weight.data.copy_(weights)
    head.bias.data.fill_(0.25)
    share = mine(critic, shares_of(args, dp_size=1))
    tokens, lengths = share["tokens"], share["response_lengths"]
    hf = AutoModelForCausalLM.from_pretrained(hf_path).eval()
    if args.lora_rank is not None:
        hf = with_adapters(critic, hf, Path(args.save))
    found = critic.values_of(share)["values"]
    for sample, length, values in zip(tokens, lengths, found, strict=True):
        with torch.no_grad():
            hidden = hf.model(torch.as_tensor(sample)[None].long()).last_hidden_state[0]
        # the value of token t is made from what comes before it
        expected = (hidden @ weights[0] + 0.25)[len(sample) - length - 1 : -1]
        torch.testing.assert_close(torch.as_tensor(values), expected, rtol=1e-4, atol=1e-4)


def with_adapters(critic: Any, hf: Any, out: Path) -> Any:
    """Draw the critic's adapters, and give the HF model the same by PEFT."""
    from peft import PeftModel

    from slime.backends.megatron_utils.layers.lora import Adapter, save_adapter

    for adapter in (module for module in critic.state.model[0].modules() if isinstance(module, Adapter)):
        for b in adapter.lora_B:
            b.data.normal_()
    save_adapter(critic.args, critic.state.model, out / "adapter")
    return PeftModel.from_pretrained(hf, str(out / "adapter")).base_model.model


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_the_value_of_a_token_is_made_of_the_hidden_state_before_it(hf_path: Path, flags: str):
    in_world(ppo_args(hf_path, flags), check_values_of_hidden_states, hf_path)


def test_adapters_of_a_critic_change_its_hidden_states_as_they_do_in_peft(hf_path: Path, tmp_path: Path):
    args = ppo_args(hf_path, lora_rank=4, ref_load=str(hf_path), save=str(tmp_path))
    in_world(args, check_values_of_hidden_states, hf_path)


# ---- learning


def check_constant_reward(args: Args, out: Path) -> None:
    critic = start(args, "critic")
    share, records = mine(critic, shares_of(args)), []
    returns = [[0.75] * length for length in share["response_lengths"]]
    for rollout_id in range(60):
        values = critic.values_of(dict(share))["values"]
        records += critic.train_on(rollout_id, {**share, "values": values, "returns": returns})
    if torch.distributed.get_rank() == 0:
        torch.save(([metrics for metrics, _ in records], values), out)


@pytest.mark.parametrize(
    "flags", ["", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"]
)
def test_a_critic_learns_to_predict_a_constant_return(hf_path: Path, tmp_path: Path, flags: str):
    in_world(ppo_args(hf_path, flags), check_constant_reward, tmp_path / "out")
    records, values = torch.load(tmp_path / "out", weights_only=False)
    losses = [metrics["train/critic-value_loss"] for metrics in records]
    # 11 of the 12 rollouts have trained tokens; each has the squared error of a value of 0
    assert losses[0] == pytest.approx(0.75**2 * 11 / 12, rel=1e-5)
    assert losses[-1] < losses[0] / 20
    masks = make_train_data()["loss_masks"]
    trained = [v for row, mask in zip(values, masks, strict=True) for v, m in zip(row, mask, strict=True) if m]
    assert sum(trained) / len(trained) == pytest.approx(0.75, abs=0.1)
    assert {"train/critic-value_clipfrac", "train/critic-grad_norm", "train/critic-lr-pg_0"} <= records[0].keys()
    assert [metrics["train/step"] for metrics in records] == list(range(60))


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SECOND_LAYER = {"only_train_params_name_list": [r"layers\.1\."]}
HEAD = {"output_layer.weight", "output_layer.bias"}


def check_partial_training(args: Args) -> None:
    (share,) = shares_of(args)

    def trained(lists: dict[str, Any], **changes: Any) -> tuple[set[str], list[float]]:
        """Names of what two rollouts move, and the gradient norms; a fresh head passes no gradient on in the first."""
        values = {**args.megatron_role_values, "critic": args.megatron_role_values["critic"] | lists}
        critic = start(args.replace(megatron_role_values=values, **changes), "critic")
        before, norms = weights(critic), []
        for rollout_id in range(2):
            values = critic.values_of(dict(share))["values"]
            returns = [[0.75] * len(row) for row in values]
            ((metrics, _),) = critic.train_on(rollout_id, {**share, "values": values, "returns": returns})
            norms.append(metrics["train/critic-grad_norm"])
        return {name for name, tensor in weights(critic).items() if not torch.equal(tensor, before[name])}, norms

    everything, _ = trained({})
    assert everything > HEAD and any("layers.0." in name for name in everything), "the actor's list is not its"
    some, norms = trained(SECOND_LAYER)
    assert some == HEAD | {name for name in everything if "layers.1." in name}
    assert trained(SECOND_LAYER, **RECOMPUTED) == (some, norms)
    assert trained({"freeze_params_name_list": ["."]})[0] == HEAD


def test_the_head_is_always_trained_and_lists_of_parameters_are_the_roles_own(hf_path: Path):
    in_world(ppo_args(hf_path, freeze_params_name_list=["layers.0", "output_layer"]), check_partial_training)


# ---- with the actor


def take_turns(args: Args, rollouts: range, actor: Any, critic: Any) -> list[dict[str, float]]:
    """What the driver does in a rollout, without Ray."""
    records = []
    for rollout_id in rollouts:
        shares = shares_of(args, dp_size=actor.parallel_config()["dp_size"])
        share = mine(actor, shares)
        records += actor.train_on(rollout_id, share | critic.values_of(dict(share)))
        records += critic.train_on(rollout_id, mine(actor, shares) | actor.columns_for_critic)
    return [metrics for metrics, _ in records]


def check_turns(args: Args, out: Path, num_rollouts: int) -> None:
    actor, critic = start(args, "actor"), start(args, "critic")
    before = [parameter.detach().clone() for parameter in actor.state.model[0].parameters()]
    records = take_turns(args, range(num_rollouts), actor, critic)
    same = all(torch.equal(a, b) for a, b in zip(before, actor.state.model[0].parameters(), strict=True))
    if torch.distributed.get_rank() == 0:
        torch.save((records, same), out)


def turns(args: Args, out: Path, num_rollouts: int = 2) -> tuple[list[dict[str, float]], bool]:
    in_world(args, check_turns, out, num_rollouts)
    return torch.load(out, weights_only=False)


def column(records: list[dict[str, float]], name: str) -> list[float]:
    return [metrics[name] for metrics in records if name in metrics]


def test_the_first_rollouts_train_only_the_critic(hf_path: Path, tmp_path: Path):
    records, same = turns(ppo_args(hf_path, num_critic_only_steps=2), tmp_path / "out")
    assert same and not column(records, "train/pg_loss")
    first, second = column(records, "train/critic-value_loss")
    assert first != second
    records, same = turns(ppo_args(hf_path, num_critic_only_steps=1), tmp_path / "out")
    assert not same and [m["train/step"] for m in records if "train/pg_loss" in m] == [1]


@pytest.fixture(scope="module")
def of_one_rank(hf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return turns(ppo_args(hf_path, **UNPADDED), tmp_path_factory.mktemp("one") / "one")[0]


@pytest.mark.parametrize(
    ("flags", "dp"),
    [
        ("", 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 1),
        ("--context-parallel-size 2", 1),
        ("--pipeline-model-parallel-size 2", 1),
    ],
)
def test_two_ranks_do_what_one_does(
    hf_path: Path, tmp_path: Path, of_one_rank: list[dict[str, float]], flags: str, dp: int
):
    """Gradient norms show a gradient that is summed too often or too seldom; Adam's updates would not."""
    agree(of_one_rank, turns(ppo_args(hf_path, flags, dp_size=dp, **UNPADDED), tmp_path / "two")[0])


def test_two_ranks_do_what_one_does_with_adapters(hf_path: Path, tmp_path: Path):
    more, flags = {"lora_rank": 4, "ref_load": str(hf_path), **UNPADDED}, "--tensor-model-parallel-size 2"
    one, _ = turns(ppo_args(hf_path, **more), tmp_path / "one")
    agree(one, turns(ppo_args(hf_path, f"{flags} --sequence-parallel", **more), tmp_path / "two")[0])


def agree(one: list[dict[str, float]], two: list[dict[str, float]]) -> None:
    """Both runs have the same values, losses and norms."""
    for name in ("rollout/values", "rollout/returns", "train/critic-value_loss", "train/critic-grad_norm"):
        assert column(one, name) == pytest.approx(column(two, name), rel=1e-4), name
    assert column(one, "rollout/values")[0] == 0 != column(one, "rollout/values")[1]


# ---- checkpoints


def weights(actor: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in actor.state.model[0].module.named_parameters()}


def check_save(args: Args) -> None:
    """Two rollouts and a checkpoint, then two more."""
    actor, critic = start(args, "actor"), start(args, "critic")
    take_turns(args, range(2), actor, critic)
    critic.save_model(1)
    actor.save_model(1)
    kept = weights(critic)
    records = take_turns(args, range(2, 4), actor, critic)
    torch.save((kept, records), Path(args.save) / "rest")


def check_resume(args: Args, saved: Path) -> None:
    """The two more rollouts of a run that was saved."""
    actor, critic = start(args, "actor"), start(args, "critic")
    assert actor.started == critic.started == {"start_rollout_id": 2}
    kept, records = torch.load(saved / "rest", weights_only=False)
    found = weights(critic)
    assert found["output_layer.weight"].any() and all(torch.equal(found[name], kept[name]) for name in kept)
    again = take_turns(args, range(2, 4), actor, critic)
    assert again == records, "moments and schedules go on, too"


def check_fresh_critic(args: Args, saved: Path) -> None:
    """What a critic has of a checkpoint without one: the policy's weights, under a fresh head."""
    critic = start(args, "critic")
    found, policy = weights(critic), start(args.replace(advantage_estimator="grpo", use_critic=False), "actor")
    assert not found.pop("output_layer.weight").any() and not found.pop("output_layer.bias").any()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(policy).items() if name in found)
    assert critic.started["start_rollout_id"] == 0


def resuming(args: Args, load: Path) -> Args:
    return args.replace(load=str(load), finetune=False, no_load_optim=False, no_load_rng=False)


@pytest.fixture(scope="module")
def saved(hf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    in_world(ppo_args(hf_path, save=str(root)), check_save)
    return root


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(hf_path: Path, saved: Path):
    assert (saved / "critic" / "iter_0000001").is_dir() and (saved / "iter_0000001").is_dir()
    in_world(resuming(ppo_args(hf_path, save=str(saved)), saved), check_resume, saved)


def test_adapters_and_head_of_a_critic_go_on_over_a_base_that_stays(hf_path: Path, tmp_path: Path):
    args = ppo_args(hf_path, lora_rank=4, ref_load=str(hf_path), save=str(tmp_path))
    in_world(args, check_save)
    before, _ = torch.load(tmp_path / "rest", weights_only=False)
    in_world(resuming(args, tmp_path), check_resume, tmp_path)
    in_world(args, check_what_moves, before)
    parts = FileSystemReader(tmp_path / "critic" / "iter_0000001").read_metadata().state_dict_metadata
    of_model = {name for name in parts if "optimizer" not in name and ("layers" in name or "embedding" in name)}
    assert of_model and all(".lora." in name for name in of_model), "the base is in no checkpoint"


def test_adapters_of_a_critic_go_on_over_a_base_of_its_own(hf_path: Path, tmp_path: Path):
    """Its entry's `load` is the base under its adapters, when the run begins and when it goes on."""
    shutil.copytree(hf_path, tmp_path / "reward")
    tensors = load_file(hf_path / "model.safetensors")
    of_reward = {name: 1.5 * tensor for name, tensor in tensors.items()}
    save_file(of_reward, tmp_path / "reward" / "model.safetensors", metadata={"format": "pt"})
    args = ppo_args(hf_path, lora_rank=4, ref_load=str(hf_path), save=str(tmp_path / "ckpt"))
    roles = role_values(args, {"critic": FileValues(known={"load": str(tmp_path / "reward")})})
    args = args.replace(megatron_role_values=roles)
    in_world(args, check_save)
    kept, _ = torch.load(tmp_path / "ckpt" / "rest", weights_only=False)
    base, policy = (load_file(path / "model.safetensors") for path in (tmp_path / "reward", hf_path))
    rows = base["model.embed_tokens.weight"]
    found = kept["embedding.word_embeddings.weight"][: len(rows)]
    assert torch.equal(found, rows) and not torch.equal(rows, policy["model.embed_tokens.weight"])
    in_world(resuming(args, tmp_path / "ckpt"), check_resume, tmp_path / "ckpt")


def check_named(args: Args) -> None:
    """Copies in another process's memory are made of what `named_weights` yields."""
    critic = start(args, "critic")
    named = {tensor.data_ptr() for _, tensor in critic.backend.named_weights()}
    parameters = list(critic.state.model[0].named_parameters())
    trained = {name for name, parameter in parameters if parameter.requires_grad}
    assert {name for name, parameter in parameters if parameter.data_ptr() in named} == trained
    assert len([name for name in trained if name.endswith(tuple(HEAD))]) == len(HEAD)


def test_copies_of_a_critic_with_adapters_hold_all_that_is_trained(hf_path: Path):
    in_world(ppo_args(hf_path, lora_rank=4, ref_load=str(hf_path)), check_named)


def check_what_moves(args: Args, trained: dict[str, torch.Tensor]) -> None:
    """Of a critic, against one that was not trained."""
    moved = {name for name, tensor in weights(start(args, "critic")).items() if not torch.equal(tensor, trained[name])}
    assert moved > HEAD and all(".lora." in name for name in moved - HEAD), moved


def test_a_critic_starts_from_a_policys_checkpoint_with_a_fresh_head(
    hf_path: Path, saved: Path, tmp_path: Path, caplog
):
    shutil.copytree(saved / "iter_0000001", tmp_path / "iter_0000001")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    in_world(resuming(ppo_args(hf_path), tmp_path), check_fresh_critic, saved)
    parse_megatron_role_args(resuming(ppo_args(hf_path), tmp_path), "critic")
    assert f"--load {tmp_path} holds no critic: it starts from the actor's weights, with a fresh head" in caplog.text


def check_scores(args: Args, hf: Path) -> None:
    head = value_head_weights(start(args, "critic"))
    score = load_file(hf / "model.safetensors")["score.weight"]
    assert score.any() and torch.equal(head, score)


def value_head_weights(critic: Any) -> torch.Tensor:
    return weights(critic)["output_layer.weight"]


def test_a_reward_models_head_is_the_critics(hf_path: Path, tmp_path: Path):
    tensors = load_file(hf_path / "model.safetensors")
    save_file(tensors | {"score.weight": torch.randn(1, 32)}, tmp_path / "model.safetensors")
    shutil.copy(hf_path / "config.json", tmp_path)
    in_world(ppo_args(hf_path, critic={"load": str(tmp_path)}), check_scores, tmp_path)


def test_a_critic_has_its_part_of_the_iteration_that_the_actor_goes_on_from(
    hf_path: Path, saved: Path, tmp_path: Path
):
    base = ppo_args(hf_path, save=str(saved), critic={"load": "elsewhere"})
    resumed = parse_megatron_role_args(resuming(base, saved), "critic")
    assert (resumed.load, resumed.ckpt_step, resumed.save) == (str(saved / "critic"), 1, str(saved / "critic"))
    assert (resumed.finetune, resumed.no_load_optim) == (False, False)
    begun = parse_megatron_role_args(base, "critic")
    assert (begun.load, begun.finetune, begun.no_load_optim, begun.no_load_rng) == ("elsewhere", True, True, True)
    moved = parse_megatron_role_args(ppo_args(hf_path, save="a", critic={"save": "b"}), "critic")
    assert (moved.save, moved.save_hf, moved.keep_checkpoints) == ("b", None, None)


# ---- hooks


def provide_tied(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """A --custom-model-provider-path: the run's own model."""
    from slime.backends.megatron_utils.model_provider import build_gpt

    return build_gpt(SEEN["args"], pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)


def before_log_prob(args: Any, model: Any, store_prefix: str) -> None:
    """A --custom-megatron-before-log-prob-hook-path."""
    SEEN["passes"].append((args.loss_type, store_prefix))


SEEN: dict[str, Any] = {}


def check_hooks(args: Args) -> None:
    SEEN.update(args=args, passes=[])
    critic = start(args, "critic")
    assert value_head_weights(critic).shape == (1, 32)
    critic.values_of(mine(critic, shares_of(args)))
    assert SEEN["passes"] == [("value_loss", "")]


def test_a_model_of_the_users_own_gets_a_value_head_and_its_hook_is_called_before_values(hf_path: Path):
    here = "tests.training.algorithms.test_critic"
    args = ppo_args(
        hf_path,
        custom_model_provider_path=f"{here}.provide_tied",
        custom_megatron_before_log_prob_hook_path=f"{here}.before_log_prob",
    )
    assert not args.untie_embeddings_and_output_weights
    in_world(args, check_hooks)
