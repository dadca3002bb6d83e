"""Our colocated GRPO step beside that of verl 0.9.1, one after the other on the same GPU.

    python benchmarks/gpu_vs_verl.py --verl-site DIR [--model 0.6B] [--response 512] [--lengths fixed]
    python benchmarks/gpu_vs_verl.py --verl-site DIR --tiny     # ours on a CPU; verl only composes its configuration

Both sides: SGLang with the same settings and the same sizes of captured decode graphs, 8 samples of each prompt,
random rewards, one update a step in bf16 with fp32 masters, micro-batches packed to the same number of tokens, trainer
and engine taking turns on the GPU, weights synced after every step. Prompts have the same tokens, and every response
the same length on both sides: all of them --response tokens (`fixed`), or log-normal with a heavy tail
(`heavy-tailed`). verl runs with FSDP2, packed batches, Liger's kernels and torch's own flash attention, and
`benchmarks/verl_side.py` polls its replay buffer twenty times as often as it would. It skips the pass for old
log-probs (bypass_mode) as ours does; with --old-log-probs both make it, and log its entropy.

DIR holds the packages of verl that the environment lacks (`pip install --no-deps --target DIR`, see REQUIREMENTS);
only verl's processes see it. Of verl a step is its own `timing_s/step`, without the logging after it; ours is the time
from the end of one training to the end of the next. Medians over the steps after the first. Targets of the ratio ours
/ verl's: the step at most 0.75, with old log-probs 0.65, without generation 0.50.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.fixed_length import drawn_length  # noqa: E402
from benchmarks.gpu_fsdp import gpu_gib  # noqa: E402
from benchmarks.gpu_models import QWEN3, SHAPES, prepare_model, write_prompts  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Run,
    grpo_flags,
    last_lines,
    line_of,
    make_parser,
    not_measured,
    parse_options,
    report,
    run_train,
    series_of,
    wait_for,
)

REQUIREMENTS = (
    "verl==0.9.1 tensordict==0.10.0 TransferQueue==0.1.11 liger-kernel==0.8.5 hydra-core==1.3.2 omegaconf==2.3.0 "
    "antlr4-python3-runtime==4.9.3 codetiming==1.4.0 pyvers==0.1.0 torchdata==0.11.0 peft==0.21.2 datasets==5.2.0 "
    "multiprocess==0.70.19 xxhash==4.1.0 pandas==3.1.1"
)
SAMPLES = 8
GRAPHS = (1, 4, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
"""Numbers of requests for which both engines capture a decode graph; each costs a start about a second."""
ENGINE: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_prefill_cuda_graph": True,
}
TARGETS = {"step": 0.75, "step with old log-probs": 0.65, "step without generation": 0.50}
Steps = list[dict[str, float]]
"""One dict for each step: the seconds of "step" and of "generation", and the number of response "tokens"."""


def main() -> None:
    parser = make_parser(__doc__, "gpu_vs_verl")
    parser.add_argument("--verl-site", type=Path, required=True, help="folder with verl and what it imports")
    parser.add_argument("--model", choices=["0.6B", "1.7B", "4B"], default="0.6B")
    parser.add_argument("--response", type=int, default=512, help="tokens of the longest response")
    parser.add_argument("--lengths", choices=["fixed", "heavy-tailed"], default="fixed")
    parser.add_argument("--prompts", type=int, help="of a step (default: 64, with responses over 1,024 tokens 8)")
    parser.add_argument("--old-log-probs", action="store_true", help="a pass of its own for them, on both sides")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, help="of a micro-batch (default: by the GPU and the model)")
    parser.add_argument("--only", choices=["ours", "verl"], help="run this side; the other one's kept run is read")
    parser.add_argument("--verl-flags", default="", help="more overrides of verl, the last ones")
    options = parse_options(parser)
    settle(options)
    options.benchmark = f"gpu_vs_verl-{options.name}"
    model = prepare_model(options.model, options.output / "models", device=options.accelerator, gguf=options.gguf)
    run = our_run(options)
    if options.only != "verl":
        run_train(run, options)
    if options.only != "ours":
        run_verl(model, options)
    ours = our_steps(run, options)
    theirs = verl_steps(verl_folder(options) / "metrics.jsonl", options)
    sys.exit(report(judge(ours, theirs, options), options))


def settle(options: Namespace) -> None:
    """Fill in what follows from the model and the GPU."""
    if not (options.verl_site / "verl").is_dir():
        wanted = f"pip install --no-deps --target {options.verl_site} {REQUIREMENTS}"
        sys.exit(f"--verl-site {options.verl_site} has no folder verl; make it with: {wanted}")
    options.verl_site = options.verl_site.resolve()
    if options.tiny:
        options.model, options.prompts, options.response, options.tokens, options.share = "tiny", 2, 16, 4096, 0.5
    options.prompts = options.prompts or (64 if options.response <= 1024 else 8)
    options.requests = options.prompts * SAMPLES
    options.name = f"{options.model}-{options.response}-{options.lengths}" + "-old" * options.old_log_probs
    options.longest = 64 + options.response
    options.graphs = sorted({size for size in GRAPHS if size < options.requests} | {options.requests})
    if options.tiny:
        return
    gib = gpu_gib()
    options.tokens = options.tokens or max(options.longest, tokens_of(options.model, gib))
    options.share = engine_share(options.model, options.requests * options.longest, gib)


def tokens_of(model: str, gib: float) -> int:
    """Tokens of a micro-batch that both trainers have room for."""
    return {"0.6B": 32768, "1.7B": 16384, "4B": 8192}[model] // (1 if gib > 100 else 2)


def engine_share(model: str, tokens: int, gib: float) -> float:
    """The share of the GPU's memory for weights, and the keys and values of all tokens at once, with some to spare."""
    shape: dict[str, Any] = QWEN3 | SHAPES[model]
    per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2
    weights = {"0.6B": 1.2e9, "1.7B": 3.5e9, "4B": 8.1e9}[model]
    return round(min(0.8, (weights + 1.15 * tokens * per_token + 4e9) / (gib * 2**30)), 2)


# ---- our side


def our_run(options: Namespace) -> Run:
    """The run of train.py."""
    more: list[Any] = ["--colocate", "--max-tokens-per-gpu", options.tokens]
    if options.lengths == "heavy-tailed":
        more += ["--custom-generate-function-path", f"{ROOT}/benchmarks/fixed_length.py:heavy_tailed"]
    if options.old_log_probs:
        more += ["--recompute-old-log-probs", "--use-rollout-entropy"]
    if not options.tiny:
        more += ["--sglang-mem-fraction-static", options.share, "--sglang-cuda-graph-bs-decode", *options.graphs]
        more += ["--sglang-max-running-requests", options.requests]
        for name, value in ENGINE.items():
            more += [f"--sglang-{name.replace('_', '-')}", *([] if value is True else [value])]
    flags = grpo_flags(
        prompts=options.prompts, samples=SAMPLES, response=options.response, rollouts=options.steps, more=more
    )
    return Run(f"vs-verl-{options.name}", options.model, flags)


def our_steps(run: Run, options: Namespace) -> Steps:
    """Read what our run logged for each step."""
    names = ("perf/step_time", "perf/rollout_time", "rollout/response_lengths")
    found = [series_of(run, options).get(name, {}) for name in names]
    rollouts = sorted(set(found[0]) & set(found[1]) & set(found[2]))
    return [
        {"step": found[0][at], "generation": found[1][at], "tokens": found[2][at] * options.requests}
        for at in rollouts
    ]


# ---- verl


def verl_folder(options: Namespace) -> Path:
    """Where its run is kept."""
    return Path(options.output) / "runs" / f"verl-{options.name}"


def run_verl(model: Path, options: Namespace) -> None:
    """Run verl, unless it has already run with the same command; on a CPU it only prints its configuration."""
    folder = verl_folder(options)
    command = verl_command(model, folder, options)
    done = folder / "done.json"
    if options.report or (done.is_file() and json.loads(done.read_text()) == command):
        return
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.{time.time_ns()}"))
    folder.mkdir(parents=True)
    write_verl_files(folder, options)
    (folder / "command.txt").write_text(shlex.join(command) + "\n")
    begin = time.monotonic()
    print(f"{folder.name}: begun (log {folder / 'console.log'})", flush=True)
    status = wait_for(command, folder, options.timeout, env=verl_environment(folder, options))
    print(f"{folder.name}: status {status} after {time.monotonic() - begin:.0f} s", flush=True)
    if status == 0:
        done.write_text(json.dumps(command))
    else:
        print(f"{folder.name}: {last_lines(folder)}", flush=True)


def write_verl_files(folder: Path, options: Namespace) -> None:
    """Write its prompts, the name of its agent loop, and the stand-ins of flash-attn with what names its version."""
    import pyarrow
    import pyarrow.parquet

    prompts = [json.loads(line)["prompt"] for line in write_prompts(folder / "prompts.jsonl").read_text().splitlines()]
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": at, "split": "train", "lengths": lengths_of(at, options)},
        }
        for at, prompt in enumerate(prompts)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "prompts.parquet")
    (folder / "agents.yaml").write_text("- name: given_lengths\n  _target_: benchmarks.verl_side.GivenLengths\n")
    about = folder / "site" / "flash_attn_3-3.0.0.dist-info"
    about.mkdir(parents=True)
    losses = folder / "site" / "flash_attn/ops/triton"
    losses.mkdir(parents=True)
    for package in (losses, losses.parent, losses.parent.parent):
        (package / "__init__.py").touch()
    shutil.copy(ROOT / "benchmarks/verl_cross_entropy.py", losses / "cross_entropy.py")
    shutil.copy(ROOT / "benchmarks/verl_flash_attn.py", folder / "site" / "flash_attn_interface.py")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-3\nVersion: 3.0.0\n")
    (about / "top_level.txt").write_text("flash_attn_interface\n")
    found = importlib.util.find_spec("sgl_kernel")
    if found is not None and found.origin is not None:
        link_kernels(Path(found.origin).parent, folder / "site" / "sgl_kernel")


def link_kernels(source: Path, target: Path) -> None:
    """Link a package of kernels that has Hopper's alone, so that it has those of a newer chip, too.

    verl imports SGLang in a process without a GPU, which asks for them.
    """
    if not (source / "sm90").is_dir() or (source / "sm100").exists():
        return
    target.mkdir()
    for part in source.iterdir():
        (target / part.name).symlink_to(part)
    (target / "sm100").symlink_to(source / "sm90")


def lengths_of(prompt: int, options: Namespace) -> list[int]:
    """Tokens of each response of a prompt; the same as on our side, where samples are counted through all groups."""
    if options.lengths == "fixed":
        return [options.response] * SAMPLES
    return [drawn_length(prompt * SAMPLES + number, options.response) for number in range(SAMPLES)]


def verl_environment(folder: Path, options: Namespace) -> dict[str, str]:
    """Environment of its processes, which import its packages and ours from here."""
    path = [str(folder / "site"), str(options.verl_site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "HYDRA_FULL_ERROR": "1",
    }


def verl_command(model: Path, folder: Path, options: Namespace) -> list[str]:
    """The call of verl; everything that is not named here is its default."""
    actor, rollout, trainer = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer"
    parts = ROOT / "benchmarks/verl_side.py"
    settings: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": not options.old_log_probs,
        "data.train_files": folder / "prompts.parquet", "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": options.prompts, "data.val_batch_size": 8, "data.shuffle": False,
        "data.max_prompt_length": 64, "data.max_response_length": options.response,
        "data.dataloader_num_workers": 1,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.model.use_liger": True,
        "+actor_rollout_ref.model.override_config.attn_implementation": "flash_attention_3",
        f"{actor}.strategy": "fsdp2", f"{actor}.fsdp_config.reshard_after_forward": False,
        f"{actor}.optim.lr": 1e-6, f"{actor}.ppo_mini_batch_size": options.prompts,
        f"{actor}.use_dynamic_bsz": True, f"{actor}.ppo_max_token_len_per_gpu": options.tokens,
        f"{actor}.use_kl_loss": False, f"{actor}.entropy_coeff": 0,
        f"{rollout}.name": "sglang", f"{rollout}.n": SAMPLES, f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": options.share, f"{rollout}.max_num_seqs": options.requests,
        f"{rollout}.load_format": "auto", f"{rollout}.calculate_log_probs": True,
        f"{rollout}.agent.default_agent_loop": "given_lengths",
        f"{rollout}.agent.agent_loop_config_path": folder / "agents.yaml",
        **{f"+{rollout}.engine_kwargs.sglang.{name}": value for name, value in ENGINE.items()},
        f"+{rollout}.engine_kwargs.sglang.cuda_graph_bs_decode": str(options.graphs).replace(" ", ""),
        "reward.custom_reward_function.path": parts,
        f"{trainer}.v1.sampler.custom_sampler.path": parts,
        f"{trainer}.v1.sampler.custom_sampler.name": "QuickReplayBuffer",
        f"{trainer}.logger": "[console,file]", f"{trainer}.project_name": "bench",
        f"{trainer}.experiment_name": "grpo", f"{trainer}.n_gpus_per_node": 1, f"{trainer}.save_freq": -1,
        f"{trainer}.test_freq": -1, f"{trainer}.val_before_train": False, f"{trainer}.resume_mode": "disable",
        f"{trainer}.total_epochs": 100, f"{trainer}.total_training_steps": options.steps,
        f"{trainer}.default_local_dir": folder / "checkpoints", "ray_kwargs.ray_init.num_cpus": 64,
    }  # fmt: skip
    overrides = [f"{name}={value}" for name, value in settings.items()]
    show = ["--cfg", "job"] if options.tiny else []
    return [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, *shlex.split(options.verl_flags), *show]


def verl_steps(path: Path, options: Namespace) -> Steps:
    """What verl logged, of each step."""
    rows = [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.is_file() else []
    return [
        {
            "step": row["timing_s/step"],
            "generation": row["timing_s/gen"],
            "tokens": row["response_length/mean"] * options.requests,
            **{name: row[f"timing_s/{name}"] for name in PARTS if f"timing_s/{name}" in row},
        }
        for row in rows if "timing_s/step" in row
    ]  # fmt: skip


PARTS = ("reward", "old_log_prob", "adv", "update_actor", "update_weights")
"""Of verl's step, for the note."""


# ---- what they show


def judge(ours: Steps, theirs: Steps, options: Namespace) -> list[Row]:
    """The rows of the ratios."""
    shape = f"{options.model}, {options.prompts} x {SAMPLES} x {options.response} tokens, {options.lengths}"
    step = "step with old log-probs" if options.old_log_probs else "step"
    rest = "step without generation"
    ours, theirs = ours[1:], theirs[1:]
    if not ours or not theirs:
        side = "ours" if not ours else "verl's"
        return [not_measured(f"ours / verl's: {step}", shape, f"<= {TARGETS[step]}", f"{side} logged no second step")]
    rows = []
    for what, value in ((step, lambda s: s["step"]), (rest, lambda s: s["step"] - s["generation"])):
        mine, other = (statistics.median(map(value, steps)) for steps in (ours, theirs))
        ratio, target = mine / other, TARGETS[what]
        figure, limit = f"{mine:.2f} s", f"{other:.2f} s"
        rows.append(
            Row(
                f"ours / verl's: {what}", shape, figure, limit, ratio, f"<= {target}", ratio <= target, note_of(theirs)
            )
        )
    rates = [statistics.median(s["tokens"] / s["generation"] for s in steps) for steps in (ours, theirs)]
    figure, limit = (f"{rate:,.0f} tok/s" for rate in rates)
    ratio = rates[0] / rates[1]
    note = f"{len(ours)} and {len(theirs)} steps; graphs {shlex.join(map(str, options.graphs))}"
    rows.append(Row("ours / verl's: tokens/s of a rollout", shape, figure, limit, ratio, ">= 1.0", ratio >= 1, note))
    for row in rows:
        print(line_of(row), flush=True)
    return rows


def note_of(steps: Steps) -> str:
    """Where verl's time goes."""
    parts = {name: [step[name] for step in steps if name in step] for name in ("generation", *PARTS)}
    return "verl's " + ", ".join(f"{name} {statistics.median(found):.2f} s" for name, found in parts.items() if found)


if __name__ == "__main__":
    main()
