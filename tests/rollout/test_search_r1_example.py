"""examples/search-r1: searches are made and masked, rewards are Search-R1's, and its data, server and scripts fit."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from argparse import Namespace

import aiohttp
import pytest
import yaml
from aiohttp import web

from slime.config.parse import CommandLine
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.types import Sample
from tests.rollout.example_fakes import load_example, play, trained_text
from tests.unit.rollout_fakes import serve
from tests.unit.script_fakes import ROOT, run_script, script_flags
from tools.make_tiny_model import build_tokenizer

FOLDER = "search-r1"
gen = load_example(FOLDER, "generate_with_search")
em = load_example(FOLDER, "qa_em_format")
google = load_example(FOLDER, "google_search_server")
data = load_example(FOLDER, "make_data", own_name="search_r1_make_data")
server = load_example(f"{FOLDER}/local_dense_retriever", "retrieval_server")
Status = Sample.Status
CORPUS = [
    {"id": "0", "contents": '"Anna"\nAnna lives in Kelo'},
    {"id": "1", "contents": '"Kelo"\nKelo lies on the Suta'},
    {"id": "2", "contents": '"Miru"\nMiru lies on the Tavo'},
]
ANNA = "\n\n<information>Doc 1(Title: Anna) Anna lives in Kelo\n</information>\n\n"
KELO = "\n\n<information>Doc 1(Title: Kelo) Kelo lies on the Suta\n</information>\n\n"


@pytest.fixture(scope="module")
def url():
    retriever = server.BM25Retriever([document["contents"] for document in CORPUS])
    with serve(server.make_app(retriever, CORPUS, topk=3)) as port:
        yield f"http://127.0.0.1:{port}/retrieve"


def new_sample() -> Sample:
    prompt = "e.g. <answer>a</answer> river of Anna?"
    return Sample(index=3, group_index=1, prompt=prompt, label={"ground_truth": {"target": ["the Suta"]}})


def settings(url: str, **more) -> dict:
    return {"search_r1": {"topk": 1, "max_turns": 4, "local": {"search_url": url}, **more}}


def stop(text: str) -> tuple[str, str]:
    return text, "stop"


TURNS = ["<search>Anna</search>", "<search>Kelo</search>", "<answer>Suta</answer>"]


def test_trained_is_what_the_engine_wrote_and_nothing_that_a_search_found(monkeypatch, url):
    sample, model = play(monkeypatch, gen.generate, new_sample(), list(map(stop, TURNS)), custom=settings(url))
    assert sample.response == TURNS[0] + ANNA + TURNS[1] + KELO + TURNS[2]
    assert trained_text(model.tokenizer, sample) == "".join(TURNS)
    assert [lp != 0 for lp in sample.rollout_log_probs] == [bit == 1 for bit in sample.loss_mask]
    ids = [request["input_ids"] for request in model.requests]
    assert sample.tokens[: len(ids[1])] == ids[1] and sample.tokens[: len(ids[2])] == ids[2]
    assert model.seen(1) == sample.prompt + TURNS[0] + ANNA
    assert all(request["sampling_params"]["stop"] == gen.STOPS for request in model.requests)
    assert (sample.status, sample.end_reason, sample.reward_is_trusted) == (Status.COMPLETED, "done", True)
    assert [sample.metadata[key] for key in ("round_number", "tool_calls", "tool_errors")] == [3, 2, 0]
    assert sample.non_generation_time > 0
    assert asyncio.run(gen.reward_func(Namespace(), sample)) == 1.0


def test_each_turn_has_the_whole_limit_of_tokens_and_the_context_bounds_the_sample(monkeypatch, url):
    replies = list(map(stop, TURNS))
    _, model = play(
        monkeypatch, gen.generate, new_sample(), replies, custom=settings(url), rollout_max_response_len=50
    )
    assert [request["sampling_params"]["max_new_tokens"] for request in model.requests] == [50, 50, 50]
    context = len(model.requests[1]["input_ids"]) + 2
    sample, model = play(
        monkeypatch, gen.generate, new_sample(), replies, custom=settings(url), rollout_max_context_len=context
    )
    assert len(sample.tokens) == context and model.requests[1]["sampling_params"]["max_new_tokens"] == 2
    assert (sample.status, sample.end_reason) == (Status.TRUNCATED, "length")


def test_a_search_service_that_is_down_gives_no_empty_answer_but_an_untrusted_reward(monkeypatch):
    down = settings("http://127.0.0.1:9/retrieve", search_timeout_s=0.3)
    sample, model = play(monkeypatch, gen.generate, new_sample(), [stop(TURNS[0])], custom=down)
    assert (sample.end_reason, sample.reward_is_trusted) == ("env_error", False)
    assert sample.response == TURNS[0] and len(model.requests) == 1


@pytest.mark.parametrize("answer", [{}, {"result": []}, {"result": [[{"id": "0"}]]}, []])
def test_an_answer_without_a_result_is_an_error_of_the_service(answer):
    async def reply(request: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/retrieve", reply)

    async def ask(url: str) -> None:
        with pytest.raises(gen.SearchError, match="has no result"):
            await gen.local_search(url, "x")

    with serve(app) as port:
        asyncio.run(ask(f"http://127.0.0.1:{port}/retrieve"))


def test_a_turn_without_an_action_is_told_how_to_act_and_the_last_turn_is_the_last(monkeypatch, url):
    replies = [stop("hm"), stop(TURNS[0]), stop(TURNS[1])]
    sample, model = play(monkeypatch, gen.generate, new_sample(), replies, custom=settings(url, max_turns=3))
    assert model.seen(1).endswith("hm" + gen.HINT)
    assert sample.response == "hm" + gen.HINT + TURNS[0] + ANNA + TURNS[1], "no search that nobody will read"
    assert (sample.status, sample.end_reason) == (Status.TRUNCATED, "max_turns")
    assert [sample.metadata[key] for key in ("round_number", "tool_calls", "tool_errors")] == [3, 1, 1]


def test_an_aborted_sample_goes_on_in_the_middle_of_its_turn(monkeypatch, url):
    replies = [stop(TURNS[0]), ("<search>Ke", "abort")]
    sample, _ = play(monkeypatch, gen.generate, new_sample(), replies, custom=settings(url))
    assert (sample.status, sample.response) == (Status.ABORTED, TURNS[0] + ANNA + "<search>Ke")
    sample.status = Status.PENDING
    replies = [stop("lo</search>"), stop(TURNS[2])]
    sample, model = play(monkeypatch, gen.generate, sample, replies, custom=settings(url), rollout_max_response_len=50)
    assert sample.response == TURNS[0] + ANNA + TURNS[1] + KELO + TURNS[2]
    assert trained_text(model.tokenizer, sample) == "".join(TURNS)
    had = len(model.tokenizer.encode("<search>Ke", add_special_tokens=False))
    assert [request["sampling_params"]["max_new_tokens"] for request in model.requests] == [50 - had, 50]
    assert sample.metadata["round_number"] == 3


def test_a_rollout_that_ends_keeps_what_was_found(monkeypatch, url):
    def end(state) -> None:
        state.aborted = True

    sample, _ = play(monkeypatch, gen.generate, new_sample(), [stop(TURNS[0])], before=end, custom=settings(url))
    assert (sample.status, sample.response) == (Status.ABORTED, TURNS[0] + ANNA)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"top_k": 1}, "'top_k' is unknown"),
        ({"max_turns": "two"}, "max_turns is two, of another kind than the default 2"),
        ({"search_concurrency": 0}, "search_concurrency is 0"),
        ({"local": {"url": "x"}}, "search_r1: local in --custom-config-path: 'url' is unknown"),
        ({"search_backend": "bing"}, "search_backend 'bing' is neither local nor google"),
        ({"search_backend": "google"}, "google needs its api_key"),
        ([], "search_r1 in --custom-config-path must be a mapping"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_the_run(settings, said):
    (problem,) = gen.generate.check_args(Namespace(search_r1=settings))
    assert said in problem


def test_settings_stay_as_they_are_where_the_run_says_nothing():
    assert not list(gen.generate.check_args(Namespace()))
    assert gen.config_of(Namespace())["local"]["search_url"] == "http://127.0.0.1:8000/retrieve"


@pytest.mark.parametrize(
    ("written", "reward"),
    [
        ("<answer>The suta!</answer>", 1.0),
        ("<answer>Suta</answer><answer>Tavo</answer>", 0.0),
        ("<answer>Tavo</answer><answer> a  SUTA </answer>", 1.0),
        ("<answer>Suta river</answer>", 0.0),
        ("Suta", 0.0),
    ],
)
def test_the_last_of_two_or_more_answers_must_match_exactly(written, reward):
    prompt = "e.g. <answer>Suta</answer>?"
    assert em.compute_score_em(prompt + written, {"target": ["Suta", "Xiru"]}) == reward
    assert em.compute_score_em("?" + written.split("</answer>")[0], {"target": "Suta"}) == 0, "one tag is the prompt's"


THINK, FIND = "<think>so</think>", "<search>x</search>\n<information>it is Suta</information>\n"


@pytest.mark.parametrize(
    ("written", "reward"),
    [
        (f"{THINK}<answer>Suta</answer>", 1.0),
        (f"{THINK} {FIND}{THINK}<answer>Suta</answer><|im_end|>", 1.0),
        ("<answer>Suta</answer>", 1 - 0.2),
        (f"{THINK}and<answer>Suta</answer>", 1 - 0.2),
        (f"{THINK}{FIND}<answer>Suta</answer>", 1 - 0.2),
        (f"{THINK}<answer>Tavo</answer>", 0.2),
        (f"{THINK}{FIND}{THINK}<answer>Tavo</answer>", 0.2 + 0.1),
        (f"{FIND}<answer>Tavo</answer>", 0.05),
        (f"{THINK}{FIND}", 0.0),
    ],
)
def test_forms_and_finds_count_where_they_are_given_scores(written, reward):
    text = f"<answer>a</answer><|im_end|>\n<|im_start|>assistant\n{written}"
    scores = {"structure_format_score": 0.2, "final_format_score": 0.05, "retrieval_score": 0.1}
    assert em.compute_score_em(text, {"target": ["Suta"]}, **scores) == pytest.approx(reward)


def test_a_label_of_another_form_is_named():
    with pytest.raises(ValueError, match="the label must be .* not 'Suta'"):
        asyncio.run(gen.reward_func(Namespace(), Sample(label="Suta")))


def post(url: str, body) -> tuple[int, dict]:
    async def send():
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            return answer.status, await answer.json()

    return asyncio.run(send())


def test_the_server_answers_several_queries_with_and_without_scores(url):
    queries = {"queries": ["anna", "miru"], "topk": 1}
    assert post(url, queries) == (200, {"result": [[CORPUS[0]], [CORPUS[2]]]})
    _, scored = post(url, queries | {"return_scores": True})
    assert [hits[0]["document"] for hits in scored["result"]] == [CORPUS[0], CORPUS[2]]
    assert all(hits[0]["score"] > 0 for hits in scored["result"])
    _, many = post(url, {"queries": ["Kelo", "nothing known"], "topk": None})
    assert [len(hits) for hits in many["result"]] == [2, 0] and many["result"][0][0] == CORPUS[1]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "JSON object"),
        ({"queries": "x"}, "list of texts"),
        ({"queries": []}, "0 queries"),
        ({"queries": ["x"], "topk": 0}, "topk"),
        ({"queries": ["x"], "topk": 101}, "topk"),
    ],
)
def test_the_server_says_what_is_wrong_with_a_request(url, body, said):
    status, answer = post(url, body)
    assert status == 400 and said in answer["error"]


def test_a_dense_index_finds_documents_by_the_vectors_of_the_encoder(tmp_path):
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is optional")
    texts = [document["contents"] for document in CORPUS]
    model = tiny_encoder(tmp_path / "encoder", texts)
    # The index is made of vectors of queries, so each text is nearest to itself.
    index = faiss.IndexFlatIP(16)
    faiss.write_index(index, str(tmp_path / "empty.index"))
    encode = server.DenseRetriever(tmp_path / "empty.index", str(model), on_gpu=False).encode
    index.add(encode(texts))
    faiss.write_index(index, str(tmp_path / "e5.index"))
    dense = server.DenseRetriever(tmp_path / "e5.index", str(model), on_gpu=False)
    for row, found in enumerate(dense.find(texts, 2)):
        assert [len(found), found[0][0]] == [2, row] and found[0][1] == pytest.approx(1.0, abs=1e-5)
        assert found[1][1] < found[0][1]
    with serve(server.make_app(dense, CORPUS, topk=3)) as port:
        status, answer = post(f"http://127.0.0.1:{port}/retrieve", {"queries": texts[1:2], "topk": 1})
    assert (status, answer) == (200, {"result": [[CORPUS[1]]]})


def tiny_encoder(path, texts):
    """A BERT with random weights and a token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.bert import BertConfig, BertModel

    words = dict.fromkeys(" ".join(["query", ":", *texts]).replace('"', ' " ').split())
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(path)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(vocabulary), **shape)).save_pretrained(path)
    return path


def test_google_results_are_read_as_documents():
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json(), request.headers["X-API-KEY"]))
        return web.json_response({"organic": [{"title": "T", "snippet": "s"}, {"title": "U"}]})

    app = web.Application()
    app.router.add_post("/search", answer)

    async def search(url: str):
        return await google.google_search("key", "who?", 2, url=url)

    with serve(app) as port:
        hits = asyncio.run(search(f"http://127.0.0.1:{port}/search"))
    assert [hit["document"]["contents"] for hit in hits] == ['"T"\ns', '"U"\nNo snippet available.']
    assert asked == [({"q": "who?", "num": 2, "gl": "us", "hl": "en"}, "key")]
    with pytest.raises(ValueError, match="api_key"):
        asyncio.run(google.google_search("", "who?"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    output = tmp_path_factory.mktemp("data")
    data.write_data(data.build_parser().parse_args(["--output", str(output), "--num-demonstrations", "400"]))
    return output


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_searches_by_name_find_the_label_of_every_question(files):
    documents = server.read_corpus(files / "corpus.jsonl")
    retriever = server.BM25Retriever([document["contents"] for document in documents])

    def find(names: list[str]) -> list[str]:
        hits = [found[0][0] for found in retriever.find(names, 1)]
        assert [documents[hit]["contents"].split('"')[1] for hit in hits] == names
        return [documents[hit]["contents"].split()[-1] for hit in hits]

    asked = [*rows(files / "train.jsonl"), *rows(files / "eval.jsonl")]
    people = [row["prompt"][0]["content"].split()[-1].rstrip("?") for row in asked]
    rivers = find(find(people))
    assert [[river] for river in rivers] == [row["reward_model"]["ground_truth"]["target"] for row in asked]
    assert len(set(people)) == len(people) == data.NUM_PEOPLE


def test_half_of_the_demonstrations_search_rightly_and_look_as_a_rollout_does(files):
    right = 0
    for row in rows(files / "sft.jsonl"):
        question, response = (message["content"] for message in row["messages"])
        person = question.split()[-1].rstrip("?")
        searches, answer = gen._ACTION.findall(response)[:-1], gen._ACTION.findall(response)[-1][1]
        found = response.rpartition("lies on ")[2].split("\n")[0] if "lies on" in response else None
        right += searches[0][1] == person and answer == found
    assert right / 400 == pytest.approx(0.5, abs=0.1)
    assert data.searched("Anna", " lives in Kelo") == TURNS[0] + ANNA


def test_a_turn_of_a_demonstration_fits_its_limit():
    tokenizer = build_tokenizer(data.PIECES)
    assert len(tokenizer) <= 256, "the vocabulary of the tiny model"
    text = data.searched("mozo", " lives in lubi") + "<answer>vasi</answer>"
    _, mask = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask([{"role": "assistant", "content": text}])
    turn = tokenizer.encode("<search>mozo</search>", add_special_tokens=False)
    assert len(turn) == 4 < data.MAX_TURN_TOKENS and sum(mask) < 40


def test_the_files_of_flags_name_what_there_is(files):
    assert gen.config_of(Namespace(**yaml.safe_load((files / "search.yaml").read_text())))["topk"] == 1
    (dataset,) = yaml.safe_load((files / "eval.yaml").read_text())["eval"]["datasets"]
    assert dataset["custom_rm_path"] == "generate_with_search.reward_func" and os.path.isfile(dataset["path"])


def test_the_run_for_gpus_has_flags_that_fit_each_other(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / FOLDER))
    name = f"../examples/{FOLDER}/run_qwen2.5_3B"
    flags, _ = run_script(tmp_path, name, "--dry-run", SLIME_HOME=str(tmp_path))
    model = script_flags("qwen2.5-3B")
    assert flags[: len(model)] == model
    checked = CommandLine().check(flags)
    assert (checked.problems.wrong, checked.problems.unsupported, checked.warnings()) == ([], [], [])
    assert checked.args.custom_generate_function_path == "generate_with_search.generate"


def test_the_tiny_run_refuses_a_number_of_steps_that_it_cannot_make(tmp_path):
    environment = {**os.environ, "OUTPUT": str(tmp_path / "out"), "SFT_STEPS": "15"}
    command = ["bash", f"examples/{FOLDER}/run-tiny.sh"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "SFT_STEPS=15" in done.stderr and not (tmp_path / "out").exists()
