"""Prompt files: larger than memory, sliced, shuffled, with images; and data sources without a file."""

from __future__ import annotations

import base64
import io
import json
import random
import subprocess
import sys
import threading

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from slime.rollout import data_source
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState
from slime.utils import async_utils, data
from slime.utils.data import Dataset, check_data_file, read_file
from slime.utils.errors import UsageError
from slime.utils.processing_utils import encode_image_for_rollout_engine, open_image, process_vision_info
from slime.utils.types import Sample
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args

ROWS = [{"input": f"prompt {i}", "label": str(i), "metadata": {"i": i}} for i in range(40)]


@pytest.fixture(params=["jsonl", "parquet"])
def path(tmp_path, request):
    file = tmp_path / f"rows.{request.param}"
    if request.param == "jsonl":
        file.write_text("\n".join(json.dumps(row) + "\n" for row in ROWS))  # every second line is blank
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file, row_group_size=7)
    return str(file)


@pytest.fixture
def unheld(monkeypatch):
    """Every file counts as too large for memory."""
    monkeypatch.setattr(data, "HELD_BYTES", 0)


def dataset(path, **options):
    options = {"prompt_key": "input", "label_key": "label", **options}
    return Dataset(path, LetterTokenizer(), None, options.pop("max_length", None), **options)


def both(monkeypatch, path, **options):
    """The data set as it is held, and as it is read row by row."""
    held = dataset(path, **options)
    monkeypatch.setattr(data, "HELD_BYTES", 0)
    return held, dataset(path, **options)


SLICES = {
    "": slice(None),
    "@[3:9]": slice(3, 9),
    "@[-5:]": slice(-5, None),
    "@[:-35]": slice(None, -35),
    "@[-9:-2]": slice(-9, -2),
    "@[30:99]": slice(30, 99),
    "@[2:-30]": slice(2, -30),
}


@pytest.mark.parametrize(("suffix", "rows"), SLICES.items())
def test_a_file_that_is_not_held_gives_the_same_samples(monkeypatch, path, suffix, rows):
    held, read = both(monkeypatch, path + suffix)
    assert isinstance(held.origin_samples, list) and not isinstance(read.origin_samples, list)
    assert list(read.samples) == list(held.samples)
    assert [s.metadata["i"] for s in held.samples] == list(range(40))[rows]
    assert len(read) == len(held) == check_data_file(path + suffix, prompt_key="input")


@pytest.mark.parametrize("truncation", ["drop", "left", "right", "middle"])
def test_long_prompts_are_dropped_or_cut_in_a_file_that_is_not_held(monkeypatch, path, truncation):
    held, read = both(monkeypatch, path, max_length=len("prompt 1"), truncation=truncation)
    assert list(read.samples) == list(held.samples)
    assert len(read) == (10 if truncation == "drop" else 40)


def test_a_shuffle_is_the_same_permutation_of_indices_whether_the_file_is_held_or_not(monkeypatch, path):
    held, read = both(monkeypatch, path)
    for epoch in (0, 1):
        order = list(range(40))
        random.Random(42 + epoch).shuffle(order)
        for one in (held, read):
            one.shuffle(epoch)
            assert [s.metadata["i"] for s in one.samples] == order
            assert one[3].metadata["i"] == order[3] and one[-1].metadata["i"] == order[-1]


def test_an_empty_slice_and_an_index_beyond_the_end_are_errors(unheld, path):
    with pytest.raises(UsageError, match="has no rows"):
        dataset(path + "@[5:5]")
    with pytest.raises(IndexError):
        dataset(path)[40]
    assert [s.metadata["i"] for s in dataset(path).samples[38:]] == [38, 39]


def test_malformed_lines_of_a_file_that_is_not_held_are_skipped_or_named(unheld, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "a"}\n{\n\n{"input": "b"}\n[1]\n{"input": "c"}')
    with pytest.raises(UsageError, match="rows.jsonl:2: not valid JSON"):
        dataset(str(file), label_key=None)
    for suffix, expected in {"": "abc", "@[-2:]": "bc", "@[:-1]": "ab"}.items():
        read = dataset(str(file) + suffix, label_key=None, skip_malformed=True)
        assert "".join(s.prompt for s in read.samples) == expected
        assert "".join(row["input"] for row in read_file(str(file) + suffix, [])) == expected


def test_rows_are_read_by_many_threads_at_once(unheld, path):
    read = dataset(path)
    wrong = []

    def look(seed):
        for i in random.Random(seed).choices(range(40), k=300):
            if read[i].metadata["i"] != i:
                wrong.append(i)

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


MEASURE = """
import resource, sys
sys.path.insert(0, ".")
from slime.utils.data import Dataset
from tests.unit.rollout_fakes import LetterTokenizer
import pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = Dataset(sys.argv[1], LetterTokenizer(), None, None, prompt_key="input")
data.shuffle(0)
seen = {data[i].metadata["i"] for i in range(0, len(data), 97)}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, len(data), len(seen))
"""


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_memory_stays_far_below_the_size_of_a_large_file(tmp_path, kind):
    num_rows, filling = 16000, "x" * 10000  # 160 MB
    file = tmp_path / f"large.{kind}"
    if kind == "jsonl":
        with file.open("w") as out:
            for i in range(num_rows):
                out.write(json.dumps({"input": f"{i} {filling}", "metadata": {"i": i}}) + "\n")
    else:
        schema = pyarrow.schema({"input": pyarrow.string(), "metadata": pyarrow.struct({"i": pyarrow.int64()})})
        with pyarrow.parquet.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
            for start in range(0, num_rows, 1000):
                rows = [{"input": f"{i} {filling}", "metadata": {"i": i}} for i in range(start, start + 1000)]
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    done = subprocess.run([sys.executable, "-c", MEASURE, str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    grown_kib, length, seen = map(int, done.stdout.split())
    assert (length, seen) == (num_rows, len(range(0, num_rows, 97)))
    assert grown_kib < 80 * 1024, f"grew by {grown_kib / 1024:.0f} MiB over a file of 153 MiB"


# ---- images


def picture(color):
    return Image.new("RGB", (4, 2), color)


def png(color):
    buffer = io.BytesIO()
    picture(color).save(buffer, format="PNG")
    return buffer.getvalue()


class FakeProcessor:
    """Puts one token 7 per image before the text's letters, and pixel values aside."""

    def __call__(self, text, images=None, return_tensors=None):
        assert return_tensors == "pt"
        ids = [7] * len(images or []) + [ord(letter) for letter in text]
        pixels = [image.getpixel((0, 0)) for image in images]
        return {"input_ids": [ids], "attention_mask": [[1] * len(ids)], "pixel_values": pixels}


@pytest.fixture
def picture_rows(tmp_path):
    """A row with a path and bytes between text, and a row whose message has parts."""
    (tmp_path / "red.png").write_bytes(png("red"))
    uri = "data:image/png;base64," + base64.b64encode(png("blue")).decode()
    rows = [
        {"input": "<image>or <image>?", "pictures": [str(tmp_path / "red.png"), uri]},
        {"input": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], "pictures": uri},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


class PartsTokenizer(LetterTokenizer):
    def apply_chat_template(self, messages, **kwargs):
        parts = [part for m in messages for part in m["content"]]
        return "".join(part.get("text", "I") for part in parts)


def test_images_of_a_row_become_parts_of_its_messages_and_inputs_of_its_sample(picture_rows):
    read = Dataset(
        picture_rows,
        PartsTokenizer(),
        FakeProcessor(),
        None,
        prompt_key="input",
        multimodal_keys={"image": "pictures"},
        apply_chat_template=True,
    )
    assert [s.prompt for s in read.samples] == ["Ior I?", "I?"]
    colors = [[image.getpixel((0, 0)) for image in s.multimodal_inputs["images"]] for s in read.samples]
    assert colors == [[(255, 0, 0), (0, 0, 255)], [(0, 0, 255)]]
    keys = {"image": "pictures"}
    plain = Dataset(picture_rows, PartsTokenizer(), None, None, prompt_key="input", multimodal_keys=keys)
    (message,) = plain[0].prompt
    assert [part["type"] for part in message["content"]] == ["image", "text", "image", "text"]
    assert plain[0].multimodal_inputs is None, "without a processor nothing is opened"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "<image>", "pictures": []}, "rows.jsonl:1: the prompt has more <image> than the row has of them"),
        ({"input": "hi", "pictures": ["a.png"]}, "1 of 'pictures' .* have no <image> in the prompt"),
    ],
)
def test_images_and_placeholders_are_as_many(tmp_path, row, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(UsageError, match=message):
        Dataset(str(file), PartsTokenizer(), None, None, prompt_key="input", multimodal_keys={"image": "pictures"})


def test_an_image_is_read_from_what_rows_hold_and_sent_as_a_data_uri(tmp_path):
    (tmp_path / "red.png").write_bytes(png("red"))
    for value in (str(tmp_path / "red.png"), png("red"), {"bytes": png("red"), "path": None}, picture("red")):
        assert open_image(value).getpixel((3, 1)) == (255, 0, 0)
    uri = encode_image_for_rollout_engine(picture("red"))
    assert uri.startswith("data:image/png;base64,") and open_image(uri).getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(UsageError, match="an image could not be read"):
        open_image(str(tmp_path / "none.png"))
    with pytest.raises(UsageError, match="an image must be a path"):
        open_image(5)
    messages = [{"role": "user", "content": "text only"}]
    assert process_vision_info(messages, None) == {"images": None, "videos": None}


def test_an_engine_gets_text_and_images_and_the_trainer_what_the_processor_made_of_them(
    engine, picture_rows, monkeypatch
):
    monkeypatch.setattr(data_source, "load_tokenizer", lambda name, **kw: PartsTokenizer())
    for module in (data_source, generation):
        monkeypatch.setattr(module, "load_processor", lambda name, **kw: FakeProcessor())
    args = rollout_args(
        sglang_router_port=engine.port,
        prompt_data=picture_rows,
        multimodal_keys={"image": "pictures"},
        apply_chat_template=True,
    )
    ((first, second),) = RolloutDataSource(args).get_samples(1)
    assert first.multimodal_inputs is second.multimodal_inputs, "images are shared, not copied n times"
    sent = []

    async def answer(url, payload, headers=None):
        sent.append(payload)
        pairs = [[-0.5, 50, None]]
        return {"text": "x", "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": pairs}}

    monkeypatch.setattr(generation, "post", answer)
    async_utils.run(generation.generate(args, first, {"max_new_tokens": 5}))
    (payload,) = sent
    assert "input_ids" not in payload and payload["text"] == "Ior I?"
    assert [open_image(uri).getpixel((0, 0)) for uri in payload["image_data"]] == [(255, 0, 0), (0, 0, 255)]
    assert first.tokens == [7, 7, *(ord(letter) for letter in "Ior I?"), 50]
    assert first.multimodal_train_inputs == {"pixel_values": [(255, 0, 0), (0, 0, 255)]}
    GenerateState.clear_instances()


# ---- data sources without a file


def test_without_a_file_samples_are_empty_but_numbered_and_the_place_is_kept(tmp_path):
    flags = {"rollout_global_dataset": False, "save": str(tmp_path), "load": str(tmp_path), "n_samples_per_prompt": 2}
    source = RolloutDataSourceWithBuffer(rollout_args(**flags))
    assert source.get_samples(2) == [
        [Sample(group_index=0, index=0), Sample(group_index=0, index=1)],
        [Sample(group_index=1, index=2), Sample(group_index=1, index=3)],
    ]
    assert len(source) == 0
    source.add_samples([[Sample(prompt="a"), Sample(prompt="b")]])
    source.save(0)
    resumed = RolloutDataSourceWithBuffer(rollout_args(**flags))
    resumed.load(0)
    assert [[s.prompt for s in group] for group in resumed.get_samples(2)] == [["a", "b"], ["", ""]]
    assert resumed.sample_group_index == 3
