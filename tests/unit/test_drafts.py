"""Drafts (speculative decoding): what engines accept, what a run refuses, which weights drafts get, when they stop.

SGLang drafts on GPUs only (benchmarks/gpu_speculative.py); here its own classes are called without a model.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.megatron_utils.update_weight.base import SyncChecks
from slime.backends.megatron_utils.update_weight.engines import EngineFleet, WeightSyncError
from slime.backends.sglang_utils import cpu_standins, engine_patches, launch_server, weight_samples
from slime.backends.sglang_utils.engine_patches import DRAFTS_OFF
from slime.config.alarm_settings import AlarmSettings
from slime.config.args import Args
from slime.config.problems import NoEffect
from slime.config.sglang.drafts import draft_problems, draft_with_own_layer
from slime.config.sglang.topology import EngineGroupPlan, ModelPlan
from slime.observability.alarms import AlarmWatch
from slime.observability.rollout_metrics import draft_metrics
from slime.ray.rollout.watches import DraftWatch
from slime.utils.types import Sample
from tests.unit.argument_lines import Check, check, command_line, has
from tests.unit.test_server_args import arguments, build

__all__ = ["check", "command_line"]

DRAFTED = 3
ARGS = Namespace()

# ---- counters


def answer(accepted: list[int], *, tokens: int) -> dict[str, Any]:
    """The `meta_info` that SGLang's own code writes after verifications that accepted so many drafted tokens each.

    Its scheduler and its server run no model here; the classes that count are real, so that a new name or a new
    meaning of a counter in another version of SGLang shows.
    """
    cpu_standins.install()
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    request: Any = SimpleNamespace(spec_correct_drafts_histogram=[])
    for count in accepted:
        Req.update_spec_correct_drafts_histogram(request, count)
    sent = SimpleNamespace(
        spec_verify_ct=[len(accepted)],
        spec_num_correct_drafts=[sum(accepted)],
        completion_tokens=[tokens],
        spec_correct_drafts_histogram=[request.spec_correct_drafts_histogram],
    )
    server: Any = SimpleNamespace(server_args=SimpleNamespace(speculative_num_draft_tokens=DRAFTED + 1))
    meta: dict[str, Any] = {"finish_reason": {"type": "stop"}, "completion_tokens": tokens}
    TokenizerManager._calculate_spec_decoding_metrics(server, meta, sent, 0)
    return meta


def sample_of(accepted: list[int], *, tokens: int | None = None) -> Sample:
    sample = Sample()
    given = 1 + sum(accepted) + len(accepted)  # one of the prompt, and one more a verification
    sample.append_response_tokens(ARGS, meta_info=answer(accepted, tokens=given if tokens is None else tokens))
    return sample


def test_acceptance_is_pooled_over_the_rollout_per_depth() -> None:
    first, second = [0, 1, 1, 3], [3, 2]
    metrics = draft_metrics([sample_of(first), sample_of(second), Sample()])
    all_of_them = first + second
    assert metrics == pytest.approx(
        {
            "spec_accept_rate": sum(all_of_them) / (DRAFTED * len(all_of_them)),
            "spec_accept_length": 1 + sum(all_of_them) / len(all_of_them),
            **{f"spec_accept_rate_pos_{k}": sum(n >= k for n in all_of_them) / len(all_of_them) for k in (1, 2, 3)},
        }
    )


def test_tokens_that_no_verification_gave_do_not_lengthen_what_is_accepted() -> None:
    """A short response whose drafts are all refused gains nothing, though it has more tokens than verifications."""
    sample = sample_of([0, 0])
    assert sample.spec_info.spec_accept_length == 3 / 2
    assert draft_metrics([sample]) == {"spec_accept_rate": 0.0, "spec_accept_length": 1.0}


def test_a_rollout_without_drafts_has_no_such_metrics() -> None:
    assert draft_metrics([sample_of([]), Sample()]) == {}


# ---- what is refused


def drafting(**settings: Any) -> Args:
    """Flags of a run on a GPU whose engines draft."""
    flags = {name: settings.pop(name) for name in list(settings) if not name.startswith("speculative_")}
    return Args.of(
        {
            "sglang_overrides": {"speculative_algorithm": "EAGLE"} | settings,
            "hf_checkpoint": "/m",
            "accelerator": "cuda",
            "mtp_num_layers": None,
            "debug_rollout_only": False,
            "check_weight_update_equal": False,
            "rollout_external": False,
            "spec_auto_off": False,
            "deterministic": False,
            **flags,
        }
    )


def found_problems(args: Args, config: dict[str, Any], *own: dict[str, Any]) -> list[str]:
    """What is said of engines of one model: all alike, or groups of --sglang-config with settings of their own."""
    settings = [dict(args.sglang_overrides) | values for values in own or ({},)]
    groups = tuple(EngineGroupPlan("regular", 1, 1, i, values) for i, values in enumerate(settings))
    return [*draft_problems(args, [ModelPlan("default", args.hf_checkpoint, True, groups)], config)]


WITH_LAYER = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}


def test_a_model_with_a_layer_that_drafts_and_a_head_of_its_own_are_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not [*found_problems(drafting(), WITH_LAYER)]
    assert not [
        *found_problems(drafting(spec_auto_off=True, check_weight_update_equal=True, mtp_num_layers=1), WITH_LAYER)
    ]
    own = {"speculative_algorithm": "eagle3", "speculative_draft_model_path": str(tmp_path)}
    assert not [
        *found_problems(drafting(**own, check_weight_update_equal=True), {"architectures": ["Qwen3ForCausalLM"]})
    ]


@pytest.mark.parametrize(
    ("settings", "config", "sentence"),
    [
        (
            {},
            {},
            "--sglang-speculative-algorithm EAGLE: --hf-checkpoint /m has no layer that drafts (num_nextn_predict",
        ),
        ({}, {**WITH_LAYER, "architectures": ["MiMoV2ForCausalLM"]}, "cannot update the drafting layers of MiMoV2For"),
        ({"check_weight_update_equal": True}, WITH_LAYER, "--check-weight-update-equal overwrites the layer that"),
        ({"speculative_algorithm": "EAGLE3"}, WITH_LAYER, "EAGLE3 drafts with a model of its own; give its directory"),
        ({"speculative_algorithm": "DFLASH"}, WITH_LAYER, "DFLASH is not supported here; take one of EAGLE, NEXTN"),
        ({"speculative_draft_model_path": "/none"}, WITH_LAYER, "-draft-model-path /none has no config.json"),
        ({"accelerator": "cpu"}, WITH_LAYER, "--sglang-speculative-algorithm EAGLE needs an NVIDIA GPU"),
        ({"speculative_token_map": "hot.pt"}, WITH_LAYER, "--sglang-speculative-token-map hot.pt: the draft would"),
        ({"speculative_accept_threshold_acc": 0.5}, WITH_LAYER, "-threshold-acc 0.5 accepts drafts that the policy"),
        ({"spec_auto_off": True, "speculative_eagle_topk": 4}, WITH_LAYER, "with --sglang-speculative-eagle-topk 4"),
        (
            {"spec_auto_off": True, "rollout_external": True},
            WITH_LAYER,
            "--rollout-external-engine-addrs: SGLang stops",
        ),
        (
            {"spec_auto_off": True, "speculative_algorithm": "NGRAM"},
            {},
            "--sglang-speculative-algorithm NGRAM: SGLang",
        ),
    ],
)
def test_drafts_that_cannot_work_are_one_sentence(settings: Any, config: Any, sentence: str) -> None:
    (problem,) = found_problems(drafting(**settings), config)
    assert sentence in problem


@pytest.mark.parametrize(
    ("flags", "own", "sentence"),
    [
        (
            {},
            {"speculative_accept_threshold_acc": 0.5},
            "--sglang-config, model default: --sglang-speculative-accept-",
        ),
        ({"accelerator": "cpu", "speculative_algorithm": None}, {"speculative_algorithm": "EAGLE"}, "needs an NVIDIA"),
        ({"spec_auto_off": True}, {"enable_dp_attention": True}, "does not go with --sglang-enable-dp-attention: SGL"),
        ({"spec_auto_off": True}, {"speculative_eagle_topk": 4}, "does not go with --sglang-speculative-eagle-topk 4"),
        ({"spec_auto_off": True}, {"speculative_algorithm": None}, "--spec-auto-off needs engines that draft"),
        (
            {"speculative_algorithm": None},
            {"speculative_num_steps": 3},
            "--sglang-speculative-num-steps has no effect",
        ),
        (
            {"deterministic": True, "speculative_algorithm": None},
            {"speculative_algorithm": "EAGLE"},
            "EAGLE does not go with --deterministic",
        ),
    ],
)
def test_drafts_of_a_group_are_judged_by_its_own_settings(flags: Any, own: dict[str, Any], sentence: str) -> None:
    (problem,) = found_problems(drafting(**flags), WITH_LAYER, {}, own)
    assert sentence in problem and problem.startswith("--sglang-config, model default: ")


def test_groups_of_a_model_that_is_not_trained_may_draft_as_they_like() -> None:
    own = {"speculative_algorithm": "EAGLE", "speculative_accept_threshold_acc": 0.5}
    judge = ModelPlan("judge", "/judge", False, (EngineGroupPlan("regular", 1, 1, 0, own),))
    policy = ModelPlan("default", "/m", True, (EngineGroupPlan("regular", 1, 1, 1, {}),))
    assert not [*draft_problems(drafting(speculative_algorithm=None), [policy, judge], WITH_LAYER)]


def test_a_draft_path_that_is_the_models_is_its_own_layer(tmp_path: Path) -> None:
    """It needs the layer, gets weights in a sync, and its overwriting is refused where no sync brings it back."""
    model, link = tmp_path / "model", tmp_path / "link"
    model.mkdir()
    (model / "config.json").write_text("{}")
    link.symlink_to(model)
    for path in (f"{model}/", str(link)):
        settings = {"hf_checkpoint": str(model), "speculative_draft_model_path": path}
        (problem,) = found_problems(drafting(**settings), {})
        assert "has no layer that drafts" in problem
        (problem,) = found_problems(drafting(**settings, check_weight_update_equal=True), WITH_LAYER)
        assert "--check-weight-update-equal overwrites the layer" in problem
        launch = {"model_path": str(model), "speculative_algorithm": "EAGLE", "speculative_draft_model_path": path}
        assert not launch_server._drafts_apart(launch)


def test_a_command_line_hears_of_its_drafts_before_anything_starts(check: Check) -> None:
    has(
        check("--sglang-speculative-algorithm EAGLE").problems.wrong, "hf has no layer that drafts (num_nextn_predict_"
    )
    (alone,) = check("--sglang-speculative-num-steps 3").problems.wrong
    assert isinstance(alone, NoEffect) and "no effect without --sglang-speculative-algorithm" in alone
    has(
        check("--spec-break-even-length 2").problems.wrong,
        "--spec-break-even-length has no effect without --sglang-spe",
    )
    has(check("--spec-auto-off").problems.wrong, "--spec-auto-off has no effect without --spec-break-even-length")
    has(check("--spec-break-even-length 0.5").problems.wrong, "--spec-break-even-length 0.5")


# ---- weights of drafts


@pytest.fixture
def manager_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's class through which a scheduler takes weights; what is changed of it is changed back."""
    cpu_standins.install()
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager
    from sglang.srt.speculative import adaptive_spec_params

    for owner, name in (
        (Manager, "__init__"),
        (Manager, "check_weights"),
        (adaptive_spec_params, "_load_adaptive_config"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    yield Manager


def make_manager(manager_class: Any, **parts: Any) -> Any:
    common = dict.fromkeys(("tp_worker", "draft_worker", "tp_cpu_group", "memory_saver_adapter"))
    common |= {"flush_cache": lambda **_: True, "is_fully_idle": lambda **_: True}
    return manager_class(**common | parts)


class Worker:
    """The part of a worker of SGLang's that takes weights from files: notes that it was asked."""

    def __init__(self) -> None:
        self.loads = 0

    def update_weights_from_disk(self, request: Any) -> tuple[bool, str]:
        self.loads += 1
        return True, ""


@pytest.mark.parametrize(("is_apart", "of_draft"), [(False, 1), (True, 0)])
def test_a_draft_of_its_own_keeps_its_weights_in_a_sync(manager_class: Any, is_apart: bool, of_draft: int) -> None:
    if is_apart:
        engine_patches.keep_own_drafts()
    target, draft = Worker(), Worker()
    manager = make_manager(manager_class, tp_worker=target, draft_worker=draft)
    manager.update_weights_from_disk(SimpleNamespace(flush_cache=False))
    assert (target.loads, draft.loads) == (1, of_draft)


def test_only_drafts_that_are_no_part_of_the_model_are_apart() -> None:
    model = {"model_path": "/m", "speculative_algorithm": "EAGLE"}
    assert not launch_server._drafts_apart({"model_path": "/m"})
    assert not launch_server._drafts_apart(model)
    assert not launch_server._drafts_apart(model | {"speculative_draft_model_path": "/m"})
    assert launch_server._drafts_apart(model | {"speculative_draft_model_path": "/head"})
    assert launch_server._drafts_apart(model | {"speculative_algorithm": "NGRAM"})


# ---- drafts that lose


def test_an_engine_that_drafts_takes_as_many_requests_as_the_run_sends(tmp_path: Path) -> None:
    given = arguments(accelerator="cuda", sglang_server_concurrency=200)
    drafts = {"speculative_algorithm": "EAGLE"}
    assert build(given, settings=drafts)["max_running_requests"] == 200  # SGLang itself: 48
    assert build(given, settings=drafts | {"max_running_requests": 7})["max_running_requests"] == 7
    assert "max_running_requests" not in build(given) and "speculative_adaptive" not in build(given, settings=drafts)
    may_stop = build(arguments(accelerator="cuda", sglang_server_concurrency=200, spec_auto_off=True), settings=drafts)
    assert (may_stop["speculative_adaptive"], may_stop["speculative_adaptive_config"]) == (True, DRAFTS_OFF)
    assert may_stop["speculative_num_steps"] == 3


def test_an_engine_stops_drafting_when_it_is_told_to_and_not_by_itself(
    manager_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.environ import envs
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    monkeypatch.setenv("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", "0")
    engine_patches.stop_drafts_when_told(2)
    params = AdaptiveSpeculativeParams(initial_steps=2, cfg_path=DRAFTS_OFF)
    assert params.candidate_steps == [0, 2]
    for _ in range(100):  # SGLang's own rule would end drafts of which none is accepted
        assert params.on_verify_complete([0] * 8, batch_size=8) is None
    assert params.get_steps_for_batch(8) == 2
    worker = SimpleNamespace(adaptive_controller=SimpleNamespace(params=params))
    manager = make_manager(manager_class, scheduler=SimpleNamespace(draft_worker=worker))
    assert manager.check_weights(SimpleNamespace(action=DRAFTS_OFF)).success
    for without in (None, SimpleNamespace(adaptive_controller=None)):  # where SGLang cannot change the number
        other = make_manager(manager_class, scheduler=SimpleNamespace(draft_worker=without))
        assert not other.check_weights(SimpleNamespace(action=DRAFTS_OFF)).success
    assert params.get_steps_for_batch(8) == params.get_steps_for_batch(512) == 0
    assert envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get()


def test_drafts_that_lose_raise_an_alarm_and_stop_after_three_rollouts() -> None:
    """--spec-break-even-length 1.6 --spec-auto-off"""
    watch, alarms = DraftWatch(1.6, may_stop=True), AlarmWatch(AlarmSettings())
    lengths, begun, over = [1.5, 1.7, 1.5, 1.4, 1.2], [], []
    for number, length in enumerate(lengths):
        metrics = watch.note(length)
        assert (
            metrics["rollout/spec_break_even"] == pytest.approx(1.6 / length) and metrics["rollout/spec_drafts"] == 1
        )
        alarms.note({"rollout/step": number, **metrics}, "rollout/step")
        begun += [(number, change["name"]) for change in alarms.changes(number)]
        over.append(watch.is_over)
    assert over == [False] * 4 + [True] and begun == [(4, "drafts_lose")]
    assert watch.note(None) == {"rollout/spec_drafts": 0.0}


def test_drafts_are_only_watched_where_they_may_not_be_stopped() -> None:
    watch = DraftWatch(2.0, may_stop=False)
    assert [watch.note(1.0) for _ in range(5)] == [{"rollout/spec_break_even": 2.0}] * 5 and not watch.is_over
    assert DraftWatch(None, may_stop=False).note(1.0) == {}


def nested(names: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module with parameters of these dotted names."""
    root = torch.nn.Module()
    for name, tensor in names.items():
        *path, own = name.split(".")
        place = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, torch.nn.Module())
            place = place._modules[part]  # type: ignore[assignment]
        place.register_parameter(own, torch.nn.Parameter(tensor))
    return root


@pytest.mark.parametrize(
    ("layer", "in_draft"),
    [
        ("model.layers.1.", {"eh_proj": "model.eh_proj", "mlp.down_proj": "model.decoder.mlp.down_proj"}),
        ("model.mtp_layers.0.", {"input_proj": "model.input_proj", "mlp.down_proj": "model.mtp_block.mlp.down_proj"}),
    ],
)
def test_a_sync_sees_a_drafting_layer_that_has_not_come(tmp_path: Path, layer: str, in_draft: dict[str, str]) -> None:
    """SGLang's models that draft (GLM's and DeepSeek's, MiMo's) have the layer under names of their own."""
    from sglang.srt.managers.scheduler_components.weight_updater import _merge_checksum_payloads

    sent = {f"model.layers.0.{name}.weight": torch.rand(3, 2) for name in ("mlp.down_proj", "input_layernorm")}
    layers = {f"{layer}{name}.weight": torch.rand(2, 2) for name in in_draft}
    save_file(sent | layers, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "num_nextn_predict_layers": 1}))
    held = {f"{name}.weight": layers[f"{layer}{own}.weight"].clone() for own, name in in_draft.items()}
    # A head whose names mean other tensors than the target's: they are not compared.
    target, draft = nested(dict(sent)), nested(held | {"model.layers.0.input_layernorm.weight": torch.rand(3, 2)})

    class Engine:
        """Answers with what SGLang and this repository make of two models' tensors."""

        rank, version = 0, ""

        def set_weight_version(self, version: str) -> str:
            return version

        def sample_weights(self, names: list[str]) -> list[dict[str, str]]:
            parallel = SimpleNamespace(model_dump=dict)
            checkers = [
                SimpleNamespace(_get_model=lambda m=m: m, _parallelism_info=lambda: parallel) for m in (target, draft)
            ]
            answers = [weight_samples._answer(checker, set(names)) for checker in checkers]
            return [_merge_checksum_payloads(*answers)["checksums"]]

    checks, fleet = SyncChecks(str(tmp_path), 1), EngineFleet([Engine()], deadline_s=5.0)
    for is_right in (True, False):
        if not is_right:
            dict(draft.named_parameters())[f"{in_draft['mlp.down_proj']}.weight"].data.add_(1)
        checks.begin()
        checks.note([*sent.items(), *layers.items()])
        if is_right:
            checks.compare(fleet, 1)
            continue
        with pytest.raises(WeightSyncError, match=f"does not hold .*: {layer}mlp.down_proj.weight$"):
            checks.compare(fleet, 1)


@pytest.mark.parametrize(("may_draft", "held", "times"), [(True, {}, 1), (True, {"draft.": 1}, 0), (False, {}, 0)])
def test_a_drafting_layer_that_cannot_be_looked_at_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, may_draft: bool, held: dict[str, int], times: int
) -> None:
    name, layer = "model.layers.0.mlp.down_proj.weight", "model.layers.1.eh_proj.weight"
    tensors = {name: torch.rand(3, 2), layer: torch.rand(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "num_nextn_predict_layers": 1}))

    class Engine:
        """Holds what it got, its drafting layer maybe under a name that nobody knows."""

        rank = 0

        def set_weight_version(self, version: str) -> str:
            return version

        def sample_weights(self, names: list[str]) -> list[dict[str, str]]:
            found = {name: weight_samples.describe((3, 2), weight_samples.sample(tensors[name]))}
            own = weight_samples.describe((2, 2), weight_samples.sample(tensors[layer]))
            return [found | {f"{prefix}{layer}": own for prefix in held}]

    checks = SyncChecks(str(tmp_path), 1, may_draft=may_draft)
    for version in (1, 2):
        checks.begin()
        checks.note([*tensors.items()])
        checks.compare(EngineFleet([Engine()], deadline_s=5.0), version)
    assert [record.getMessage()[:57] for record in caplog.records] == times * [
        "no weight of the engines' drafting layer can be looked at"
    ]


def test_only_engines_of_the_policy_draft_with_a_layer_that_is_sent() -> None:
    def models(*, is_policy: bool, **settings: Any) -> list[ModelPlan]:
        return [ModelPlan("default", "/m", is_policy, (EngineGroupPlan("regular", 1, 1, 0, settings),))]

    assert draft_with_own_layer(models(is_policy=True, speculative_algorithm="eagle"))
    assert not draft_with_own_layer(models(is_policy=False, speculative_algorithm="eagle"))
    assert not draft_with_own_layer(models(is_policy=True))
    own = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/head"}
    assert not draft_with_own_layer(models(is_policy=True, **own))
