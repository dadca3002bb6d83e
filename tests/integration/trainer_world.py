"""Trainers without Ray: flags with every default, a rollout cut into shares, actors in forked gloo worlds.

The data is random but fixed: responses of different lengths, masked tokens inside them, and one rollout that has two
samples, so that every denominator of the loss differs from its neighbours.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from slime.config.parse import FLAG_CLASSES
from slime.config.parser import defaults_of
from tests.unit.megatron_fakes import IMAGE_TOKENS, make_args, run_world

VOCAB = 100
NUM_SAMPLES = 13
NUM_ROLLOUTS = 12


def trainer_args(hf_path: Path, flags: str = "", *, dp_size: int = 1, **overrides: Any) -> argparse.Namespace:
    """Flags of a trainer for the HF model at `hf_path`; `flags` are Megatron's, `overrides` slime's."""
    defaults = {name: value for group in FLAG_CLASSES for name, value in defaults_of(group).items()}
    model_flags = make_args(hf_path, flags)
    values = {
        **defaults,
        "accelerator": "cpu",
        "actor_num_gpus_per_node": dp_size * model_size(model_flags),
        "distributed_timeout_minutes": 2,
        "update_weights_in_flight": False,
        "eps_clip_high": 0.28,
        "finetune": True,
        "keep_rollouts": "none",
        "global_batch_size": NUM_ROLLOUTS,
        "load": str(hf_path),
        "log_probs_chunk_size": 7,
        "max_tokens_per_gpu": 4096,
        "no_load_optim": True,
        "no_load_rng": True,
        "num_rollout": 10,
        "rollout_batch_size": NUM_ROLLOUTS,
        "use_critic": overrides.get("advantage_estimator") == "ppo",
        "use_dynamic_batch_size": True,
    }
    values |= overrides
    values["log_probs_max_tokens_per_gpu"] = values["log_probs_max_tokens_per_gpu"] or values["max_tokens_per_gpu"]
    values["checkpoint_contents"] = values["checkpoint_contents"] or ["model", "optimizer", "rng"]
    args = make_args(hf_path, flags, **values)
    vars(args).update({name: value for name, value in overrides.items() if name not in vars(model_flags)})
    return args


def model_size(args: argparse.Namespace) -> int:
    """Ranks of one copy of the model."""
    return int(args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size)


def resumed_from(root: str) -> dict[str, Any]:
    """The flags of a run that goes on from the checkpoints in `root`."""
    return {"load": root, "finetune": False, "no_load_optim": False, "no_load_rng": False}


def make_train_data() -> dict[str, Any]:
    """A TrainData of `NUM_SAMPLES` samples; samples 4 and 5 are one rollout."""
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 9))] for _ in range(NUM_SAMPLES)]
    responses = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))] for _ in range(NUM_SAMPLES)]
    loss_masks = [[int(rng.random() < 0.8) for _ in response] for response in responses]
    loss_masks[3] = [0] * len(responses[3])  # nothing of it is trained
    rollout_ids = [i - (i > 4) for i in range(NUM_SAMPLES)]
    trained = {r: sum(sum(loss_masks[i]) for i in range(NUM_SAMPLES) if rollout_ids[i] == r) for r in rollout_ids}
    return {
        "tokens": [prompt + response for prompt, response in zip(prompts, responses, strict=True)],
        "response_lengths": [len(response) for response in responses],
        "loss_masks": loss_masks,
        "rewards": [rng.gauss(0, 1) for _ in range(NUM_SAMPLES)],
        "raw_reward": [float(i % 2) for i in range(NUM_SAMPLES)],
        "truncated": [0] * NUM_SAMPLES,
        "sample_indices": list(range(NUM_SAMPLES)),
        "rollout_ids": rollout_ids,
        "rollout_mask_sums": [trained[r] for r in rollout_ids],
        "rollout_log_probs": [[-rng.uniform(3, 6) for _ in response] for response in responses],
    }


def with_images(data: dict[str, Any]) -> dict[str, Any]:
    """That data with images of 16 x 16 pixels and less in its prompts, as `make_hf_model` sees them.

    Samples 0 and 1 have one prompt's image, 2 has two, 4 and every fourth from there one;
    the others have none, and a word of the response 6 is what stands for an image in prompts.
    """
    rng = np.random.default_rng(3)
    start, end, token = (IMAGE_TOKENS[f"{name}_token_id"] for name in ("vision_start", "vision_end", "image"))
    spans: list[list[list[int]]] = [[] for _ in data["tokens"]]
    inputs: list[Any] = [None] * len(spans)
    for i, grids in {
        0: [(1, 4, 4)],
        2: [(1, 2, 4), (1, 4, 4)],
        **{i: [(1, 4, 2)] for i in range(4, len(spans), 4)},
    }.items():
        pixels = rng.normal(size=(sum(math.prod(grid) for grid in grids), 3 * 2 * 4 * 4)).astype(np.float32)
        inputs[i] = {"pixel_values": pixels, "image_grid_thw": np.array(grids)}
    inputs[1] = inputs[0]
    data["tokens"] = [[min(word, start - 1) for word in tokens] for tokens in data["tokens"]]
    data["tokens"][6][-1] = token
    for i, images in enumerate(inputs):
        if images is None:
            continue
        placed = [data["tokens"][i][0]]
        for grid in images["image_grid_thw"]:
            size = int(math.prod(grid)) // 4
            spans[i].append([len(placed) + 1, size])
            placed += [start, *[token] * size, end]
        data["tokens"][i][:1] = placed
    return {**data, "image_spans": spans, "multimodal_train_inputs": inputs}


def train(
    args: argparse.Namespace, check: Callable[..., None], *more: Any, num_rollouts: int = 1, dp_size: int = 1
) -> None:
    """Train `num_rollouts` times on one rollout in a world of all ranks, then check(actor, records, *more)."""
    from slime.ray.rollout.shares import split_train_data

    shares = split_train_data(args, make_train_data(), {"dp_size": dp_size, "cp_size": args.context_parallel_size})
    run_world(dp_size * model_size(args), _rank, args, shares, num_rollouts, check, more)


def train_and_save(actor: Any, records: list[Any], out: Path) -> None:
    """A check of `train` that saves the actor as iteration 0, then does as `train_once_more`."""
    actor.save_model(0)
    train_once_more(actor, records, out)


def train_once_more(actor: Any, records: list[Any], out: Path) -> None:
    """A check of `train` that trains on rollout 1 and writes (its records, the weights then) to `out`."""
    from slime.ray.rollout.shares import split_train_data

    (share,) = split_train_data(actor.args, make_train_data(), {"dp_size": 1, "cp_size": 1})
    torch.save((actor.train_on(1, share), parameters(actor)), out)


def _rank(
    args: argparse.Namespace,
    shares: list[dict[str, Any]],
    num_rollouts: int,
    check: Callable[..., None],
    more: tuple[Any, ...],
) -> None:
    from slime.backends.megatron_utils import actor as actor_module

    actor = actor_module.MegatronTrainActor(args, rank=0, world_size=0, master_addr="", master_port=0)
    with mock.patch.object(actor_module.initialize, "init"):  # run_world has done it
        started = actor.init()
    assert started["start_rollout_id"] == int(
        not args.finetune
    )  # the checkpoints that are resumed here are of rollout 0
    records = []
    for rollout_id in range(num_rollouts):
        share = shares[actor.parallel_config()["dp_rank"]]
        records += actor.train_on(rollout_id, dict(share))
    check(actor, records, *more)


def parameters(actor: Any) -> dict[str, torch.Tensor]:
    """This rank's parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in actor.state.model[0].module.named_parameters()}
