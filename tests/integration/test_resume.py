"""A run that was stopped after a checkpoint and resumed is the run that was never stopped, bit for bit; so are its
parts, each by itself: the trainer with the dumped samples, and the engine until weights change. It is colocated: the
last weights that the engine has are those that the trainer exports.

With --deterministic the engine samples with a seed for each sample and serves one request at a time (its logits move
by 4e-6 with the batch, which would flip a rare token), and the old log-probs come from the trainer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.checkpoints.rollout_files import load_dump
from tests.integration.launch import ROOT, Run, grpo_flags, make_model, tensors_in, train, write_prompts
from tests.integration.test_agreement_and_sync import assert_answers_are_of

pytestmark = pytest.mark.timeout(1200)
SAVE_EVERY, TOTAL = 2, 4
EXACT_COLUMNS = ("train/loss", "train/pg_loss", "train/grad_norm", "train/ppo_kl", "train/entropy_loss")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    work = tmp_path_factory.mktemp("inputs")
    model, prompts = make_model(work / "model"), write_prompts(work / "prompts.jsonl", count=12)
    return [
        *grpo_flags(model, prompts), "--colocate", "--rollout-shuffle",
        "--deterministic",
        "--lr-decay-style", "cosine", "--lr-decay-iters", TOTAL, "--lr-warmup-iters", 1,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(flags: list[Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """(uninterrupted, resumed); both under the checks of --ci-test. The resumed one loses its trainer in its last
    rollout, and goes on from the checkpoint of the epoch's end before."""
    work = tmp_path_factory.mktemp("resume")
    prompts = flags[flags.index("--prompt-data") + 1]

    def launch(out: Path, *more: Any) -> Run:
        return train(
            out, *flags, *more, "--num-rollout", TOTAL,
            "--save", out, "--resume", "auto", "--save-interval", SAVE_EVERY,
            "--save-hf", out / "hf-{rollout_id}", "--save-debug-rollout-data", out / "dump" / "{rollout_id}.pt",
            "--ci-test", "--ci-train-rollout-logprob-abs-diff-threshold", 1e-4,
            "--eval-prompt-data", "digits", prompts, "--eval-interval", TOTAL, "--skip-eval-before-train",
        )  # fmt: skip

    straight = launch(work / "straight")
    leave_as_if_killed(straight.output_dir, work / "resumed", last_saved=SAVE_EVERY - 1)
    killed = f"{ROOT}/tests/integration/user_code.py:kill_this_rank_in_rollout_3"
    resumed = launch(work / "resumed", "--max-restarts", 1, "--custom-megatron-before-train-step-hook-path", killed)
    return straight, resumed


def leave_as_if_killed(finished: Path, stopped: Path, *, last_saved: int) -> None:
    """What a run has on disk that was killed after its checkpoint of rollout `last_saved`; of a later one, which the
    tracker names, the disk has lost a bit: no one may load that."""
    name, damaged = f"iter_{last_saved:07d}", f"iter_{TOTAL - 1:07d}"
    for iteration in (name, damaged):
        shutil.copytree(finished / iteration, stopped / iteration)
    (stopped / "latest_checkpointed_iteration.txt").write_text(str(TOTAL - 1))
    weights = next((stopped / damaged).glob("__0_*.distcp"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    (stopped / "rollout").mkdir()
    for state in (finished / "rollout").glob(f"*_{last_saved}.*"):
        shutil.copy(state, stopped / "rollout")
    for rollout_id in range(last_saved + 1):
        (stopped / "dump").mkdir(exist_ok=True)
        shutil.copy(finished / "dump" / f"{rollout_id}.pt", stopped / "dump")
    records = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    kept = [record for record in records if record[record["step_key"]] <= last_saved]
    (stopped / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))


def test_a_lost_trainer_is_replaced_and_the_engine_stays(runs: tuple[Run, Run]):
    resumed = runs[1]
    assert "training the trainer on rollout 3" in resumed.printed and "rank 0 of 1 is lost" in resumed.printed
    assert (resumed.output_dir / "killed_a_rank").exists()
    for saved in (SAVE_EVERY - 1, TOTAL - 2):
        assert f"resumed from rollout {saved}; going on at {saved + 1}" in resumed.printed
    logs = resumed.output_dir / "logs"
    assert (logs / "engine_0.log").read_text().count("init_cpu_threads_env") == 1, "one server, started once"
    assert (logs / "trainer_0.log").read_text().count("imported everything") == 2
    versions = {tuple(sample["weight_versions"]) for sample in samples(resumed, 3)}
    assert versions == {("3",)}, "syncs before it: at the start, after rollout 2, with the new trainer"


def test_a_trainer_that_is_lost_before_the_first_checkpoint_begins_again(
    runs: tuple[Run, Run], flags: list[Any], tmp_path: Path
):
    """In rollout 1, when two rollouts have been drawn: the data source begins again, too."""
    killed = f"{ROOT}/tests/integration/user_code.py:kill_this_rank_in_rollout_1"
    begun_again = train(
        tmp_path, *flags, "--num-rollout", 2, "--save", tmp_path,
        "--save-debug-rollout-data", tmp_path / "dump" / "{rollout_id}.pt",
        "--max-restarts", 1, "--custom-megatron-before-train-step-hook-path", killed,
    )  # fmt: skip
    assert (tmp_path / "killed_a_rank").exists()
    assert "there is no checkpoint of this run: it begins again" in begun_again.printed
    for rollout_id in range(2):
        straight, again = (samples(run, rollout_id) for run in (runs[0], begun_again))
        assert [sample["tokens"] for sample in straight] == [sample["tokens"] for sample in again]
    steps = begun_again.records("train/step")
    assert len(steps) == 2
    for straight, again in zip(runs[0].records("train/step")[:2], steps, strict=True):
        assert {name: straight[name] for name in EXACT_COLUMNS} == {name: again[name] for name in EXACT_COLUMNS}
    assert (tmp_path / "iter_0000001").is_dir()


def samples(run: Run, rollout_id: int) -> list[dict]:
    return load_dump(run.output_dir / "dump" / f"{rollout_id}.pt")["samples"]


@pytest.mark.parametrize("rollout_id", range(TOTAL))
def test_tokens_rewards_and_masks_are_equal(runs: tuple[Run, Run], rollout_id: int):
    straight, resumed = (samples(run, rollout_id) for run in runs)
    for name in ("index", "prompt", "tokens", "reward", "loss_mask", "response"):
        assert [sample[name] for sample in straight] == [sample[name] for sample in resumed], name


def test_losses_and_gradient_norms_are_equal(runs: tuple[Run, Run]):
    straight, resumed = (run.records("train/step") for run in runs)
    assert len(straight) == len(resumed) == TOTAL
    for a, b in zip(straight, resumed, strict=True):
        assert {name: a[name] for name in EXACT_COLUMNS} == {name: b[name] for name in EXACT_COLUMNS}
        assert a["train/lr-pg_0"] == b["train/lr-pg_0"]
        name = "train/train_rollout_logprob_abs_diff"
        assert a[name] == pytest.approx(b[name], abs=1e-5)


def test_final_weights_are_equal(runs: tuple[Run, Run]):
    straight, resumed = (load_file(run.output_dir / f"hf-{TOTAL - 1}" / "model.safetensors") for run in runs)
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_a_colocated_engine_agrees_with_the_trainer_and_answers_with_the_exported_weights(
    runs: tuple[Run, Run], flags: list[Any]
):
    out = runs[0].output_dir
    first = runs[0].records("train/step")[0]
    assert first["train/train_rollout_logprob_abs_diff"] < 1e-4 and abs(first["train/ppo_kl"]) < 1e-6
    evaluated, exported = out / "dump" / f"eval_{TOTAL}.pt", out / f"hf-{TOTAL - 1}"
    assert_answers_are_of(evaluated, exported, instead_of=flags[flags.index("--hf-checkpoint") + 1])


def test_a_trainer_alone_repeats_the_losses_from_the_dumped_samples(
    runs: tuple[Run, Run], flags: list[Any], tmp_path: Path
):
    straight = runs[0]
    dump = straight.output_dir / "dump" / "{rollout_id}.pt"
    details = tmp_path / "train-{rollout_id}.pt"
    replayed = train(
        tmp_path / "out", *flags, "--num-rollout", 2, "--load-debug-rollout-data", dump,
        "--save-debug-train-data", details,
    )  # fmt: skip
    assert not list((replayed.output_dir / "logs").glob("engine*")), "no engine was started"
    found, expected = replayed.records("train/step"), straight.records("train/step")[:2]
    for a, b in zip(found, expected, strict=True):
        for name in (*EXACT_COLUMNS, "train/train_rollout_logprob_abs_diff"):
            assert a[name] == pytest.approx(b[name], abs=1e-6), name
    trained = load_dump(tmp_path / "train-1.pt")["samples"]
    assert [sample["tokens"].tolist() for sample in trained] == [sample["tokens"] for sample in samples(straight, 1)]
    gap = max(float((s["log_probs"] - s["rollout_log_probs"]).abs().max()) for s in trained)
    assert gap < 1e-4, "the engine had these weights"


@pytest.fixture(scope="module")
def alone(flags: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two rollouts of an engine without a trainer; it is lost in the second."""
    out = tmp_path_factory.mktemp("alone") / "out"
    return train(
        out, *flags, "--num-rollout", 2, "--debug-rollout-only", "--dump-details", out.parent / "details",
        "--custom-rm-path", f"{ROOT}/tests/integration/user_code.py:end_the_only_engine_in_rollout_1", check=False,
    )  # fmt: skip


def test_an_engine_alone_generates_what_it_does_with_a_trainer(runs: tuple[Run, Run], alone: Run):
    details = alone.output_dir.parent / "details"
    assert not list((alone.output_dir / "logs").glob("trainer*")), "no trainer was started"
    assert not (details / "train_data").exists()
    assert (details / "tokenizer" / "tokenizer_config.json").is_file()
    generated = load_dump(details / "rollout_data" / "0.pt")["samples"]
    for name in ("index", "tokens", "reward"):
        assert [sample[name] for sample in generated] == [sample[name] for sample in samples(runs[0], 0)], name


def test_the_last_error_of_the_only_engine_is_that_of_the_run(alone: Run):
    (error,) = [line for line in alone.printed.splitlines() if line.startswith("error: ")]
    why = "engine 0 has ended (killed by SIGKILL): torch.AcceleratorError: CUDA error: an illegal memory access"
    assert alone.status == 1 and why in error and "No available workers" not in error, alone.printed[-3000:]


RELEASES = 2
SEPARATE = pytest.param(["--rollout-num-gpus", 1], id="separate", marks=pytest.mark.slow)
PLACEMENTS = [pytest.param(["--colocate"], id="colocate"), SEPARATE]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_trainers_that_end_between_steps_train_as_those_that_stay(
    runs: tuple[Run, Run], flags: list[Any], placement: list[Any], tmp_path: Path
):
    """Their weights reach the engine as files, those of the run that stays in shared memory."""
    stay, sync = runs[0], tmp_path / "sync"
    others = [flag for flag in flags if flag != "--colocate"]
    end = train(
        tmp_path / "end", *others, *placement, "--num-rollout", RELEASES, "--release-train",
        "--save", tmp_path / "end", "--save-interval", 1, "--save-hf", tmp_path / "end" / "hf-{rollout_id}",
        "--update-weight-transport", "disk", "--update-weight-disk-dir", sync, "--update-weight-disk-keep-files",
        "--update-weight-buffer-size", 100_000,
    )  # fmt: skip
    for name in (*EXACT_COLUMNS, "train/train_rollout_logprob_abs_diff"):
        assert end.column(name) == stay.column(name)[:RELEASES], name
    assert (
        end.column("rollout/raw_reward", "rollout/step")
        == stay.column("rollout/raw_reward", "rollout/step")[:RELEASES]
    )
    assert (end.output_dir / "logs/trainer_0.log").read_text().count("imported everything") > RELEASES
    assert max(end.column("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert sorted(path.name for path in sync.glob("weight_*")) == [f"weight_v{i + 1:06d}" for i in range(RELEASES + 1)]
    for rollout_id in range(RELEASES):
        exported = load_file(end.output_dir / f"hf-{rollout_id}" / "model.safetensors")
        written = tensors_in(sync / f"weight_v{rollout_id + 2:06d}")  # the first are the initial weights
        assert written.keys() == exported.keys() - {"lm_head.weight"}
        assert all(torch.equal(tensor, exported[name]) for name, tensor in written.items())
    (num_bytes,) = set(end.column("perf/update_weights_wire_bytes", "rollout/step"))
    assert num_bytes == sum(tensor.nbytes for tensor in written.values())
    same = load_file(stay.output_dir / f"hf-{RELEASES - 1}" / "model.safetensors")
    assert all(torch.equal(tensor, same[name]) for name, tensor in exported.items())
