"""Three modules as users of upstream write them, run unchanged: an agent that searches, rewards, a curriculum.

They import only names of the public interface. The engine is a script from the text so far to the text it adds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from slime.checkpoints.paths import state_path
from slime.rollout.sampling import generation
from slime.utils.misc import load_function
from tests.contracts.rollout_world import World, rollout, train_data
from tests.unit.rollout_fakes import FakeEngine, serve


class TalkingEngine(FakeEngine):
    """Answers a text with what `script` adds to it; one token per character."""

    script: Callable[[str], str]

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        limit = body["sampling_params"]["max_new_tokens"]
        answer = self.script("".join(map(chr, body["input_ids"])))
        reason = "length" if len(answer) > limit else "stop"
        answer = answer[:limit]
        pairs = [[-0.25, ord(letter), None] for letter in answer]
        meta = {"finish_reason": {"type": reason}, "output_token_logprobs": pairs, "completion_tokens": len(answer)}
        meta |= {"weight_version": "1", "prompt_tokens": len(body["input_ids"]), "cached_tokens": 0}
        return web.json_response({"text": answer, "meta_info": meta})


@pytest.fixture
def talk(world: World) -> Iterator[Callable[[Callable[[str], str]], World]]:
    """The world with an engine that follows a script."""
    with TalkingEngine().serve() as engine:
        world.engine = engine

        def follow(script: Callable[[str], str]) -> World:
            engine.script = script
            return world

        yield follow


def write_rows(world: World, rows: list[dict]) -> str:
    path = world.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


SEARCH = "<search>capital of France</search>"
ANSWER = "<answer>Paris</answer>"


def test_a_search_agent_trains_what_the_model_wrote_and_reads_what_it_found(talk):
    world = talk(lambda text: ANSWER if "<information>" in text else SEARCH)
    asked = []

    async def retrieve(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"result": [[{"contents": "Paris is the capital."}]]})

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    with serve(app) as port:
        manager = world.manager(
            prompt_data=write_rows(world, [{"input": "Capital of France?", "answer": "paris"}]),
            label_key="answer",
            rollout_batch_size=1,
            over_sampling_batch_size=1,
            rollout_max_response_len=100,
            custom_generate_function_path="user_package.search_agent.generate",
            custom_rm_path="user_package.search_agent.reward_func",
            reward_key="score",
            search_url=f"http://127.0.0.1:{port}/retrieve",
            log_multi_turn=True,
        )
        data = train_data(manager)
    information = "<information>Paris is the capital.</information>"
    assert "".join(map(chr, data["tokens"][0])) == "Capital of France?" + SEARCH + information + ANSWER
    mask = [1] * len(SEARCH) + [0] * len(information) + [1] * len(ANSWER)
    assert data["loss_masks"] == [mask] * 2
    assert data["rollout_log_probs"][0] == [-0.25 * trained for trained in mask]
    assert data["round_number"] == [2, 2]
    assert data["raw_reward"] == [1.0, 1.0]
    assert asked == [{"queries": ["capital of France"], "topk": 1}] * 2


def test_a_search_agent_that_runs_out_of_tokens_is_truncated(talk):
    world = talk(lambda text: SEARCH)
    manager = world.manager(
        rollout_max_response_len=5,
        custom_generate_function_path="user_package.search_agent.generate",
        custom_rm_path="user_package.search_agent.reward_func",
        reward_key="score",
    )
    data = train_data(manager)
    assert data["truncated"] == [1] * 4 and data["response_lengths"] == [5] * 4 and data["raw_reward"] == [0.0] * 4


ROWS = [
    {"input": "boxed", "label": "42", "metadata": {"kind": "boxed"}},
    {"input": "dapo", "label": "42", "metadata": {"kind": "dapo"}},
    {"input": "thinking", "label": "42", "metadata": {"kind": "thinking"}},
]
SAID = {"boxed": r"\boxed{42}", "dapo": "Answer: 42", "thinking": r"...</think>\boxed{42}"}


@pytest.mark.parametrize(
    ("group_rm", "rewards"),
    # Both samples of a group give the same answer, so each gets half.
    [(False, [1, 1, 1, 1, 1, 1]), (True, [0.5] * 6)],
)
def test_rewards_made_of_slimes_graders_work_for_samples_and_for_groups(talk, group_rm, rewards):
    world = talk(SAID.__getitem__)
    manager = world.manager(
        prompt_data=write_rows(world, ROWS),
        label_key="label",
        rollout_batch_size=3,
        over_sampling_batch_size=3,
        rollout_max_response_len=50,
        custom_rm_path="user_package.math_rewards.reward_func",
        custom_reward_post_process_path="user_package.math_rewards.post_process_rewards",
        group_rm=group_rm,
    )
    data = train_data(manager)
    assert data["raw_reward"] == rewards
    assert data["rewards"] == [0.0] * 6, "each group has equal rewards"


def test_a_curriculum_source_and_its_rollout_function_keep_their_place(talk, tmp_path: Path):
    world = talk(lambda text: r"\boxed{1}")
    rows = [{"input": f"row {level}", "label": "1", "metadata": {"level": level}} for level in (2, 0, 1, 3)]
    flags = {
        "prompt_data": write_rows(world, rows),
        "label_key": "label",
        "data_source_path": "user_package.curriculum:CurriculumDataSource",
        "buffer_filter_path": "user_package.curriculum:easiest_first",
        "rollout_function_path": "user_package.curriculum:generate_rollout",
        "rm_type": "math",
        "custom_rm_path": None,
        "level_up_at": 0.5,
        "save": str(tmp_path / "save"),
    }
    manager = world.manager(**flags)
    boxes, [(metrics, _)] = rollout(manager, 0)
    assert boxes[0].inner["source_names"] == ["level_0"] * 2 + ["level_2"] * 2
    assert metrics["rollout/level"] == 1
    source = manager.data_source
    given_back = source.get_samples(2)
    source.add_samples(given_back[::-1])
    manager.save(0)
    assert state_path(flags["save"], 0).exists()

    generation.GenerateState.clear_instances()
    resumed = world.manager(**{**flags, "load": flags["save"], "save": None})
    resumed.load(0)
    assert resumed.data_source.get_metadata() == {"level": 1}
    assert [group[0].metadata["level"] for group in resumed.data_source.get_samples(2)] == [1, 3], "from the buffer"
    assert resumed.data_source.get_buffer_length() == 0


def test_the_modules_import_only_public_names(user_path: Path):
    """Every name that they take from slime is on the list of the interface."""
    import ast
    import csv

    with (Path(__file__).parent / "python_api.tsv").open() as file:
        public = {row["name"] for row in csv.DictReader(file, delimiter="\t")}
    for file_name in ("search_agent.py", "math_rewards.py", "curriculum.py"):
        for node in ast.walk(ast.parse((user_path / "user_package" / file_name).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slime."):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    assert name in public, f"{file_name}: {name}"
                    load_function(name)


def test_the_generate_state_has_what_agents_read(world: World):
    args = world.args(sglang_enable_deterministic_inference=True, sglang_server_concurrency=4, rollout_seed=7)
    state = generation.GenerateState(args)
    assert state is generation.GenerateState(args), "one in a process"
    limits = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 20,
        "stop": None,
        "stop_token_ids": None,
    }
    text = {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
    assert state.sampling_params == state.sampling_params | limits | text
    assert state.semaphore._value == 4
    assert state.group_sampling_seeds == [7, 8]
    assert (state.aborted, state.remaining_batch_size, list(state.pendings)) == (False, 0, [])
    assert state.tokenizer.encode("p") == [ord("p")]
    with state.dp_rank_context() as rank:
        assert rank == 0
