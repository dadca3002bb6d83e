"""What a trainer does around its steps: which log-prob passes run, on whose weights, hooks, and repeatability."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.checkpoints.paths import iteration_dir, latest_iteration, what_is_wrong
from tests.integration.trainer_world import make_train_data, parameters, train, trainer_args
from tests.unit.megatron_fakes import make_hf_model

HOOKS = str(Path(__file__).with_name("trainer_hooks.py"))


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    make_hf_model(path)
    return path


def calls() -> list[Any]:
    """What the hooks recorded in this process; they were loaded from their file, not imported by name."""
    from slime.utils.misc import load_function

    return load_function(f"{HOOKS}:CALLS")


def of(records: list[Any], key: str) -> list[dict[str, float]]:
    return [metrics for metrics, step_key in records if step_key == key]


def save(actor: Any, records: list[Any], path: Path) -> None:
    torch.save((parameters(actor), records), path)


def run(
    hf_path: Path, out: Path, *, num_rollouts: int = 2, **changes: Any
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Train and return the weights and the records."""
    args = trainer_args(hf_path, **({"lr": 1e-2} | changes))
    train(args, save, out, num_rollouts=num_rollouts)
    return torch.load(out)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_pass_for_old_log_probs_changes_no_bit_and_runs_only_when_needed(hf_path: Path, tmp_path: Path):
    skipped, skipped_records = run(hf_path, tmp_path / "a")
    again, _ = run(hf_path, tmp_path / "b")
    forced, forced_records = run(hf_path, tmp_path / "c", recompute_old_log_probs=True)
    assert same(skipped, again), "the same data give the same bits"
    assert same(skipped, forced)
    assert "rollout/log_probs" not in of(skipped_records, "rollout/step")[0]
    assert "rollout/log_probs" in of(forced_records, "rollout/step")[0]
    for left, right in zip(of(skipped_records, "train/step"), of(forced_records, "train/step"), strict=True):
        assert left == right
        assert right["train/ppo_kl"] == 0.0
    two_steps = of(run(hf_path, tmp_path / "d", global_batch_size=6, num_rollouts=1)[1], "train/step")
    assert [metrics["train/step"] for metrics in two_steps] == [0, 1]
    assert two_steps[0]["train/ppo_kl"] == 0.0
    assert abs(two_steps[1]["train/ppo_kl"]) > 1e-4


def test_a_change_of_weights_shows_in_the_metric_that_watches_for_it(hf_path: Path, tmp_path: Path):
    changes = {"recompute_old_log_probs": True, "num_rollouts": 1, "lr": 0.0}
    clean = of(run(hf_path, tmp_path / "a", **changes)[1], "train/step")[0]
    hook = f"{HOOKS}:perturb_before_log_probs"
    before_pass = run(hf_path, tmp_path / "b", **changes, custom_megatron_before_log_prob_hook_path=hook)
    hook = f"{HOOKS}:perturb_before_train_step"
    after_pass = run(hf_path, tmp_path / "c", **changes, custom_megatron_before_train_step_hook_path=hook)
    before, after = (of(records, "train/step")[0] for _, records in (before_pass, after_pass))
    gap = "train/train_rollout_logprob_abs_diff"
    assert abs(before[gap] - clean[gap]) > 1e-2
    assert before["train/ppo_kl"] == 0.0
    assert after[gap] == clean[gap]
    assert abs(after["train/ppo_kl"]) > 1e-3


def check_reference(actor: Any, records: list[Any], out: Path) -> None:
    first, second = of(records, "train/step")
    assert first["train/kl_loss"] == 0.0
    assert second["train/kl_loss"] > 1e-4
    assert calls() == ["ref_", "ref_"]
    assert (
        of(records, "rollout/step")[0]["rollout/ref_log_probs"]
        == of(records, "rollout/step")[1]["rollout/ref_log_probs"]
    )
    save(actor, records, out)


def test_the_reference_stays_and_looking_at_it_leaves_the_actor_alone(hf_path: Path, tmp_path: Path):
    changes = {"use_kl_loss": True, "kl_loss_coef": 0.0, "kl_loss_type": "k3", "ref_load": str(hf_path), "lr": 1e-2}
    hook = f"{HOOKS}:record_log_prob_pass"
    args = trainer_args(hf_path, **changes, custom_megatron_before_log_prob_hook_path=hook)
    train(args, check_reference, tmp_path / "with", num_rollouts=2)
    assert same(torch.load(tmp_path / "with")[0], run(hf_path, tmp_path / "without")[0])


def save_after_one(actor: Any, records: list[Any], out: Path) -> None:
    """Save, then go on with one more rollout, whose records and weights are what a resumed run must repeat.

    With --async-save the files are written meanwhile: they must hold what the weights were.
    """
    actor.save_model(0)
    save(actor, actor.train_on(1, share()), out)
    if actor.args.async_save:
        assert latest_iteration(actor.args.save) is None, "it has no name before it is complete"
        actor.finish_save()
        assert actor.save_is_written()


def check_resumed(actor: Any, records: list[Any], out: Path) -> None:
    save(actor, actor.train_on(1, share()), out)


def share() -> dict[str, Any]:
    from slime.ray.rollout.shares import split_train_data

    args = SimpleNamespace(
        balance_data=False,
        balance_by_flops=False,
        drop_last_rollouts=False,
        global_batch_size=6,
        max_tokens_per_gpu=60,
        use_dynamic_batch_size=True,
    )
    return split_train_data(args, make_train_data(), {"dp_size": 1, "cp_size": 1})[0]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(hf_path: Path, tmp_path: Path, async_save: bool):
    schedule = "--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1"
    root = str(tmp_path / "ckpt")
    changes = {"lr": 1e-2, "save": root, "async_save": async_save}
    train(trainer_args(hf_path, schedule, **changes), save_after_one, tmp_path / "straight")
    assert what_is_wrong(iteration_dir(root, 0) / "manifest.json") is None
    resumed = {"load": root, "finetune": False, "no_load_optim": False, "no_load_rng": False}
    train(trainer_args(hf_path, schedule, lr=1e-2, **resumed), check_resumed, tmp_path / "resumed", num_rollouts=0)
    straight, again = (torch.load(tmp_path / name) for name in ("straight", "resumed"))
    assert same(straight[0], again[0])
    assert straight[1] == again[1]
    assert of(again[1], "train/step")[0]["train/lr-pg_0"] > 0


def save_three_times(actor: Any, records: list[Any], exports: str) -> None:
    for rollout_id in (0, 1, 2):
        actor.save_model(rollout_id)


def test_a_run_keeps_the_checkpoints_and_the_contents_that_it_is_asked_for(hf_path: Path, tmp_path: Path):
    def names(path: Path) -> list[str]:
        return sorted(p.name for p in path.iterdir())

    def size(path: Path) -> int:
        return sum(file.stat().st_size for file in path.glob("*.distcp"))

    tracker = "latest_checkpointed_iteration.txt"
    exports = str(tmp_path / "hf_{rollout_id}")
    two = {"save": str(tmp_path / "a"), "save_hf": exports, "keep_checkpoints": 2}
    train(trainer_args(hf_path, **two), save_three_times, exports)
    assert names(tmp_path / "a") == ["iter_0000001", "iter_0000002", tracker]
    assert names(tmp_path) == ["a", "hf_1", "hf_2"]
    only = {"save": str(tmp_path / "b"), "checkpoint_contents": ["model", "hf"]}
    train(trainer_args(hf_path, **only), save_three_times, exports)
    assert names(tmp_path / "b") == ["iter_0000000", "iter_0000001", "iter_0000002", tracker]
    export = tmp_path / "b" / "iter_0000002" / "hf"
    assert {"config.json", "model.safetensors"} <= set(names(export))
    # Adam keeps two moments of each weight, and here (fp32) no weights of its own
    assert size(tmp_path / "b" / "iter_0000002") < size(tmp_path / "a" / "iter_0000002") / 2
    train(trainer_args(hf_path, load=str(export)), check_loads)  # an iteration's export is a checkpoint of its own


def test_an_export_that_does_not_fit_is_said_and_leaves_the_older_one(hf_path: Path, tmp_path: Path):
    export = tmp_path / "hf"
    export.mkdir()
    (export / "older").write_text("one")
    train(trainer_args(hf_path, save_hf=str(export)), check_full_disk, export)


def check_full_disk(actor: Any, records: list[Any], export: Path) -> None:
    """No file of this process may be larger than the model: as on a full disk, every write after that fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    actor.save_model(0)
    assert "became full" in actor.export_problem()
    assert [path.name for path in export.iterdir()] == ["older"] and not list(export.parent.glob("*.partial"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    actor.save_model(1)
    assert actor.export_problem() is None and (export / "model.safetensors").is_file()


def check_loads(actor: Any, records: list[Any]) -> None:
    assert len(of(records, "train/step")) == 1


def check_hooks(actor: Any, records: list[Any]) -> None:
    seen = calls()
    assert [call[:2] for call in seen if isinstance(call[1], int)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(call[2] == 0 for call in seen if isinstance(call[1], int)), "called after the gradients are cleared"
    assert [call[3] for call in seen if isinstance(call[1], int)] == [0, 6, 12, 18]
    columns = [call for call in seen if isinstance(call[1], list)]
    assert [rollout_id for rollout_id, _ in columns] == [0, 1]
    assert {"advantages", "returns", "log_probs", "tokens"} <= set(columns[0][1])
    assert all(metrics["train/grad_norm"] == 0.0 for metrics in of(records, "train/step"))
    assert of(records, "rollout/step")[0]["rollout/advantages"] == 0.0


def test_hooks_are_called_with_their_arguments_at_their_time(hf_path: Path):
    hooks = {
        "rollout_data_postprocess_path": f"{HOOKS}:no_advantage",
        "custom_megatron_before_train_step_hook_path": f"{HOOKS}:record_train_step",
    }
    train(trainer_args(hf_path, global_batch_size=6, **hooks), check_hooks, num_rollouts=2)


def check_padding(actor: Any, records: list[Any]) -> None:
    args, *widths = calls()
    assert args is actor.args, "the init hook ran, once, and before the model was built"
    assert widths and all(width % 5 == 0 for width in widths) and any(width % 128 for width in widths)


def test_a_hook_after_the_start_a_model_of_the_user_and_padding_to_a_multiple(hf_path: Path):
    hooks = {
        "custom_megatron_init_path": f"{HOOKS}:remember_args",
        "custom_model_provider_path": f"{HOOKS}:model_that_tells_its_widths",
    }
    train(trainer_args(hf_path, data_pad_size_multiplier=5, **hooks), check_padding)


def check_sft(actor: Any, records: list[Any]) -> None:
    losses = [metrics["train/loss"] for metrics in of(records, "train/step")]
    assert losses[-1] < losses[0] - 0.1
    assert not any(name.startswith("rollout/advantages") for name in of(records, "rollout/step")[0])


def test_sft_learns_and_computes_no_advantages(hf_path: Path):
    train(trainer_args(hf_path, loss_type="sft_loss", lr=1e-2), check_sft, num_rollouts=4)


def check_metric_names(actor: Any, records: list[Any]) -> None:
    assert [key for _, key in records] == ["rollout/step", "train/step"]
    names = {"loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff", "grad_norm"}
    assert {f"train/{n}" for n in names | {"lr-pg_0", "lr-pg_1", "global_batch_size", "step"}} == set(records[1][0])
    assert actor.parallel_config() == {
        "dp_size": 2,
        "dp_rank": torch.distributed.get_rank(),
        "tp_size": 1,
        "tp_rank": 0,
        "cp_size": 1,
        "cp_rank": 0,
        "pp_size": 1,
        "pp_rank": 0,
        "vpp_group": 1,
    }
    data = records[0][0]
    assert data["rollout/raw_reward"] == pytest.approx(6 / 13), "the mean over both ranks' samples"


def test_metrics_have_the_contracts_names_and_cover_all_ranks(hf_path: Path):
    train(trainer_args(hf_path, dp_size=2), check_metric_names, dp_size=2)
