"""The reader test: questions in a user's words find their page among the first three hits of the site's own search."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.test_docs_site import build_site

SCRIPTS = ("documentation_options", "doctools", "sphinx_highlight", "searchtools", "language_data", "keywords", "rank")
# Question -> pages that answer it, any of which may be found.
QUESTIONS = {
    "how do I install it": "install",
    "how do I run it without a GPU": "quick_start",
    "how do I write my own reward function": "start/own_reward customization",
    "how do I use my own dataset": "start/own_data data",
    "how do I write a custom generate function": "start/own_generate customization",
    "how do I resume a run after a crash": "resume",
    "my job was preempted, how do I continue": "resume",
    "how do I log my own metric": "customization",
    "how do I log to wandb": "trackers",
    "how do I mask tool tokens": "multi_turn",
    "how do I use my own model": "adding_a_family faq start/own_data",
    "why is my reward flat": "troubleshooting",
    "what does rollout/zero_std mean": "metrics_in_words",
    "entropy collapses to zero": "troubleshooting",
    "responses get longer and longer": "troubleshooting",
    "out of memory in the train step": "cut_memory memory_errors troubleshooting",
    "the run hangs": "stalls troubleshooting",
    "generation is slow": "tune_throughput",
    "which learning rate should I use": "choosing",
    "how many samples per prompt": "choosing",
    "do I need a KL penalty": "choosing algorithms",
    "how do I fine-tune on demonstrations": "sft",
    "how do I evaluate a checkpoint": "evaluation",
    "train with LoRA adapters": "lora",
    "how do I run on several machines": "multi_node",
    "slurm": "multi_node",
    "kubernetes": "multi_node",
    "train an agent that speaks the OpenAI API": "agents",
    "run untrusted code of the model safely": "sandbox",
    "use an LLM as a judge": "rewards",
    "convert a checkpoint to Hugging Face": "conversion",
    "what happens when an engine dies": "fault_tolerance",
    "the disk is full": "checkpoints",
    "how old may tokens be in async training": "async",
    "difference between trainer and engine log-probs": "off_policy metrics_in_words troubleshooting",
    "cluster without internet": "offline_cluster",
    "move from verl": "migration",
    "can I combine LoRA and pipeline parallelism": "reference/compatibility",
    "where are the log files": "reference/files",
    "same numbers in every run": "determinism",
    "add a new algorithm": "adding_an_estimator",
    "PPO critic": "ppo start/ppo_and_async",
    "mixture of experts routing": "moe",
    "what does exit status 2 mean": "reference/exit_codes",
    "profile a train step": "profiling",
    "can I train a vision language model": "data faq model_families",
    "how do I freeze some layers": "training_options customization lora",
    "deploy the trained model with vLLM": "conversion",
    "compare two runs": "dashboard faq",
    "speculative decoding": "engines",
    "spot instances": "resume fault_tolerance",
    "port already in use": "engines multi_node install",
    "async makes the reward worse": "off_policy async troubleshooting",
    "samples are thrown away": "data troubleshooting metrics_in_words",
    "is my machine set up correctly": "install",
    "early stopping": "evaluation faq",
    "the GPU is idle": "tune_throughput performance alarms profiling",
    "how long does training take": "quick_start tune_throughput performance/scaling performance",
    "can I train a 70B model on 8 GPUs": "cut_memory parallelism start/several_gpus plan_memory",
    "my loss is NaN": "troubleshooting debugging",
    "the loss is always zero": "quick_start faq metrics_in_words troubleshooting",
    "where do my checkpoints go": "reference/files checkpoints",
    "how do I continue training from a saved checkpoint": "resume checkpoints",
    "change the learning rate when resuming": "resume training_options choosing",
    "the model repeats itself": "troubleshooting metrics_in_words",
    "reward hacking": "troubleshooting rewards",
    "the model does not stop generating": "troubleshooting",
    "my reward function is slow": "tune_throughput rewards reward_services troubleshooting",
    "call an external API in the reward": "reward_services rewards start/own_reward",
    "give a system prompt": "data start/own_data",
    "turn off thinking": "data multi_turn",
    "train on chat conversations": "sft",
    "what does |t-e| mean": "quick_start metrics_in_words debugging",
    "what is a rollout": "glossary",
    "difference between rollout batch size and global batch size": "choosing glossary",
    "run two experiments on one machine": "multi_node faq install engines security resume",
    "how much does it cost in GPU memory": "cut_memory plan_memory parallelism",
    "which CUDA version do I need": "install",
    "does it work on a Mac": "install quick_start faq",
    "use only some of my GPUs": "start/several_gpus disaggregated install parallelism faq",
    "connect to the dashboard over ssh": "dashboard",
    "export metrics to a CSV": "dashboard",
    "get an email or slack message when a run fails": "alarms trackers faq",
    "why was my sample masked": "rewards multi_turn customization",
    "train without a reward model": "rewards start/own_reward",
    "train a reward model": "rewards reward_services faq",
    "DPO": "algorithms faq",
    "curriculum learning": "data customization",
    "different temperature for evaluation": "evaluation",
    "stop the run when the model is good enough": "evaluation own_driver faq",
    "Ray dashboard": "install security multi_node",
    "port is blocked by a firewall": "network multi_node",
    "S3 or cloud storage for checkpoints": "checkpoints weight_sync_files faq offline_cluster",
    "the run was killed by the system": "memory_errors troubleshooting fault_tolerance reference/exit_codes",
    "test my generate function without a GPU": "customization start/own_generate",
    "how do I contribute": "CONTRIBUTING",
    "unit test my reward": "start/own_reward",
    "print the prompt that the model sees": "start/own_data command_line",
    "what changed between versions": "CHANGELOG",
}


@pytest.fixture(scope="module")
def hits(tmp_path_factory) -> dict[str, list[str]]:
    """Question -> pages that the built site's search lists, best first; asked in a browser that has no network."""
    browser = shutil.which("chromium")
    if browser is None:
        assert not os.environ.get("SLIME_REQUIRE_BROWSER"), "chromium is missing"
        pytest.skip("chromium is not installed")
    site = build_site()
    page = site / "reader_test.html"
    loads = [f'<script src="_static/{name}.js"></script>' for name in SCRIPTS]
    ask = f"""<script>addEventListener("load", () => {{ const found = {{}};
        for (const question of {json.dumps(list(QUESTIONS))})
            found[question] = Search._performSearch(...Search._parseQuery(question)).reverse().map((hit) => hit[0]);
        document.getElementById("found").textContent = JSON.stringify(found); }});</script>"""
    page.write_text(
        '<!doctype html><html data-content_root="./"><body><div id="search-progress"></div><pre id="found"></pre>'
        + "".join([*loads, '<script src="searchindex.js"></script>', ask])
        + "</body></html>"
    )
    profile = tmp_path_factory.mktemp("browser")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    try:
        done = subprocess.run(
            [*command, "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", page.as_uri()],
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        page.unlink()
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_finds_its_page_among_the_first_three_hits(hits: dict[str, list[str]], question: str) -> None:
    wanted = {page if page.isupper() else f"docs/{page}" for page in QUESTIONS[question].split()}
    assert wanted & set(hits[question][:3]), hits[question][:6]


def test_every_page_with_keywords_exists() -> None:
    root = Path(__file__).parents[2]
    named = re.findall(r'^  "([^"]+)":', (root / "docs/search/keywords.js").read_text(), re.MULTILINE)
    assert named and not [name for name in named if not (root / f"{name}.md").is_file()]
