"""Every parallel layout gives the numbers of one process: logits and gradients of the HF model, losses, gradient norms
and updates of two train steps, and the steps that follow from a checkpoint of another layout.

All layouts of a world size run in one world of processes; the tests read what these leave behind (layout_results).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.training.parallel.layout_results import (
    Results,
    check_parity,
    check_resharding,
    check_training,
    selected_params,
)
from tests.training.parallel.layout_world import Case
from tests.unit.megatron_fakes import make_hf_model

pytestmark = pytest.mark.timeout(1800)  # the first test waits for the layouts of all
TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
CP = "--context-parallel-size"
VPP = "--num-virtual-stages-per-pipeline-rank"
STATIC = {"use_dynamic_batch_size": False, "micro_batch_size": 1}
DEFERRED = {"recompute_loss_function": True, "log_probs_chunk_size": 5}
BY_WORK = {"balance_by_flops": True, "balance_data": True}
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

ALWAYS = {
    "one rank, one sample at a time": Case(changes=STATIC),
    "one rank, recomputed": Case(FULL),
    "TP 2, sequence parallel": Case(f"{TP} 2 --sequence-parallel"),
    "PP 2": Case(f"{PP} 2"),
    "CP 2, passes of other sizes": Case(f"{CP} 2", changes={"log_probs_max_tokens_per_gpu": 20}),
    "PP 2 VPP 2, recomputed": Case(f"{PP} 2 {VPP} 2 {FULL}", changes={"log_probs_max_tokens_per_gpu": 20}),
    "DP 2, by work": Case(dp=2, changes=BY_WORK),
    "TP 2 PP 2, deferred logits": Case(f"{TP} 2 --sequence-parallel {PP} 2", changes=DEFERRED),
    "CP 4, by tokens": Case(f"{CP} 4", changes={"calculate_per_token_loss": True}),
    "PP 2 VPP 2 DP 2, overlapped": Case(f"{PP} 2 {VPP} 2 --overlap-grad-reduce --overlap-param-gather", 2),
    "DP 4, two optimizer instances": Case("--num-distributed-optimizer-instances 2", 4),
    "TP 2 CP 2, deferred logits": Case(f"{TP} 2 --sequence-parallel {CP} 2", changes=DEFERRED),
}
SLOW = {
    "one rank, selectively recomputed": Case("--recompute-granularity selective --recompute-modules core_attn"),
    "one rank, blocks recomputed": Case(
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    ),
    "one rank, small packs": Case(changes={"max_tokens_per_gpu": 24}),
    "TP 2": Case(f"{TP} 2"),
    "TP 4, two ranks to a key head": Case(f"{TP} 4 --sequence-parallel"),
    "TP 2, activations distributed": Case(f"{TP} 2 {FULL} --distribute-saved-activations"),
    "PP 2, one sample at a time": Case(f"{PP} 2", changes=STATIC),
    "PP 2, first stage of 1 layer": Case(f"{PP} 2 --decoder-first-pipeline-num-layers 1"),
    "PP 2, as a text": Case(f"{PP} 2 --pipeline-model-parallel-layout Et|t|t|tL"),
    "PP 2 VPP 2, groups of 3": Case(f"{PP} 2 {VPP} 2 --microbatch-group-size-per-virtual-pipeline-stage 3"),
    "PP 2, a layer per virtual stage": Case(f"{PP} 2 --num-layers-per-virtual-pipeline-stage 1"),
    "CP 2, recomputed": Case(f"{CP} 2 {FULL}", changes=DEFERRED),
    "CP 4": Case(f"{CP} 4"),
    "CP 2, by tokens": Case(f"{CP} 2", changes={"calculate_per_token_loss": True}),
    "PP 2, by tokens": Case(f"{PP} 2", changes={"calculate_per_token_loss": True}),
    "DP 2": Case(dp=2),
    "DP 2, balanced": Case(dp=2, changes={"balance_data": True, "max_tokens_per_gpu": 24}),
    "DP 2, overlapped": Case("--overlap-grad-reduce --overlap-param-gather", 2),
    "DP 4": Case(dp=4),
    "PP 4": Case(f"{PP} 4"),
    "PP 2 CP 2": Case(f"{PP} 2 {CP} 2"),
    "PP 2 DP 2": Case(f"{PP} 2", 2),
    "CP 2 DP 2": Case(f"{CP} 2", 2),
    "TP 2 DP 2": Case(f"{TP} 2 --sequence-parallel", 2),
    "PP 2 VPP 2 CP 2": Case(f"{PP} 2 {VPP} 2 {CP} 2"),
    "TP 2 PP 2 VPP 2": Case(f"{TP} 2 --sequence-parallel {PP} 2 {VPP} 2"),
}
LAYOUTS = ALWAYS | SLOW
# Gradients are summed over an instance as a whole, over all only in the shards that optimizers read.
PARTLY_SUMMED = "DP 4, two optimizer instances"
PARAMETERS = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
each_layout = pytest.mark.parametrize("layout", PARAMETERS)
each_embedding = pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Results]:
    """Results of the layouts that this file's tests ask for, with tied embeddings or not."""
    selected = selected_params(request)
    made: dict[bool, Results] = {}

    def of(tied: bool) -> Results:
        if tied not in made:
            names = {params["layout"] for params in selected if params.get("tied") == tied and "layout" in params}
            layouts = {name: case for name, case in LAYOUTS.items() if name in names}
            make_model = partial(make_hf_model, num_hidden_layers=4, tied=tied)
            made[tied] = Results(tmp_path_factory.mktemp("layouts"), layouts, make_model)
        return made[tied]

    return of


@each_embedding
@each_layout
def test_two_train_steps_are_those_of_one_process(results, layout, tied):
    check_training(results(tied), layout)


@each_embedding
@pytest.mark.parametrize("layout", [layout for layout in PARAMETERS if layout != PARTLY_SUMMED])
def test_logits_and_gradients_are_those_of_the_hf_model(results, layout, tied):
    check_parity(results(tied), layout)


@each_embedding
@each_layout
def test_a_checkpoint_of_any_layout_goes_on_in_another(results, layout, tied):
    check_resharding(results(tied), layout)
