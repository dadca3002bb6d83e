"""Placement and parallel groups of a plan, for any number of nodes."""

from __future__ import annotations

import argparse

import pytest

from slime.plan.layout import EngineGroup, ParallelLayout, seats, slot_layout
from slime.plan.pipeline_layout import split_layers


def cluster(**changes) -> argparse.Namespace:
    values = {
        "actor_num_nodes": 2,
        "actor_num_gpus_per_node": 8,
        "rollout_num_gpus": 16,
        "colocate": False,
        "debug_train_only": False,
        "debug_rollout_only": False,
        "rollout_external_engine_addrs": None,
        "reward_model_num_gpus": None,
    }
    return argparse.Namespace(**(values | changes))


def layout_of(**changes) -> ParallelLayout:
    return ParallelLayout.of(cluster(**changes), 24)


def test_groups_divide_the_world():
    layout = layout_of(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        context_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    assert layout.world_size == 16
    assert layout.dp == 16 // (2 * 2 * 2)
    assert layout.optimizer_shards == 2 * 2  # DP x CP
    assert layout.expert_dp == 16 // (1 * 4 * 2)  # world / (ETP x EP x PP)


def test_instances_of_the_optimizer_hold_all_its_state_each():
    layout = layout_of(context_parallel_size=2, expert_model_parallel_size=4, num_distributed_optimizer_instances=2)
    assert layout.optimizer_shards == 16 // 2  # DP 8 x CP 2, in two parts
    assert layout.expert_optimizer_shards == 16 // 4 // 2


def test_unset_or_unknown_sizes_are_megatrons_defaults():
    layout = layout_of(expert_tensor_parallel_size=None)
    assert (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp, layout.dp) == (1, 1, 1, 1, 1, 1, 16)
    assert not layout_of(sequence_parallel=True).is_sequence_parallel  # nothing to split with TP 1


def test_ranks_run_over_tp_first_then_cp_dp_and_pp():
    layout = layout_of(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2)
    # rank = tp + 2 (cp + 2 (dp + 2 pp))
    assert layout.coordinates(13) == {"tp": 1, "cp": 0, "dp": 1, "pp": 1}
    assert layout.coordinates(2) == {"tp": 0, "cp": 1, "dp": 0, "pp": 0}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"num_layers": 4, "pp": 2}, [[0, 1], [2, 3]]),
        ({"num_layers": 8, "pp": 2, "vpp": 2}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"num_layers": 7, "pp": 3, "first": 1}, [[0], [1, 2, 3], [4, 5, 6]]),
        ({"num_layers": 7, "pp": 3, "last": 2}, [[0, 1, 2], [3, 4], [5, 6]]),
        ({"num_layers": 3, "pp": 1, "first": 1}, [[0, 1, 2]]),
        ({"num_layers": 4, "pp": 3, "counts_embedding": True, "counts_loss": True}, [[0], [1, 2], [3]]),
        (
            {"num_layers": 7, "pp": 2, "vpp": 2, "counts_loss": True},
            [[0, 1, 4, 5], [2, 3, 6]],
        ),
    ],
)
def test_stages_share_the_layers(arguments, expected):
    assert split_layers(**arguments) == expected


def test_stages_written_as_text_are_dealt_out_in_turn():
    layout = ParallelLayout.of(
        cluster(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|(t|)*2,t*2L"), 5
    )
    assert (layout.vpp, layout.stage_layers) == (2, ((0, 2), (1, 3, 4)))


def test_every_layer_is_in_one_stage():
    layout = layout_of(pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=3)
    assert layout.vpp == 24 // 4 // 3
    assert sorted(layer for stage in layout.stage_layers for layer in stage) == list(range(24))


def test_engines_sit_behind_the_trainers_on_nodes_of_their_own():
    args = cluster(rollout_num_gpus=8)
    found = seats(slot_layout(args), ParallelLayout.of(args, 24), [EngineGroup("", 8, 4)], num_gpus_per_node=8)
    assert len(found) == 24
    assert [seat.trainer_rank for seat in found[:16]] == list(range(16)) and found[16].trainer_rank is None
    assert [(seat.node, seat.gpu, seat.engine, seat.engine_tp_rank) for seat in found[19:22]] == [
        (2, 3, 0, 3),
        (2, 4, 1, 0),
        (2, 5, 1, 1),
    ]


def test_colocated_engines_share_the_trainers_slots_and_may_take_more():
    args = cluster(actor_num_nodes=1, actor_num_gpus_per_node=4, rollout_num_gpus=8, colocate=True)
    found = seats(slot_layout(args), ParallelLayout.of(args, 24), [EngineGroup("", 8, 2)], num_gpus_per_node=8)
    assert [(seat.trainer_rank, seat.engine) for seat in found] == [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 1),
        (None, 2),
        (None, 2),
        (None, 3),
        (None, 3),
    ]


@pytest.mark.parametrize(
    ("changes", "trainers", "engines"),
    [
        ({"debug_rollout_only": True}, 0, 16),
        ({"debug_train_only": True}, 16, 0),
        ({"rollout_external_engine_addrs": ["host:30000"]}, 16, 0),
    ],
)
def test_a_part_of_the_system_takes_only_its_own_slots(changes, trainers, engines):
    layout = slot_layout(cluster(**changes))
    assert (layout.num_trainers, layout.num_engine_slots, layout.total) == (trainers, engines, trainers + engines)


def test_a_placeholder_leaves_its_slots_empty():
    args = cluster(actor_num_nodes=1, actor_num_gpus_per_node=1, rollout_num_gpus=4)
    groups = [EngineGroup("policy", 1, 1), EngineGroup("placeholder", 2, 1), EngineGroup("judge", 1, 1)]
    found = seats(slot_layout(args), ParallelLayout.of(args, 24), groups, num_gpus_per_node=8)
    assert [(seat.engine, seat.engine_name) for seat in found[1:]] == [
        (0, "policy"),
        (None, ""),
        (None, ""),
        (1, "judge"),
    ]


def test_a_reward_model_has_slots_of_its_own_behind_all_others():
    apart = slot_layout(
        cluster(actor_num_nodes=1, actor_num_gpus_per_node=2, rollout_num_gpus=1, reward_model_num_gpus=2)
    )
    assert (apart.engine_slots, apart.total) == ([2, 3, 4], 5)
    shared = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 2, "colocate": True}
    layout = slot_layout(cluster(**shared, reward_model_num_gpus=1))
    assert (layout.engine_slots, layout.total) == ([0, 1, 4], 5)  # 2 and 3 are the trainer's alone
    external = slot_layout(cluster(rollout_external_engine_addrs=["host:1"], reward_model_num_gpus=1))
    assert external.engine_slots == [16]
    assert slot_layout(cluster(debug_train_only=True, reward_model_num_gpus=1)).total == 16


def test_only_axes_with_several_ranks_are_shown():
    args = cluster(tensor_model_parallel_size=4, debug_train_only=True)
    found = seats(slot_layout(args), ParallelLayout.of(args, 24), [], num_gpus_per_node=8)
    assert found[5].coordinates == {"tp": 1, "dp": 1}
