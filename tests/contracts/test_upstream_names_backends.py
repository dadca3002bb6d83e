"""Upstream's names in backends, ray and plug-ins: docs/reference/upstream_names.md judges each; the given are called.

upstream_names.txt lists them. A call has upstream's keywords and shapes, where these are known.
"""

from __future__ import annotations

import inspect
import math
import re
from argparse import Namespace

import pytest
import torch

from slime.utils.errors import UsageError
from tests.contracts.test_python_api import find
from tests.contracts.test_upstream_names import ALL, TABLES, VERDICTS, expanded

HERE = ("slime.backends.", "slime.ray.", "slime_plugins.")
NAMES = [name for name in ALL if name.startswith(HERE)]


ROWS = [line[2:].split(" |")[:3] for line in TABLES.splitlines() if "| `" in line]
JUDGED = [
    (name, verdict.strip(), how.strip())
    for cell, verdict, how in ROWS
    for name in expanded(cell)
    if name.startswith(HERE)
]
GIVEN = [name for name, verdict, _ in JUDGED if verdict == "given"]


def test_each_name_is_judged_once_and_what_is_not_given_has_a_way() -> None:
    assert sorted(name for name, _, _ in JUDGED) == sorted(NAMES)
    assert {verdict for _, verdict, _ in JUDGED} <= set(VERDICTS)
    assert all(how for _, verdict, how in JUDGED if verdict != "given")


@pytest.mark.parametrize("name", GIVEN)
def test_a_given_name_is_there(name: str) -> None:
    assert find(name) is not None


def test_names_that_the_tables_advise_exist() -> None:
    advised = {
        name
        for _, _, how in JUDGED
        for name in re.findall(r"`((?:slime|slime_plugins)(?:\.\w+)+)(?:\(|`)", how)
        if not name.endswith(("_s", "_"))
    }
    assert advised and all(find(name) is not None for name in advised)


def test_external_engines_are_asked_by_upstreams_keywords() -> None:
    from slime.backends.sglang_utils.external import discover_external_engines

    assert inspect.signature(discover_external_engines).parameters["timeout"].default == 30.0
    with pytest.raises(UsageError, match="127.0.0.1:1"):
        discover_external_engines(addrs=["127.0.0.1:1"], timeout=1.0)


def test_a_configuration_says_whether_any_model_splits_prefill_and_decode() -> None:
    from slime.backends.sglang_utils.sglang_config import SglangConfig

    def config(*kinds: str) -> SglangConfig:
        groups = [{"worker_type": kind, "num_gpus": 1} for kind in kinds]
        return SglangConfig.model_validate({"models": [{"name": "default", "server_groups": groups}]})

    assert config("prefill", "decode").has_pd_disaggregation and not config("regular").has_pd_disaggregation


def test_get_responses_yields_the_rows_that_predict_each_response(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.loss import get_responses

    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 0)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
    logits = torch.arange(8.0 * 3).reshape(1, 8, 3)  # 4 + 3 tokens and one of padding
    tokens = [torch.tensor([5, 6, 7, 8]), torch.tensor([1, 2, 3])]
    call = {"args": Namespace(rollout_temperature=2.0), "unconcat_tokens": tokens}
    lengths = {"total_lengths": [4, 3], "response_lengths": [2, 1]}
    first, second = get_responses(logits, **call, **lengths)
    assert torch.equal(first[0], logits[0, 1:3] / 2) and first[1].tolist() == [7, 8]
    assert torch.equal(second[0], logits[0, 5:6] / 2) and second[1].tolist() == [3]
    plain = list(get_responses(logits, **call, **lengths, apply_temperature=False))
    assert torch.equal(plain[0][0], logits[0, 1:3])


def test_corrections_take_args_first_and_what_else_upstream_passes() -> None:
    from slime.backends.megatron_utils.loss import icepop_function, vanilla_tis_function

    args, mask = Namespace(tis_clip_low=0.0, tis_clip=2.0), [torch.ones(2)]
    columns = {"train_log_probs": [torch.tensor([-1.0, -1.0])], "rollout_log_probs": [torch.tensor([-1.5, -3.0])]}
    rest = {"loss_masks": mask, "total_lengths": [4], "response_lengths": [2], "cp_rank": 0}
    loss = torch.ones(2)
    weights, masks, metrics = vanilla_tis_function(args, pg_loss=loss, **columns, **rest)
    assert weights.tolist() == pytest.approx([math.exp(0.5), 2.0], rel=1e-6) and masks is mask
    assert metrics["tis"].tolist() == pytest.approx([math.exp(0.5), math.exp(2.0)], rel=1e-6)
    weights, _, _ = icepop_function(args, pg_loss=loss, **columns, **rest)
    assert weights.tolist() == pytest.approx([math.exp(0.5), 0.0], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("slime.ray.placement_group.create_placement_groups", ["args"]),
        ("slime.ray.placement_group.create_rollout_manager", ["args", "pg"]),
        ("slime.ray.placement_group.create_training_models", ["args", "pgs", "rollout_manager"]),
        ("slime_plugins.models.glm4.get_glm_spec", ["args", "config", "vp_stage"]),
        ("slime_plugins.models.qwen3_5.get_qwen3_5_spec", ["args", "config", "vp_stage"]),
        ("slime_plugins.models.glm5.glm5.get_glm5_spec", ["args", "config", "vp_stage"]),
        ("slime_plugins.models.minimax_m2.get_minimax_m2_layer_spec", ["args", "config", "vp_stage"]),
    ],
)
def test_starred_functions_have_the_parameters_that_the_page_shows(name: str, arguments: list[str]) -> None:
    assert list(inspect.signature(find(name)).parameters) == arguments


def test_the_spec_of_glm4_is_that_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block itself is built in tests/training/parallel, from the same function; here it is only handed on."""
    from slime_plugins.models import glm4

    monkeypatch.setattr(glm4, "assemble_block", lambda *given: given)
    assert glm4.get_glm_spec(args="args", config="config", vp_stage=1) == ("args", "config", 1)


def test_a_buffer_server_is_an_application_of_its_module() -> None:
    from fastapi.testclient import TestClient

    from slime_plugins.rollout_buffer import buffer
    from slime_plugins.rollout_buffer.generator.base_generator import BaseGenerator
    from slime_plugins.rollout_buffer.generators import base_generator

    assert TestClient(buffer.app).get("/status").json()["running"] is False and buffer.app is buffer.app
    assert BaseGenerator is base_generator.BaseGenerator
    with pytest.raises(AttributeError):
        buffer.no_such_name  # noqa: B018
