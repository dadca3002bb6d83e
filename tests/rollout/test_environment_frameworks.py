"""The examples of docs/environments.md in the frameworks themselves: verifiers, OpenEnv, reasoning-gym. No network.

Each needs a virtual environment that tools/prepare_environment.py has made; SLIME_ENVIRONMENT_VENVS is the directory
that has them, named like the frameworks. The model is scripted; verifiers asks it through the real agent gateway.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState
from slime.utils import async_utils
from slime.utils.files.yaml_config import load_yaml
from slime.utils.types import Sample
from slime_plugins.environments.process import Environments, check_args
from slime_plugins.environments.rollout import generate
from tests.rollout.chat_tokenizers import family_tokenizer
from tests.rollout.test_multi_turn import ScriptedModel
from tests.unit.rollout_fakes import rollout_args
from tools.prepare_environment import read_tasks

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
VENVS = os.environ.get("SLIME_ENVIRONMENT_VENVS", "")


def settings_of(framework: str) -> dict:
    """The example's settings, with the Python of this machine's virtual environment."""
    python = Path(VENVS) / framework / "bin" / "python"
    if not VENVS or not python.exists():
        pytest.skip(f"{framework} has no virtual environment in SLIME_ENVIRONMENT_VENVS={VENVS or 'unset'}")
    values = load_yaml(str(ROOT / "examples" / "environments" / f"{framework}.yaml"), "--config").value["environment"]
    paths = [str(ROOT / path) for path in values.get("paths", [])]
    return values | {"python": str(python), "paths": paths}


@pytest.fixture
def play(monkeypatch, tmp_path):
    """play(settings, row, replies) -> (samples, model, trained texts)."""
    from slime.agent import gateway

    def one(settings, row, replies, **flags):
        tokenizer = family_tokenizer("qwen2_5")
        GenerateState.clear_instances()
        gateway.SharedGateway.clear_instances()
        monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: tokenizer)
        with ScriptedModel(tokenizer, replies).serve() as model:
            args = rollout_args(
                sglang_router_port=model.port, rollout_max_response_len=2000, output_dir=str(tmp_path), **flags
            )
            parsers = {"sglang_tool_call_parser": "qwen25", "sglang_reasoning_parser": None}
            vars(args).update(environment=settings, hf_checkpoint=str(tmp_path), **parsers)
            assert list(check_args(args)) == []
            metadata = row["metadata"] | {"tools": row.get("tools")}
            sample = Sample(index=5, prompt=row["prompt"], metadata=metadata)
            result = async_utils.run(_run(args, sample))
        samples = result if isinstance(result, list) else [result]
        return samples, model, [trained(sample, tokenizer) for sample in samples]

    yield one
    if Environments in type(Environments)._instances:
        for process in Environments(None, None).processes:
            async_utils.run(process.end())
    Environments.clear_instances()
    if gateway.SharedGateway in type(gateway.SharedGateway)._instances:
        gateway.SharedGateway(None).gateway.stop()
    gateway.SharedGateway.clear_instances()
    GenerateState.clear_instances()


async def _run(args, sample):
    return await generate(args, sample, dict(GenerateState(args).sampling_params))


def trained(sample: Sample, tokenizer) -> str:
    ids = sample.tokens[-sample.response_length :]
    return tokenizer.decode([token for token, bit in zip(ids, sample.loss_mask, strict=True) if bit])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tasks_of(settings: dict, tmp_path: Path, count: int) -> list[dict]:
    return async_utils.run(read_tasks(settings, start=0, count=count, log_path=tmp_path / "tasks.log"))


def test_reasoning_gym_asks_and_scores(play, tmp_path):
    settings = settings_of("reasoning_gym")
    rows = tasks_of(settings, tmp_path, 3)
    expression = rows[2]["prompt"][-1]["content"].rpartition(":")[2].strip(" =.")
    terms = expression.split()
    answer = sum(int(n) * (-1 if sign == "-" else 1) for sign, n in zip(["+", *terms[1::2]], terms[::2], strict=True))
    ((right,), _, _) = play(settings, rows[2], [f"<answer>{answer}</answer>"])
    ((wrong,), _, _) = play(settings, rows[2], [f"<answer>{answer + 1}</answer>"])
    assert (right.reward, wrong.reward, right.end_reason) == (1.0, 0.0, "done")
    assert right.metadata["environment"] == {"task": 2, "metrics": {"answered": 1.0}}


def test_openenv_is_played_with_a_tool_and_without_its_server(play, tmp_path):
    settings = settings_of("openenv")
    row = tasks_of(settings, tmp_path, 5)[4]
    replies = [call("act", '{"number": "x"}'), call("act", '{"number": 20}'), call("act", '{"number": 8}')]
    ((sample,), model, _) = play(settings, row, replies)  # seed 4 thinks of 8
    assert (sample.end_reason, sample.metadata["environment"].get("error")) == ("done", None)
    assert "error: number: Input should be a valid integer" in model.seen(1)
    assert "It is lower." in model.seen(2)
    assert (sample.reward, sample.end_reason) == (pytest.approx(1.1 - 0.1 * 2), "done")
    assert sample.metadata["environment"]["metrics"] == {"steps": 2.0, "done": 1.0}


def test_verifiers_asks_the_model_itself_and_the_gateway_keeps_the_tokens(play, tmp_path):
    settings = settings_of("verifiers")
    row = tasks_of(settings, tmp_path, 3)[0]  # the letter a in strawberry
    replies = [call("count_letter", '{"word": "strawberry", "letter": "a"}'), "There is 1"]
    ((sample,), model, (text,)) = play(settings, row, replies)
    assert sample.metadata.get("environment", {}).get("error") is None
    assert (sample.reward, sample.end_reason, sample.reward_is_trusted) == (pytest.approx(1.1), "done", True)
    assert text == f"{replies[0]}<|im_end|>{replies[1]}<|im_end|>"
    assert "<tool_response>\n1\n</tool_response>" in model.seen(1)
    assert sample.metadata["environment"]["metrics"] == {"is_right": 1.0, "is_short": 0.1, "turns": 2.0}
    assert sample.metadata["agent"]["breaks"] == 0


def test_a_taskset_of_verifiers_that_runs_out_of_turns_is_scored(play, tmp_path):
    settings = settings_of("verifiers")
    row = tasks_of(settings, tmp_path, 1)[0]
    replies = [call("count_letter", '{"word": "strawberry", "letter": "a"}')] * 2
    ((sample,), _, _) = play(settings, row, replies, max_turns=1)
    assert (sample.reward, sample.reward_is_trusted) == (0.0, True)
    assert sample.end_reason in ("done", "max_turns")
