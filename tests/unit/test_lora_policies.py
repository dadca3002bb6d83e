"""Several policies over one base: their file at the parse, their prompts, their groups, what their requests name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang_utils.engine_patches import LiveAdapter
from slime.backends.sglang_utils.server_args import adapter_defaults
from slime.config.args import Args
from slime.config.lora_policies import LoraPolicy
from slime.config.megatron.lora_plan import LoraPlan
from slime.rollout.collector import Collector
from slime.rollout.data_source import PolicyDataSource
from slime.rollout.sampling.engine_request import engine_payload
from slime.rollout.sampling.weight_versions import SyncSchedule, WeightClock
from slime.utils.misc import needed
from slime.utils.types import Sample
from slime.weights.adapters import BASE, POLICY
from tests.unit.argument_lines import Check, check, command_line
from tests.unit.rollout_fakes import rollout_args

__all__ = ["check", "command_line"]

LINE = "--lora-rank 8 --lora-policies policies.yaml"


def write(directory: Path, *policies: dict[str, Any]) -> None:
    (directory / "policies.yaml").write_text(json.dumps({"policies": policies}))


def test_a_policy_has_the_flags_values_unless_its_entry_says_otherwise(check: Check, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text((tmp_path / "data.jsonl").read_text())
    write(tmp_path, {"name": "a"}, {"name": "b", "data": str(other), "rank": 4, "lr": 2e-4, "reward": "f1"})
    checked = check(LINE)
    assert not checked.problems.all(), checked.problems.all()
    args = checked.args
    first, second = (policy.of(args) for policy in args.policies)
    assert (first.prompt_data, first.lora_rank, first.lr, first.rm_type) == ("data.jsonl", 8, args.lr, "math")
    assert (second.prompt_data, second.lora_rank, second.lr, second.rm_type) == (str(other), 4, 2e-4, "f1")
    assert needed(LoraPlan.of(second)).scale == needed(LoraPlan.of(first)).scale == 2
    assert adapter_defaults(args, needed(LoraPlan.of(args)))["max_loras_per_batch"] == 3, "both, and the base"
    in_flight = args.replace(update_weights_in_flight=True)
    assert adapter_defaults(in_flight, needed(LoraPlan.of(args)))["max_loras_per_batch"] == 7
    assert args.data_source_path == "slime.rollout.data_source.PolicyDataSource"


WRONG: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "twice": ([{"name": "a"}, {"name": "a"}], "", "the name a is there 2 times"),
    "rank": ([{"name": "a", "rank": 16}], "", "a: rank 16 is over --lora-rank 8"),
    "key": ([{"name": "a", "ranc": 16}], "", "did you mean"),
    "name": ([{"name": "a b"}], "", "policies[0].name"),
    "file": ([{"name": "a", "data": "nowhere.jsonl"}], "", "--lora-policies policies.yaml: a: --prompt-data"),
    "reward": ([{"name": "a", "reward": "mat"}], "", "a: --rm-type mat"),
    "function": ([{"name": "a", "reward": "no.such.function"}], "", "--lora-policies policies.yaml: a: reward"),
    "merged": ([{"name": "a"}], "--lora-serve merged", "merged weights are one policy's; give adapter"),
    "critic": ([{"name": "a"}], "--advantage-estimator ppo", "--use-critic does not go with --lora-policies"),
    "export": ([{"name": "a"}], "--save-hf out_{rollout_id}", "--save-hf does not go with --lora-policies"),
    "source": ([{"name": "a"}], "--data-source-path slime.rollout.data_source.RolloutDataSource", "names prompts"),
    "eval": (
        [{"name": "a"}],
        "--eval-prompt-data held data.jsonl --eval-interval 1",
        "held does not say which policy",
    ),
    "mixture": ([{"name": "a", "data": "mix.yaml"}], "", "a: data mix.yaml is a mixture"),
    "graders": ([{"name": "a", "reward": "f1"}], "--prompt-data mix.yaml", "reward f1 stands beside the reward of"),
    "alone": ([{"name": "a"}], "--group-rm", "--group-rm does not go with --lora-policies"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_policies_do_not_go_with_is_refused(check: Check, tmp_path: Path, case: str) -> None:
    policies, flags, told = WRONG[case]
    (tmp_path / "mix.yaml").write_text("datasets: {one: {path: data.jsonl, rm_type: math}}")
    write(tmp_path, *policies)
    problems = check(f"{LINE} {flags}").problems.all()
    assert any(told in problem for problem in problems), problems


def test_a_policy_without_data_does_not_take_those_of_the_first(check: Check, tmp_path: Path) -> None:
    write(tmp_path, {"name": "a", "data": "data.jsonl"}, {"name": "b"})
    problems = check(LINE, without="--prompt-data").problems.all()
    assert any("b has no data, and there is no --prompt-data" in problem for problem in problems), problems


def test_policies_need_adapters_and_their_file(check: Check) -> None:
    assert any("--lora-policies" in text for text in check("--lora-policies policies.yaml").problems.all())
    assert any("there is no such file" in text for text in check(LINE).problems.all())


@pytest.fixture
def source(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PolicyDataSource:
    for name in "ab":
        rows = [json.dumps({"input": f"{name}{i}", "label": "1"}) for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    own = {"name": "b", "data": str(tmp_path / "b.jsonl"), "reward": "f1"}
    write(tmp_path, {"name": "a", "data": str(tmp_path / "a.jsonl")}, own)
    monkeypatch.setattr("slime.rollout.data_source.load_tokenizer", lambda *_, **__: None)
    return PolicyDataSource(check(f"{LINE} --save ckpt").args.replace(load="ckpt"))


def test_every_policy_gets_equally_many_prompts_of_its_own_file(source: PolicyDataSource) -> None:
    groups = source.get_samples(2)
    assert [(group[0].prompt, group[0].metadata[POLICY]) for group in groups] == [
        ("a0", "a"), ("b0", "b"), ("a1", "a"), ("b1", "b")
    ]  # fmt: skip
    assert [group[0].metadata.get("rm_type") for group in groups] == [None, "f1"] * 2
    indices = [sample.index for group in groups for sample in group]
    assert len(set(indices)) == 8 and len({group[0].group_index for group in groups}) == 4
    source.add_samples([groups[3]])
    assert [group[0].prompt for group in source.get_samples(1)] == ["a2", "b1"], "it comes back to its policy"


def test_a_resumed_run_goes_on_with_the_next_prompt_of_each_policy(source: PolicyDataSource, tmp_path: Path) -> None:
    args = source._args
    groups = source.get_samples(2)
    source.add_samples([groups[1]])
    source.save(0)
    source.save(1)
    again = PolicyDataSource(args)
    again.load(1)
    drawn = [[g[0].prompt for g in one.get_samples(2)] for one in (source, again)]
    assert drawn[0] == drawn[1] == ["a2", "b0", "a0", "b2"]


def test_tokens_of_an_earlier_run_are_not_taken_for_new_ones(source: PolicyDataSource) -> None:
    WeightClock.clear_instances()
    WeightClock().follow(SyncSchedule(0, 9))
    WeightClock().publish(5)
    group = source.get_samples(1)[1]
    group[0].weight_versions = ["4", "5"]
    source.add_samples([group])
    source.save(4)
    WeightClock.clear_instances()  # another process, which has had no sync yet
    again = PolicyDataSource(source._args)
    again.load(4)
    ((sample, *_),) = again.sources["b"].buffer
    assert sample.weight_versions == ["-1", "0"], "rollout 4 was trained at version 5, which is 0 now"


def test_a_batch_has_equally_many_groups_of_each_policy(source: PolicyDataSource) -> None:
    async def collect() -> tuple[Collector, int]:
        collector = Collector(source._args, 0)
        state = SimpleNamespace(pendings={}, remaining_batch_size=0)
        for name in "aaaaabbbb":  # --rollout-batch-size 4 of each
            group = [Sample(status=Sample.Status.COMPLETED, reward=1.0, metadata={POLICY: name})]

            async def made(group: Any = group) -> Any:
                return group

            task = asyncio.create_task(made())
            await task
            state.pendings[task], state.remaining_batch_size = group, state.remaining_batch_size + 1
            collector.take(state, task)  # type: ignore[arg-type]
        return collector, state.remaining_batch_size

    collector, remaining = asyncio.run(collect())
    names = [group[0].metadata[POLICY] for group in collector.accepted]
    assert names == ["a"] * 4 + ["b"] * 4 and collector.batch_size == 8
    assert [group[0].metadata[POLICY] for group in collector.unused] == ["a"] and remaining == 8


def test_a_request_names_its_policy_and_gets_the_newest_version_of_it() -> None:
    sample, state = Sample(tokens=[1, 2], metadata={POLICY: "math"}), SimpleNamespace(args=rollout_args())
    assert engine_payload(sample, {}, state)["lora_path"] == "slime-live@math"
    assert "lora_path" not in engine_payload(Sample(tokens=[1, 2]), {}, state)
    live = LiveAdapter()

    def given(asked: str | None) -> Any:
        request = SimpleNamespace(is_single=True, lora_path=asked)
        live.give_to(request, asked)
        return request.lora_path

    assert given("slime-live@math") is None, "adapters begin at zero"
    live.names = {"math": "slime-v3@math.1", "code": "slime-v3@code"}
    asked = {"slime-live@math": "slime-v3@math.1", BASE: None, "slime-v2@math": "slime-v2@math", "judge": "judge"}
    assert {name: given(name) for name in asked} == asked
    for name in (None, "slime-live@chess"):
        with pytest.raises(ValueError, match="name one of slime-live@math, slime-live@code"):
            given(name)


def test_policies_are_of_use_in_an_args_without_any() -> None:
    policy = LoraPolicy(name="a", reward="my.module:fn", alpha=4.0)
    args = Args.of({"rm_type": "math", "custom_rm_path": None, "lora_alpha": None})
    own = policy.of(args)
    assert (own.rm_type, own.custom_rm_path, own.lora_alpha) == (None, "my.module:fn", 4.0)
