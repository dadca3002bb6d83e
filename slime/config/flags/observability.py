"""Flags of metrics and trackers. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.parser import flag


@dataclass
class ObservabilityFlags:
    """Metrics and trackers. metrics.jsonl is always written."""

    output_dir: str | None = flag(
        None, "directory of metrics.jsonl, logs/ and curves.png (default: --save, else outputs/<time>)"
    )
    tracker: list[str] = flag(
        [],
        "where metrics go besides metrics.jsonl (repeatable); wandb = --use-wandb, tensorboard = --use-tensorboard",
        choices=("jsonl", "wandb", "tensorboard", "mlflow", "swanlab", "trackio"),
        repeatable=True,
        later_choices={"mlflow": "trackers", "swanlab": "trackers", "trackio": "trackers"},
    )
    log_passrate: bool = flag(False, "also log pass@k")
    log_multi_turn: bool = flag(False, "also log turns, and response lengths with and without what tools wrote")
    log_reward_category: str | None = flag(
        None,
        "key of a dict reward: log the share of the samples with each of its values",
        needs=("reward_key", "custom_reward_post_process_path"),
    )
    log_correct_samples: bool = flag(False, "also log the share and the lengths of the samples with reward 1")
    log_eval_samples: int = flag(
        0,
        "prompts of each evaluation set whose responses are written to eval_samples.jsonl and shown by trackers",
        needs="eval_interval",
        at_least=0,
    )
    use_wandb: bool = flag(False, "log to Weights & Biases")
    wandb_mode: str | None = flag(
        None, "overrides WANDB_MODE", choices=("online", "offline", "disabled"), needs="use_wandb"
    )
    wandb_dir: str | None = flag(None, "directory of W&B's files", needs="use_wandb")
    wandb_key: str | None = flag(None, "W&B API key", needs="use_wandb")
    wandb_host: str | None = flag(None, "W&B server", needs="use_wandb")
    wandb_team: str | None = flag(None, "W&B entity", needs="use_wandb")
    wandb_group: str | None = flag(None, "W&B group, also the start of the run's name", needs="use_wandb")
    wandb_project: str | None = flag(None, "W&B project", needs="use_wandb")
    wandb_random_suffix: bool = flag(True, "no random suffix on the run's name", needs="use_wandb")
    wandb_run_id: str | None = flag(
        None,
        "go on with this W&B run (default: a run that is resumed from its own --save goes on with its own)",
        needs="use_wandb",
    )
    wandb_always_use_train_step: bool = flag(False, "count rollout and eval metrics in train steps", needs="use_wandb")
    use_tensorboard: bool = flag(False, "log to TensorBoard")
    tb_project_name: str | None = flag(
        None, "directory of TensorBoard files (default: TENSORBOARD_DIR)", needs="use_tensorboard"
    )
    tb_experiment_name: str | None = flag(
        None, "name of the run in TensorBoard (default: the time)", needs="use_tensorboard"
    )
    dashboard_port: int | None = flag(None, "port of a live page of the run", later="dashboard")
