"""Upstream's names that were missing or differ: docs/reference/upstream_names.md judges each; those given work.

upstream_names.txt lists them. A name that is given is called here with upstream's keywords and shapes; the expected
result is derived from what the name means.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import transformers

from slime.config.args import Args
from slime.config.parse import CommandLine, build_parser
from slime.observability import logging_utils, metric_utils, rollout_metrics, timer, trace_utils
from slime.rollout.rm_hub import f1, gpqa, ifbench, math_dapo_utils, math_utils
from slime.rollout.sampling import generation
from slime.utils import (
    accelerator,
    arguments,
    async_utils,
    data,
    distributed_utils,
    eval_config,
    http_utils,
    mask_utils,
    misc,
    ppo_utils,
    processing_utils,
)
from slime.utils.errors import UsageError
from slime.utils.external_utils import command_utils
from slime.utils.types import Sample
from tests.contracts.test_python_api import find
from tests.unit.test_eval_config import ARGS as EVAL_ARGS

TABLES = (Path(__file__).parents[2] / "docs" / "reference" / "upstream_names.md").read_text()
ALL = Path(__file__).with_name("upstream_names.txt").read_text().split()
HERE = ("slime.observability.", "slime.rollout.", "slime.utils.")
NAMES = [name for name in ALL if name.startswith(HERE)]
VERDICTS = ("given", "name only", "later", "not given")


def expanded(cell: str) -> list[str]:
    """The dotted names of a cell: `a.b`, or `a.{b, c}`."""
    [text] = re.findall(r"`([^`]+)`", cell)
    stem, brace, rest = text.partition("{")
    return [f"{stem}{name}" for name in rest.rstrip("}").split(", ")] if brace else [text]


def judged() -> list[tuple[str, str, str]]:
    """(name, verdict, how) of each name in the tables of the page."""
    rows = [line[2:].split(" |")[:3] for line in TABLES.splitlines() if line.startswith("| `")]
    return [(name, verdict.strip(), how.strip()) for cell, verdict, how in rows for name in expanded(cell)]


JUDGED = [row for row in judged() if row[0].startswith(HERE)]
GIVEN = [name for name, verdict, _ in JUDGED if verdict == "given"]


def test_each_name_is_judged_once() -> None:
    assert sorted(name for name, _, _ in JUDGED) == sorted(NAMES)
    assert {verdict for _, verdict, _ in JUDGED} <= set(VERDICTS)
    assert not [name for name, verdict, how in JUDGED if verdict != "given" and not how], "say how it is done here"


def test_flags_that_the_tables_advise_exist() -> None:
    own = TABLES.partition("\n## `slime.backends`")[0]
    advised = set(re.findall(r"`(--[a-z0-9-]+)", own))
    assert advised - {option for action in CommandLine().parser._actions for option in action.option_strings} == set()


# ---- calls of the given names


def metric_args(**changes: Any) -> Args:
    flags = dict.fromkeys(("reward_key", "log_reward_category", "overlong_buffer_len"), None)
    flags |= dict.fromkeys(("log_passrate", "log_multi_turn", "log_correct_samples"), False)
    flags |= {"rollout_num_gpus": 2, "n_samples_per_prompt": 2, "n_samples_per_eval_prompt": 1, "eval_datasets": []}
    return Args.of({**flags, **changes})


def scored_group() -> list[Sample]:
    return [Sample(index=i, group_index=0, response_length=length, reward=1.0) for i, length in enumerate((4, 8))]


def check_finish_tracking() -> None:
    assert logging_utils.finish_tracking(args=metric_args()) is None


def check_rollout_metrics() -> None:
    args, samples = metric_args(), scored_group()
    found = rollout_metrics.compute_metrics_from_samples(args, samples)
    assert found["response_len/mean"] == (4 + 8) / 2 and found["zero_std/count_1"] == 1
    assert not any(name.startswith("rollout/") for name in found)
    perf = rollout_metrics.compute_perf_metrics_from_samples(args, samples, 3.0)
    assert perf["rollout_time"] == 3.0 and perf["tokens_per_gpu_per_sec"] == (4 + 8) / 3.0 / 2


def check_logged_rollout() -> None:
    args, samples = metric_args(), scored_group()
    logging_utils.finish_tracking()
    logging_utils.take_pending()
    rollout_metrics.log_rollout_data(7, args, samples, {"mine/x": 5.0}, 3.0)
    rollout_metrics.log_eval_rollout_data(7, args, {"add": {"rewards": [1, 0]}}, {"mine/y": 6.0})
    (of_rollout, key), (of_eval, eval_key) = logging_utils.take_pending()
    expected = metric_utils.dict_add_prefix(rollout_metrics.compute_metrics_from_samples(args, samples), "rollout/")
    perf = rollout_metrics.compute_perf_metrics_from_samples(args, samples, 3.0)
    expected |= metric_utils.dict_add_prefix(perf, "perf/") | {"mine/x": 5.0, "rollout/step": 7}
    assert (of_rollout, key) == (expected, "rollout/step")
    assert (of_eval, eval_key) == ({"eval/add": 1 / 2, "mine/y": 6.0, "eval/step": 7}, "eval/step")


def check_compute_rollout_step() -> None:
    assert metric_utils.compute_rollout_step(metric_args(wandb_always_use_train_step=True), 9) == 9
    assert metric_utils.dict_add_prefix(d={"mean": 1.0}, prefix="a/") == {"a/mean": 1.0}


def check_timer() -> None:
    calls: list[int] = []
    timer.Timer().reset()
    timer.Timer().add(name="work", elapsed_time=1.5)
    timer.Timer().add(name="work", elapsed_time=2.0)
    assert timer.Timer().log_dict() == {"work": 1.5 + 2.0}
    timer.with_defer(deferred_func=lambda: calls.append(2))(lambda: calls.append(1))()
    assert calls == [1, 2]


def check_traces() -> None:
    sample = Sample(index=3)
    handle: trace_utils.TraceHandle | None = trace_utils.bind_trace(sample)
    assert handle is not None and handle["version"] == trace_utils.TRACE_VERSION == 1
    trace_utils.trace_event(handle, "begun")
    trace_utils.trace_next_attempt(target=[handle], attrs={"why": "aborted"})
    assert trace_utils.export_trace(handle=handle) == trace_utils.export_trace(handle=sample)
    events = [(event["name"], event["attempt"], event["attrs"]) for event in sample.trace["events"]]
    assert events == [("begun", 0, {}), ("next_attempt", 1, {"why": "aborted"})]
    key = trace_utils.SGLANG_TRACE_META_KEYS[0]
    assert trace_utils.build_sglang_meta_trace_attrs({key: 5}) == {f"sglang_{key}": 5}


def check_submit_generate_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def finish(args: Any, group: list[Sample], sampling_params: dict[str, Any]) -> list[Sample]:
        return group

    async def submit() -> tuple[int, list[Sample]]:
        state = SimpleNamespace(args=None, sampling_params={}, pendings={}, remaining_batch_size=0)
        state.finished = asyncio.Queue()
        generation.GenerateState.submit_generate_tasks(state, samples=[[Sample(index=1)]])
        return state.remaining_batch_size, (await state.finished.get()).result()

    monkeypatch.setattr(generation, "generate_and_rm_group", finish)
    in_flight, group = asyncio.run(submit())
    assert in_flight == 1 and [sample.index for sample in group] == [1]


def check_graders() -> None:
    metadata = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [None]}
    assert ifbench.compute_ifbench_reward("no comma", "unused", metadata=metadata) == 1.0
    assert ifbench.compute_ifbench_reward("one, comma", "unused", metadata=metadata) == 0.0


def check_texts() -> None:
    assert f1.normalize_answer(s="The  Fox!") == "fox"
    assert "".join(gpqa.DEFAULT_VALID_LETTERS) == "ABCDEFGHIJ"


def check_dapo() -> None:
    assert math_dapo_utils.normalize_final_answer(final_answer="x = 1,234 units") == "1234"
    wrong = {"score": -1.0, "acc": False, "pred": "2"}
    strict = {"strict_box_verify": True, "pause_tokens_index": None}
    assert math_dapo_utils.compute_score(solution_str=r"\boxed{2}", ground_truth="3", **strict) == wrong
    assert math_dapo_utils.compute_score(solution_str="Answer: 3", ground_truth="3")["score"] == 1.0


def check_math() -> None:
    assert math_utils.extract_boxed_answer(solution=r"so \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert math_utils.grade_answer_mathd(given_answer=r"\dfrac12", ground_truth=r"\frac{1}{2}")
    assert math_utils.grade_answer_sympy(given_answer="x+1", ground_truth="1+x")
    assert not math_utils.grade_answer_sympy(given_answer="x+1", ground_truth="x")
    assert math_utils.grade_answer_verl(solution_str=r"\boxed{42}", ground_truth="42")


def check_arguments() -> None:
    parser = argparse.ArgumentParser()
    arguments.reset_arg(parser, "--mine", type=int, default=1)
    arguments.reset_arg(parser, name="--mine", default=2)
    assert parser.parse_args([]).mine == 2 and parser.parse_args(["--mine", "3"]).mine == 3
    changed = build_parser(lambda parser: arguments.reset_arg(parser, "--seq-length", default=64))
    assert changed.get_default("seq_length") == 64
    roles = {"actor": {"lr": 2.0}, "critic": {}}
    args = Args.of({"megatron_config_path": "roles.yaml", "megatron_role_values": roles, "lr": 1.0}).freeze()
    arguments.slime_validate_args(args)
    with pytest.raises(UsageError, match="takes what parse_args returns"):
        arguments.slime_validate_args(Namespace(lr=1.0))  # type: ignore[arg-type]
    named = {"base_args": args, "role": "actor"}
    assert arguments.parse_megatron_role_args(megatron_config_path="roles.yaml", **named).lr == 2.0
    with pytest.raises(UsageError, match="give --megatron-config-path other.yaml to parse_args"):
        arguments.parse_megatron_role_args(megatron_config_path="other.yaml", **named)


def check_async_loop() -> None:
    async def answer() -> int:
        return 42

    loop = async_utils.get_async_loop()
    assert isinstance(loop, async_utils.AsyncLoopThread) and loop.run(answer()) == 42


def check_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, order = tmp_path / "rows.jsonl", list(range(5))
    path.write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in order))
    prompts = data.Dataset(str(path), None, None, None, seed=42)
    prompts.shuffle(new_epoch_id=1)
    random.Random(42 + 1).shuffle(order)
    assert [int(str(sample.prompt)) for sample in prompts.samples] == order

    samples = [Sample(prompt="ab"), Sample(prompt="abc")]

    def per_character(texts: list[str], **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": [list(map(ord, text)) for text in texts]}

    kept = data.filter_long_prompt(origin_samples=samples, tokenizer=per_character, processor=None, max_length=2)
    assert [sample.prompt for sample in kept] == ["ab"]
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference)
    shares = [SimpleNamespace(inner={"rewards": [rank]}) for rank in range(2)]
    share = data.process_rollout_data(args=metric_args(), rollout_data_ref=shares, dp_rank=1, dp_size=2)
    assert share["rewards"] == [1]


def check_init_process_group() -> None:
    how = {"timeout": timedelta(seconds=20), "world_size": 1, "rank": 0, "pg_options": None}
    place = f"tcp://127.0.0.1:{misc.get_free_port()}"
    group = distributed_utils.init_process_group(backend="gloo", init_method=place, group_name="mine", **how)
    value = torch.tensor([3.0])
    torch.distributed.all_reduce(value, group=group)
    assert value.item() == 3.0 and group.size() == 1
    store = torch.distributed.HashStore()
    other = distributed_utils.init_process_group(backend="gloo", store=store, group_name="other", **how)
    assert other.rank() == 0
    for made in (group, other):
        torch.distributed.destroy_process_group(made)


def check_eval_config() -> None:
    assert eval_config.pick_from_args(args=Args.of({"a": None, "b": 3}), attrs=("a", "b")) == 3
    fields = ("app_service", "eval_task_timeout", "eval_early_stop_remaining", "eval_early_stop_idle_timeout")
    given = {name: name for name in (*fields, "message_processor", "reward_model", "remote_environment")}
    given["min_eval_samples"] = 2  # type: ignore[assignment]
    raw = [{"name": "a", "path": "p", "rm_type": "math", **given}]
    [config] = eval_config.build_eval_dataset_configs(args=EVAL_ARGS, raw_config=iter(raw), defaults={"top_k": 5})
    assert {name: getattr(config, name) for name in given} == given and config.top_k == 5
    assert config.inject_metadata(sample_metadata={"id": 3}) == {"id": 3, "rm_type": "math"}
    assert eval_config.EvalDatasetConfig(name="a", path="p").min_eval_samples is None


def check_masks() -> None:
    assert mask_utils.get_response_lengths([[0, 1, 0], [0, 0]]) == [2, 0]
    masks = object.__new__(mask_utils.MultiTurnLossMaskGenerator)
    masks.tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    ids = list(map(ord, "abcd"))
    assert masks.get_text_from_loss_mask(token_ids=ids, loss_masks=[1, 0, 1, 1]) == ["a", "cd"]


def check_misc() -> None:
    meta = {"ids": [[1, 2], [3, 4]], "text": "AQAAAAIAAAA="}  # 1 and 2, each of four bytes, little end first
    found = misc.decode_int32_meta_array(meta_info=meta, keys=("none", "ids"))
    assert found is not None and found.dtype == torch.int32 and found.tolist() == [1, 2, 3, 4]
    found = misc.decode_int32_meta_array(meta_info=meta, keys="text")
    assert found is not None and found.tolist() == [1, 2]
    assert misc.decode_int32_meta_array(meta_info=meta, keys="none") is None


def check_opsm_mask() -> None:
    new, old = [torch.tensor([-2.0, -2.0]), torch.tensor([-1.0])], [torch.tensor([-1.0, -1.0]), torch.tensor([-1.0])]
    advantages, masks = [torch.tensor([-1.0, 1.0]), torch.tensor([-1.0])], [torch.ones(2), torch.ones(1)]
    keep, left_out = ppo_utils.compute_opsm_mask(
        args=Args.of({"opsm_delta": 0.5}),
        full_log_probs=new,
        full_old_log_probs=old,
        advantages=advantages,
        loss_masks=masks,
    )
    # The first sample has moved by 1 a token: its token with a negative advantage is left out, 1 of all 3.
    assert keep.tolist() == [0, 1, 1] and left_out.item() == pytest.approx(1 / 3)


def check_reinforce_returns() -> None:
    kl, gamma, kl_coef = [torch.tensor([1.0, 2.0, 3.0])], 0.5, 0.1
    [found] = ppo_utils.get_reinforce_plus_plus_returns(
        rewards=torch.tensor([1.0]),
        kl=kl,
        loss_masks=[torch.tensor([1, 1, 0])],
        response_lengths=[3],
        total_lengths=[5],
        kl_coef=kl_coef,
        gamma=gamma,
    )
    last = 1.0 - kl_coef * 2.0
    assert found.tolist() == pytest.approx([-kl_coef * 1.0 + gamma * last, last, 0])


def check_log_probs() -> None:
    logits, tokens = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([1, 1])
    found, entropy = ppo_utils.calculate_log_probs_and_entropy(
        logits=logits, tokens=tokens, tp_group=None, with_entropy=True, chunk_size=-1
    )
    expected = [-math.log(1 + math.exp(-1)), -math.log(1 + math.exp(2))]
    assert found.shape == (2, 1) and found[:, 0].tolist() == pytest.approx(expected)
    assert entropy is not None and entropy.shape == (2,)


def check_processing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda name, **kwargs: (name, kwargs), raising=True
    )
    asked = {"trust_remote_code": True, "use_fast": True}
    assert processing_utils.load_tokenizer(name_or_path="m", **asked) == ("m", asked)
    assert processing_utils.load_processor(name_or_path=str(tmp_path), trust_remote_code=True) is None
    text_only = [{"role": "user", "content": "hi"}]
    assert processing_utils.process_vision_info(prompt=text_only, processor=None) == {"images": None, "videos": None}


def check_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "kind", lambda: "cpu")
    accelerator.manual_seed(3)
    state = accelerator.get_rng_state()
    first = torch.rand(1)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(1), first) and accelerator.initial_seed() == 3
    accelerator.synchronize(device_arg=None)
    with accelerator.stream(accelerator.current_stream()):
        assert accelerator.device_count() == torch.cpu.device_count()
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    for name in accelerator._FROM_TORCH:
        assert getattr(accelerator, name) is getattr(torch.cuda, name)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = accelerator.no_such_name
    assert accelerator.device_type() in ("cpu", "cuda")


def check_places() -> None:
    assert http_utils.SLIME_HOST_IP_ENV == "SLIME_HOST_IP"
    assert (command_utils.repo_base_dir / "train.py").is_file()


# What the name begins with -> its check; the longest that fits.
CHECKS: dict[str, Callable[..., None]] = {
    "slime.observability.logging_utils.": check_finish_tracking,
    "slime.observability.metric_utils.": check_compute_rollout_step,
    "slime.observability.rollout_metrics.compute_": check_rollout_metrics,
    "slime.observability.rollout_metrics.log_": check_logged_rollout,
    "slime.observability.timer.": check_timer,
    "slime.observability.trace_utils.": check_traces,
    "slime.rollout.rm_hub.f1.": check_texts,
    "slime.rollout.rm_hub.gpqa.": check_texts,
    "slime.rollout.rm_hub.ifbench.": check_graders,
    "slime.rollout.rm_hub.math_dapo_utils.": check_dapo,
    "slime.rollout.rm_hub.math_utils.": check_math,
    "slime.rollout.sglang_rollout.": check_submit_generate_tasks,
    "slime.utils.accelerator.": check_accelerator,
    "slime.utils.arguments.": check_arguments,
    "slime.utils.async_utils.": check_async_loop,
    "slime.utils.data.": check_data,
    "slime.utils.distributed_utils.": check_init_process_group,
    "slime.utils.eval_config.": check_eval_config,
    "slime.utils.external_utils.command_utils.": check_places,
    "slime.utils.http_utils.": check_places,
    "slime.utils.mask_utils.": check_masks,
    "slime.utils.misc.": check_misc,
    "slime.utils.ppo_utils.calculate_": check_log_probs,
    "slime.utils.ppo_utils.compute_opsm": check_opsm_mask,
    "slime.utils.ppo_utils.get_reinforce": check_reinforce_returns,
    "slime.utils.processing_utils.": check_processing,
}


def check_of(name: str) -> Callable[..., None] | None:
    return next((check for start, check in CHECKS.items() if name.startswith(start)), None)


@pytest.mark.parametrize("check", dict.fromkeys(CHECKS.values()), ids=lambda check: check.__name__)
def test_given_names_are_called_as_in_upstream(
    check: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = {"monkeypatch": monkeypatch, "tmp_path": tmp_path}
    wanted = check.__code__.co_varnames[: check.__code__.co_argcount]
    check(**{name: places[name] for name in wanted})


@pytest.mark.parametrize("name", GIVEN)
def test_a_given_name_is_there_and_has_a_check(name: str) -> None:
    *start, last = name.split(".")
    check = check_of(name)
    assert check is not None
    source = Path(__file__).read_text().partition(f"def {check.__name__}(")[2].partition("\n\n\n")[0]
    if not name.startswith("slime.utils.accelerator."):  # its check goes through all of torch's names
        assert (last if last != "__init__" else start[-1]) in source, f"{check.__name__} does not call it"
    is_field = name.startswith("slime.utils.eval_config.EvalDatasetConfig.")
    assert is_field or callable(found := find(name)) or found is not None


@pytest.mark.parametrize("name", [name for name, verdict, _ in judged() if verdict == "name only"])
def test_a_name_of_which_no_more_is_known_imports(name: str) -> None:
    assert find(name) is not None


def test_another_kind_of_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    assert accelerator.supports(cap="ipc_collect") and not accelerator.supports(cap="no_such_name")
    with pytest.raises(UsageError, match=r"register_accelerator: .* --accelerator"):
        accelerator.register_accelerator("npu", object)


@pytest.mark.parametrize("name", [name for name, verdict, _ in JUDGED if verdict in ("later", "not given")])
def test_a_name_that_is_not_given_is_not_there_under_another_meaning(name: str) -> None:
    if name == "slime.observability.trace_utils.import_trace":
        return  # the page says how ours is called
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        found = find(name)
        if name.endswith(".__init__"):  # every class has one
            raise AttributeError(found)
