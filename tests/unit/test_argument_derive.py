"""Values that follow from other flags, one rule at a time."""

from __future__ import annotations

import pytest

from slime.config import derive


@pytest.mark.parametrize(
    ("accelerator", "is_explicit", "expected"), [("cuda", False, 8), ("cpu", False, 1), ("cpu", True, 8)]
)
def test_one_trainer_slot_is_the_default_only_without_a_gpu(
    accelerator: str, is_explicit: bool, expected: int
) -> None:
    assert derive.trainer_slots(accelerator, 8, is_explicit=is_explicit) == expected


@pytest.mark.parametrize(
    ("given", "colocate", "debug_train_only", "expected"),
    [
        (None, True, False, 4),  # shared with the trainer
        (2, True, False, 2),
        (None, False, False, None),  # validate asks for it
        (2, False, True, 0),  # no engines at all
    ],
)
def test_engine_slots(given: int | None, colocate: bool, debug_train_only: bool, expected: int | None) -> None:
    slots = derive.engine_slots(given, colocate=colocate, debug_train_only=debug_train_only, actor_gpus=4)
    assert slots == expected


FRESH = {"no_load_optim": True, "no_load_rng": True, "finetune": True, "start_rollout_id": 0}


@pytest.mark.parametrize(
    ("load_kind", "ref_load", "ref_step", "expected"),
    [
        ("megatron", "ref", 3, {"start_rollout_id": None}),  # a resume: the checkpoint says where to go on
        ("hf", "ref", 3, FRESH),  # weights under --load itself
        (None, "ref", None, FRESH | {"load": "ref"}),
        (None, "ref", 3, FRESH | {"load": "ref", "ckpt_step": 3}),
        (None, None, None, FRESH | {"load": "hf"}),
    ],
)
def test_what_the_trainer_loads(
    load_kind: str | None, ref_load: str | None, ref_step: int | None, expected: dict[str, object]
) -> None:
    source = derive.checkpoint_source(
        load_kind=load_kind, ref_load=ref_load, ref_ckpt_step=ref_step, hf_checkpoint="hf", start_rollout_id=None
    )
    assert source == expected


def test_an_explicit_start_rollout_id_is_kept() -> None:
    for kind in ("megatron", "hf", None):
        source = derive.checkpoint_source(
            load_kind=kind, ref_load=None, ref_ckpt_step=None, hf_checkpoint="hf", start_rollout_id=5
        )
        assert source["start_rollout_id"] == 5


@pytest.mark.parametrize(
    ("given", "num_steps", "expected"), [(6, None, 6), (None, None, 12), (None, 3, 12 // 3), (6, 3, 6), (None, 0, 12)]
)
def test_global_batch_size(given: int | None, num_steps: int | None, expected: int) -> None:
    assert derive.samples_per_step(given, num_steps=num_steps, num_samples=12) == expected


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    assert derive.longest_prompt(None, context=10) == 9
    assert derive.longest_prompt(4, context=10) == 4
    assert derive.longest_prompt(None, context=None) is None


def test_eval_pairs() -> None:
    assert derive.raw_eval_datasets(["a", "x.jsonl", "b", "y.jsonl"]) == [
        {"name": "a", "path": "x.jsonl"},
        {"name": "b", "path": "y.jsonl"},
    ]
    assert derive.raw_eval_datasets(["x.jsonl"]) == [{"name": "aime", "path": "x.jsonl"}]
    assert derive.raw_eval_datasets(None) == []


@pytest.mark.parametrize(
    ("given", "no_save_optim", "parts", "leaves_optimizer_out"),
    [
        (None, False, ["model", "optimizer", "rng"], False),
        (None, True, ["model", "rng"], True),
        (["model,hf", "model"], False, ["model", "hf"], True),
    ],
)
def test_what_a_checkpoint_holds(
    given: list[str] | None, no_save_optim: bool, parts: list[str], leaves_optimizer_out: bool
) -> None:
    found = derive.checkpoint_contents(given, no_save_optim=no_save_optim)
    assert found == {"checkpoint_contents": parts, "no_save_optim": leaves_optimizer_out}
