"""Adapters in a real engine on CPU: log-probs against PEFT's, versions that come and go, what is refused.

The trainer's side of a sync is `AdapterUpdater` with tensors of a test's own: gathering them from Megatron is tested
in test_lora.py, and a whole run in test_lora_e2e.py.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import quantize_bucket
from slime.backends.megatron_utils.update_weight import from_adapters
from slime.backends.megatron_utils.update_weight.base import WeightSyncError
from slime.backends.megatron_utils.update_weight.from_adapters import AdapterUpdater
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.config.args import Args
from slime.config.lora_policies import LoraPolicy
from slime.utils import http_utils
from slime.weights.adapters import BASE, live_name
from slime.weights.formats import format_of_checkpoint
from tests.integration.conftest import make_engine
from tests.integration.test_fp8_engine import unquantized_twin
from tests.integration.trainer_world import trainer_args
from tools import convert_hf_to_fp8, convert_hf_to_int4_direct

PROMPT = [random.Random(0).randrange(8, 100) for _ in range(64)]
RANK = 8
TOLERANCE = 1e-4
IN_FLIGHT = 6
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def engine(tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    log = tmp_path_factory.mktemp("lora") / "engine_0.log"
    rooms = {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": [*TARGETS], "max_loras_per_batch": 4}
    running = make_engine(tiny_models[0], log, **rooms, lora_backend="torch_native")
    running.start(deadline_s=170)
    yield running
    running.shutdown()


def drawn(model: Path, seed: int, scale: float = 0.05) -> Tensors:
    """A random adapter of a model."""
    generator, tensors = torch.Generator().manual_seed(seed), Tensors()
    weights = load_file(model / "model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # the model's is tied
    for name, weight in weights.items():
        if name.split(".")[-2] in TARGETS:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            for half, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                tensors[f"{stem}.lora_{half}.weight"] = torch.randn(shape, generator=generator) * scale
    return tensors


@pytest.fixture
def updater(
    engine: SGLangEngine, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., AdapterUpdater]:
    """Makes the updater of a trainer whose model is the first of `tiny_models`, or another; so is what is served."""

    def make(model: Path = tiny_models[0], served: Path = tiny_models[0], **flags: Any) -> AdapterUpdater:
        weights = list(load_file(model / "model.safetensors").items())
        monkeypatch.setattr(from_adapters, "iter_hf_buckets", lambda *_, **__: iter([weights]))
        values = {
            "lora_rank": RANK,
            "lora_target_modules": [*TARGETS],
            "output_dir": str(tmp_path),
            "offload_rollout": False,
            "sglang_max_lora_rank": None,
        }
        args = trainer_args(served, **values | flags)
        args.tensors = drawn(tiny_models[0], 1)
        monkeypatch.setattr(from_adapters, "adapter_tensors", lambda model: args.tensors)
        made = AdapterUpdater(args, [])
        made.connect([engine], engine_sizes=[1])
        return made

    return make


def send(updater: AdapterUpdater, tensors: Tensors) -> None:
    updater.args.tensors = tensors
    updater.update()


def of_peft(model: Path, tensors: Tensors | None) -> list[float]:
    """Log-probs of the prompt, as PEFT has them."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    hf: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if tensors is not None:
        hf = get_peft_model(hf, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=[*TARGETS])).eval()
        set_peft_model_state_dict(hf, tensors)
    with torch.no_grad():
        log_probs = hf(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return [float(log_probs[i, token]) for i, token in enumerate(PROMPT[1:])]


def gap(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def generate(engine: SGLangEngine, prompt: list[int], length: int, lora_path: str | None = None) -> dict[str, Any]:
    payload: dict[str, Any] = {"input_ids": prompt, "lora_path": lora_path, "return_logprob": True}
    payload["sampling_params"] = {"max_new_tokens": length, "ignore_eos": True, "temperature": 0.0}
    return dict(http_utils.post_sync(f"{engine.url}/generate", payload, timeout_s=120)["meta_info"])


def loaded(engine: SGLangEngine) -> set[str]:
    models = http_utils.get_sync(f"{engine.url}/v1/models", timeout_s=10)["data"]
    return {model["id"] for model in models if model.get("parent")}


def wait_until_loaded(engine: SGLangEngine, names: set[str]) -> None:
    deadline = time.monotonic() + 20
    while loaded(engine) != names:
        assert time.monotonic() < deadline, (loaded(engine), names)
        time.sleep(0.05)


def test_an_engine_answers_as_peft_does_and_each_answer_names_its_version(
    engine: SGLangEngine, updater: Callable[..., AdapterUpdater], tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    model = tiny_models[0]
    of_base = of_peft(model, None)
    by_memory = updater()
    for version in (1, 2):
        tensors = drawn(model, version)
        send(by_memory, tensors)
        expected = of_peft(model, tensors)
        assert gap(expected, of_base) > 100 * TOLERANCE
        assert gap(engine.prompt_log_probs(PROMPT), expected) <= TOLERANCE, "a request that names no adapter"
        assert gap(engine.prompt_log_probs(PROMPT, adapter=BASE), of_base) <= TOLERANCE
        assert generate(engine, PROMPT, 1)["weight_version"] == str(version) == engine.get_weight_version()
    wait_until_loaded(engine, {"slime-v2"})
    by_file = updater(update_weight_transport="disk", update_weight_disk_dir=str(tmp_path / "versions"))
    by_file.weight_version = 2
    send(by_file, drawn(model, 3))
    assert gap(engine.prompt_log_probs(PROMPT), of_peft(model, drawn(model, 3))) <= TOLERANCE
    assert not list((tmp_path / "versions").glob("weight_v*")), "a version leaves when the engines have it"


@pytest.mark.parametrize("kind", ["fp8", pytest.param("int4", marks=pytest.mark.slow)])
def test_over_a_quantised_base_an_engine_answers_as_peft_does_over_what_the_base_stands_for(
    kind: str,
    updater: Callable[..., AdapterUpdater],
    tiny_models: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trainer that was started from the quantised checkpoint has what it stands for as its base."""
    model, rooms = tmp_path / kind, {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": [*TARGETS]}
    convert, *rules = {
        "fp8": (convert_hf_to_fp8, "--block-size", "16"),
        "int4": (convert_hf_to_int4_direct, "--group-size", "16"),
    }[kind]
    assert convert.main(["--model-dir", str(tiny_models[0]), "--save-dir", str(model), *rules]) == 0
    base = unquantized_twin(model)
    plain = model.with_name(f"{kind}_plain")
    small = make_engine(model, tmp_path / "engine.log", **rooms, max_loras_per_batch=2, lora_backend="torch_native")
    small.start(deadline_s=170)
    try:
        ours = updater(plain, served=model)
        stored = quantize_bucket(list(base.state_dict().items()), format_of_checkpoint(model))
        monkeypatch.setattr(from_adapters, "iter_hf_buckets", lambda *_, **__: iter([stored]))
        ours.connect([small], engine_sizes=[1])
        for seed in (5, 6):
            tensors = drawn(plain, seed)
            send(ours, tensors)
            assert gap(small.prompt_log_probs(PROMPT), of_peft(plain, tensors)) <= TOLERANCE
        assert gap(small.prompt_log_probs(PROMPT, adapter=BASE), of_peft(plain, None)) <= TOLERANCE
        assert gap(of_peft(plain, None), of_peft(tiny_models[0], None)) > 100 * TOLERANCE, "the base was rounded"
    finally:
        small.shutdown()


def test_a_prefix_of_one_version_is_not_used_by_another(
    engine: SGLangEngine, updater: Callable[..., AdapterUpdater], tiny_models: tuple[Path, Path]
) -> None:
    ours, prompt = updater(), [random.Random(7).randrange(8, 100) for _ in range(64)]
    for version in (1, 2):
        send(ours, drawn(tiny_models[0], 10 + version))
        assert [generate(engine, prompt, 1)["cached_tokens"] for _ in range(2)] == [0, 63], version
    assert [generate(engine, prompt, 1, BASE)["cached_tokens"] for _ in range(2)] == [0, 63]


@pytest.mark.parametrize("num_versions", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_versions_come_and_go_beside_requests_in_flight(
    engine: SGLangEngine, updater: Callable[..., AdapterUpdater], tiny_models: tuple[Path, Path], num_versions: int
) -> None:
    """Paused requests go on with the version that they began with; what is not used any more leaves."""
    ours = updater(update_weights_in_flight=True)
    adapters = [drawn(tiny_models[0], seed) for seed in (20, 21)]
    send(ours, adapters[1])  # version 1
    alone = generate(engine, PROMPT, 150)["output_token_logprobs"]
    answers: list[dict[str, Any]] = []
    threads, memory = [], []
    for version in range(2, num_versions + 2):
        if len(threads) >= IN_FLIGHT:  # a slow machine would pile up more than it can answer within a request's limit
            threads[-IN_FLIGHT].join(60)
        thread = threading.Thread(target=lambda: answers.append(generate(engine, PROMPT, 150)), daemon=True)
        thread.start()
        threads.append(thread)
        time.sleep(0.05)
        send(ours, adapters[version % 2])
        memory.append(sum(child.memory_info().rss for child in psutil.Process(engine.pid).children(recursive=True)))
    for thread in threads:
        thread.join(60)
    assert len(answers) == num_versions, "no request waits for ever"
    versions = sorted(int(answer["weight_version"]) for answer in answers)
    assert versions == list(range(1, num_versions + 1)), "each keeps the version that it began with"
    for answer in answers:
        if int(answer["weight_version"]) % 2:
            assert [entry[1] for entry in answer["output_token_logprobs"]] == [entry[1] for entry in alone]
    wait_until_loaded(engine, {f"slime-v{num_versions + 1}"})
    half = len(memory) // 2
    assert memory[-1] < 1.1 * memory[half], "what has left takes no memory"


def test_an_engine_of_another_model_is_refused_at_the_first_sync(
    updater: Callable[..., AdapterUpdater], tiny_models: tuple[Path, Path], engine: SGLangEngine
) -> None:
    with pytest.raises(WeightSyncError, match="does not hold the weights"):
        updater(model=tiny_models[1]).update()
    engine.continue_generation()


def test_an_adapter_that_would_end_the_server_is_not_sent(
    updater: Callable[..., AdapterUpdater], tiny_models: tuple[Path, Path], engine: SGLangEngine
) -> None:
    whole = drawn(tiny_models[0], 30)
    without = {name: tensor for name, tensor in whole.items() if ".gate_proj." not in name}
    with pytest.raises(WeightSyncError, match="up_proj comes without gate_proj"):
        send(updater(), without)
    assert engine.health()


def test_a_truncated_file_and_damaged_tensors_are_refused_and_the_engine_lives(
    engine: SGLangEngine,
    updater: Callable[..., AdapterUpdater],
    tiny_models: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = from_adapters.write_adapter

    def write_half(tensors: Tensors, config: Any, directory: Path) -> None:
        write(tensors, config, directory)
        file = directory / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])

    by_file = updater(update_weight_transport="disk", update_weight_disk_dir=str(tmp_path / "versions"))
    monkeypatch.setattr(from_adapters, "write_adapter", write_half)
    with pytest.raises(WeightSyncError, match="adapter_model.safetensors has .* bytes instead of"):
        by_file.update()
    pack = from_adapters.adapter_tensors_of

    def damaged(*args: Any, **keywords: Any) -> Any:
        bodies, kept = pack(*args, **keywords)
        kept.zero_()
        return bodies, kept

    by_memory = updater()
    monkeypatch.setattr(from_adapters, "adapter_tensors_of", damaged)
    with pytest.raises(WeightSyncError, match="adapter sync MISMATCH"):
        by_memory.update()
    monkeypatch.setattr(from_adapters, "adapter_tensors_of", pack)
    send(by_memory, drawn(tiny_models[0], 40))
    assert generate(engine, PROMPT, 4)["weight_version"] == "1"


def test_a_request_that_is_refused_does_not_keep_its_version(
    engine: SGLangEngine, updater: Callable[..., AdapterUpdater], tiny_models: tuple[Path, Path]
) -> None:
    """SGLang counts it before it looks at its length; a version that is counted for ever would never leave."""
    ours = updater()
    send(ours, drawn(tiny_models[0], 50))
    with pytest.raises(Exception, match="400|longer"):
        generate(engine, [8] * 100_000, 4)
    send(ours, drawn(tiny_models[0], 51))
    wait_until_loaded(engine, {"slime-v2"})
    assert generate(engine, PROMPT, 4)["weight_version"] == "2"


def test_batches_and_several_answers_to_a_prompt_do_not_keep_their_version(
    engine: SGLangEngine, updater: Callable[..., AdapterUpdater], tiny_models: tuple[Path, Path]
) -> None:
    """SGLang counts n answers of a prompt n times, and ends n + 1 requests: one computes the prompt."""
    ours = updater()
    send(ours, drawn(tiny_models[0], 60))
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    of_batch = {"input_ids": [PROMPT, PROMPT[:8]], "sampling_params": sampling}
    several = {"input_ids": PROMPT, "sampling_params": sampling | {"n": 2}}
    for payload in (several, several | {"lora_path": "slime-v1"}, of_batch, of_batch | {"lora_path": BASE}):
        answers = http_utils.post_sync(f"{engine.url}/generate", payload, timeout_s=120)
        assert [answer["meta_info"]["weight_version"] for answer in answers] == ["1"] * 2
    send(ours, drawn(tiny_models[0], 61))
    wait_until_loaded(engine, {"slime-v2"})


def test_each_request_of_a_batch_gets_what_it_names(
    engine: SGLangEngine, updater: Callable[..., AdapterUpdater], tiny_models: tuple[Path, Path]
) -> None:
    """A batch may name a version, the base, and nothing, which stands for the newest version."""
    ours = updater()
    send(ours, drawn(tiny_models[0], 70))
    wait_until_loaded(engine, {"slime-v1"})
    expected = [engine.prompt_log_probs(PROMPT, adapter=name) for name in (None, BASE, "slime-v1")]
    assert gap(expected[0], expected[1]) > 100 * TOLERANCE
    batch: dict[str, Any] = {"input_ids": [PROMPT] * 3, "lora_path": [None, BASE, "slime-v1"], "logprob_start_len": 0}
    batch |= {"return_logprob": True, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    answers = http_utils.post_sync(f"{engine.url}/generate", batch, timeout_s=120)
    for answer, alone in zip(answers, expected, strict=True):
        assert gap([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]], alone) <= TOLERANCE
    prompts = [[number] * (20 + number) for number in range(10, 16)]  # none is cached, so each has many rows
    names = [None, BASE] * 3
    batch |= {"input_ids": prompts, "lora_path": names, "logprob_start_len": -1}
    answers = http_utils.post_sync(f"{engine.url}/generate", batch, timeout_s=120)
    for prompt, name, answer in zip(prompts, names, answers, strict=True):
        [(in_batch, token, _)] = answer["meta_info"]["output_token_logprobs"]
        [(alone_, chosen, _)] = generate(engine, prompt, 1, name)["output_token_logprobs"]
        assert chosen == token and in_batch == pytest.approx(alone_, abs=TOLERANCE), "its last row, by its adapter"
    send(ours, drawn(tiny_models[0], 71))
    wait_until_loaded(engine, {"slime-v2"})


def test_eight_policies_are_served_together_and_each_version_of_each_comes_and_goes(
    engine: SGLangEngine,
    updater: Callable[..., AdapterUpdater],
    tiny_models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than the engine has places for (4, of which the base takes one): the rest wait, and all are answered."""
    model, policies = tiny_models[0], [LoraPolicy(name=f"policy_{number}", lr=number) for number in range(8)]
    ours = updater()
    ours.args = Args.of(vars(ours.args))
    ours.policies = lambda: iter(policies)
    names = [live_name(policy.name) for policy in policies]
    for version in (1, 2):
        tensors = {policy.lr: drawn(model, 100 * version + int(policy.lr or 0)) for policy in policies}
        turns = iter(tensors.values())
        monkeypatch.setattr(from_adapters, "adapter_tensors", lambda _, turns=turns: next(turns))
        ours.update()
        batch: dict[str, Any] = {"input_ids": [PROMPT] * 9, "lora_path": [*names, BASE], "logprob_start_len": 0}
        batch |= {"return_logprob": True, "sampling_params": {"max_new_tokens": 1}}
        answers = [
            answer["meta_info"] for answer in http_utils.post_sync(f"{engine.url}/generate", batch, timeout_s=120)
        ]
        served = [[entry[0] for entry in answer["input_token_logprobs"][1:]] for answer in answers]
        assert [answer["weight_version"] for answer in answers] == [str(version)] * 9
        for number in (0, 3, 7):
            assert gap(served[number], of_peft(model, tensors[number])) <= TOLERANCE
        assert gap(served[8], of_peft(model, None)) <= TOLERANCE
        assert min(gap(served[a], served[b]) for a in range(9) for b in range(a)) > 10 * TOLERANCE, "each its own"
    wait_until_loaded(engine, {f"slime-v2@{policy.name}" for policy in policies} | {newest(engine)})


def newest(engine: SGLangEngine) -> str:
    """The adapter without a policy that an earlier test has left."""
    return next(name for name in loaded(engine) if "@" not in name)


@pytest.mark.slow
def test_ranks_of_an_engine_each_take_their_share_of_an_adapter(
    updater: Callable[..., AdapterUpdater], tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    rooms = {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": [*TARGETS], "max_loras_per_batch": 4}
    cut = make_engine(tiny_models[0], tmp_path / "engine.log", **rooms, lora_backend="torch_native", num_gpus=2)
    cut.start(deadline_s=300)
    try:
        ours, tensors = updater(), drawn(tiny_models[0], 80)
        ours.connect([cut], engine_sizes=[2])
        send(ours, tensors)
        assert gap(cut.prompt_log_probs(PROMPT), of_peft(tiny_models[0], tensors)) <= TOLERANCE
        assert gap(cut.prompt_log_probs(PROMPT, adapter=BASE), of_peft(tiny_models[0], None)) <= TOLERANCE
    finally:
        cut.shutdown()


@pytest.mark.slow
def test_an_engine_killed_at_a_sync_is_named_and_others_get_the_version_afterwards(
    engine: SGLangEngine,
    updater: Callable[..., AdapterUpdater],
    tiny_models: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rooms = {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": [*TARGETS], "max_loras_per_batch": 4}
    lost = make_engine(tiny_models[0], tmp_path / "engine.log", **rooms, lora_backend="torch_native")
    lost.start(deadline_s=170)
    ours, pack = updater(), from_adapters.adapter_tensors_of
    ours.connect([engine, lost], engine_sizes=[1, 1])
    send(ours, drawn(tiny_models[0], 90))

    def killed(*args: Any, **keywords: Any) -> Any:
        monkeypatch.setattr(from_adapters, "adapter_tensors_of", pack)
        psutil.Process(lost.pid).kill()
        return pack(*args, **keywords)

    monkeypatch.setattr(from_adapters, "adapter_tensors_of", killed)
    try:
        with pytest.raises(WeightSyncError, match=re.escape(lost.url)):
            send(ours, drawn(tiny_models[0], 91))
    finally:
        lost.shutdown()
    assert ours.weight_version == 1, "the next call sends the same version"
    ours.connect([engine], engine_sizes=[1])
    send(ours, drawn(tiny_models[0], 91))
    assert generate(engine, PROMPT, 4)["weight_version"] == "2"
    assert gap(engine.prompt_log_probs(PROMPT), of_peft(tiny_models[0], drawn(tiny_models[0], 91))) <= TOLERANCE
