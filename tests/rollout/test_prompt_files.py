"""Prompt files: larger than memory, sliced, shuffled, with images; and data sources without a file."""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import json
import random
import struct
import subprocess
import sys
import threading
import zlib
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from slime.rollout import data_source
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.eval import EvalDatasets
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState
from slime.utils import async_utils, data
from slime.utils.data import Dataset, check_data_file, read_file
from slime.utils.errors import UsageError
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.processing_utils import (
    ImageOptions,
    encode_image_for_rollout_engine,
    open_image,
    process_vision_info,
)
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
    """Puts as many tokens in the place of an "I" as its image has pixels in its width, and pixel values aside."""

    image_token_id = ord("I")
    calls = 0

    def __call__(self, text, images=None, return_tensors=None):
        assert return_tensors == "pt"
        type(self).calls += 1
        widths = iter(images)
        ids = [ord(c) for c in text[0] for _ in range(next(widths).width if c == "I" else 1)]
        pixels = [image.getpixel((0, 0)) for image in images]
        return {"input_ids": [ids], "attention_mask": [[1] * len(ids)], "pixel_values": pixels}

    def _get_num_multimodal_tokens(self, image_sizes):
        return {"num_image_tokens": [width for _, width in image_sizes]}


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
        contents = [m["content"] for m in messages]
        parts = [part for content in contents for part in ([{"text": content}] if type(content) is str else content)]
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


def test_an_engine_gets_images_once_and_the_trainer_what_the_processor_made_of_them(engine, picture_rows, monkeypatch):
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
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 50, None]], "prompt_tokens": 12}
        return {"text": "x", "meta_info": meta}

    monkeypatch.setattr(generation, "post", answer)
    monkeypatch.setattr(FakeProcessor, "calls", 0)

    async def both():
        await asyncio.gather(*(generation.generate(args, s, {"max_new_tokens": 5}) for s in (first, second)))

    async_utils.run(both())
    payload, _ = sent
    assert payload["input_ids"] == [ord(letter) for letter in "Ior I?"], "one token an image"
    assert payload["sampling_params"]["stop_token_ids"] == [ord("I")], "an engine could not go on from a second"
    assert [open_image(uri).getpixel((0, 0)) for uri in payload["image_data"]] == [(255, 0, 0), (0, 0, 255)]
    assert first.tokens == [*(ord(letter) for letter in "IIIIor IIII?"), 50] == second.tokens
    assert first.image_spans == [[0, 4], [7, 4]]
    assert first.multimodal_train_inputs["pixel_values"].tolist() == [[255, 0, 0], [0, 0, 255]]
    shared = second.multimodal_train_inputs["pixel_values"]
    assert shared is first.multimodal_train_inputs["pixel_values"] and FakeProcessor.calls == 1, "once for a prompt"
    GenerateState.clear_instances()


def test_the_flags_of_images_reach_training_prompts_and_evaluation_prompts(tmp_path, monkeypatch):
    (tmp_path / "red.png").write_bytes(png("red"))  # 4 x 2 pixels
    monkeypatch.setattr(data_source, "load_tokenizer", lambda name, **kw: PartsTokenizer())
    for module in (data_source, generation):
        monkeypatch.setattr(module, "load_processor", lambda name, **kw: FakeProcessor())
    path = rows_file(tmp_path, {"input": "<image>", "pictures": str(tmp_path / "red.png")})
    keys = {"image": "pictures"}

    monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: PartsTokenizer())

    def sizes(**flags):
        args = rollout_args(prompt_data=path, multimodal_keys=keys, apply_chat_template=True, **flags)
        config = EvalDatasetConfig("e", path, multimodal_keys=keys, apply_chat_template=True)
        EvalDatasets.clear_instances()
        GenerateState.clear_instances()
        read = RolloutDataSource(args).dataset, EvalDatasets().get(args, config, PartsTokenizer())
        return {dataset[0].multimodal_inputs["images"][0].size for dataset in read}

    assert sizes(image_min_pixels=32) == {(8, 4)} and sizes(image_max_pixels=2) == {(2, 1)}
    web = rows_file(tmp_path, {"input": "<image>", "pictures": "http://127.0.0.1:1/red.png"})
    assert web == path
    with pytest.raises(UsageError, match="with --allow-image-urls"):
        sizes()
    with pytest.raises(UsageError, match="could not be fetched"):
        sizes(allow_image_urls=True)
    GenerateState.clear_instances()
    EvalDatasets.clear_instances()


def rows_file(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def image_rows(path, **options):
    return Dataset(
        path,
        PartsTokenizer(),
        FakeProcessor(),
        prompt_key="input",
        multimodal_keys={"image": "pictures"},
        apply_chat_template=True,
        **{"max_length": None, **options},
    )


def test_a_prompt_is_as_long_as_the_tokens_of_its_images_make_it(tmp_path):
    (tmp_path / "red.png").write_bytes(png("red"))  # 4 pixels wide: 4 tokens
    red = str(tmp_path / "red.png")
    rows = rows_file(tmp_path, {"input": "<image>ab", "pictures": red}, {"input": "abcdefg", "pictures": []})
    assert [s.prompt for s in image_rows(rows, max_length=6)] == ["Iab"]
    assert [s.prompt for s in image_rows(rows, max_length=7)] == ["Iab", "abcdefg"]
    with pytest.raises(UsageError, match="rows.jsonl:2: the prompt has 7 tokens, the limit is 6"):
        image_rows(rows, max_length=6, truncation="error")


@pytest.mark.parametrize(
    ("picture_of_the_row", "reason"),
    [
        ("none.png", "'none.png' does not exist, and is no base64"),
        ("data:image/png;base64,%%", "is no base64"),
        ("http://127.0.0.1:1/a.png", "is an address, which is only fetched with --allow-image-urls"),
        (base64.b64encode(b"no image").decode(), "an image could not be read from .*cannot identify image file"),
        ({"bytes": None, "path": None}, "an image must be a path"),
    ],
)
def test_an_image_that_cannot_be_read_is_named_with_its_row(tmp_path, picture_of_the_row, reason):
    (tmp_path / "red.png").write_bytes(png("red"))
    red = str(tmp_path / "red.png")
    rows = image_rows(rows_file(tmp_path, {"input": "<image><image>", "pictures": [red, picture_of_the_row]}))
    with pytest.raises(UsageError, match=f"rows.jsonl:1: image 2: .*{reason}"):
        rows[0]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_that_is_too_large_is_not_read(tmp_path):
    header = b"IHDR" + struct.pack(">IIBBBBB", 10_000, 10_000, 8, 2, 0, 0, 0)
    chunks = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, b"IDAT")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    rows = image_rows(rows_file(tmp_path, {"input": "<image>", "pictures": base64.b64encode(data).decode()}))
    with pytest.raises(UsageError, match="rows.jsonl:1: image 1: .*too large: 10000 x 10000 pixels, and at most 50,"):
        rows[0]


def test_images_that_the_processor_does_not_take_are_named_with_their_row(tmp_path):
    (tmp_path / "red.png").write_bytes(png("red"))
    rows = rows_file(tmp_path, {"input": "<image>", "pictures": str(tmp_path / "red.png")})

    class Strict(FakeProcessor):
        def _get_num_multimodal_tokens(self, image_sizes):
            raise ValueError(f"the aspect ratio of {image_sizes} is too large")

    reason = r"rows.jsonl:1: the processor takes no images of \[\(4, 2\)\] .*the aspect ratio of \[\(2, 4\)\]"
    with pytest.raises(UsageError, match=reason):
        Dataset(
            *(rows, PartsTokenizer(), Strict(), 7),
            prompt_key="input",
            multimodal_keys={"image": "pictures"},
            apply_chat_template=True,
        )


def test_missing_files_of_images_are_found_before_a_run_starts(tmp_path):
    (tmp_path / "red.png").write_bytes(png("red"))
    row = {"input": "<image>", "pictures": str(tmp_path / "red.png")}
    path = rows_file(tmp_path, row, row | {"pictures": [{"bytes": None, "path": str(tmp_path / "no.png")}]})
    keys = {"image": "pictures"}
    with pytest.raises(UsageError, match="rows.jsonl:2: there is no image .*no.png"):
        check_data_file(path, prompt_key="input", multimodal_keys=keys)
    assert check_data_file(f"{path}@[:1]", prompt_key="input", multimodal_keys=keys) == 1
    parts = {"input": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}
    with pytest.raises(UsageError, match="rows.jsonl:1: 'input' has images, and without --multimodal-keys"):
        check_data_file(rows_file(tmp_path, parts), prompt_key="input")


def test_an_image_is_fetched_where_that_is_allowed(tmp_path):
    class Pictures(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/red.png" else 404)
            self.end_headers()
            self.wfile.write(png("red"))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert open_image(f"{address}/red.png", allow_urls=True).getpixel((0, 0)) == (255, 0, 0)
        with pytest.raises(UsageError, match="could not be fetched from .*404"):
            open_image({"url": f"{address}/blue.png"}, allow_urls=True)
        server.shutdown()


def test_images_are_scaled_to_the_pixels_that_the_run_or_the_row_asks_for():
    parts = [{"type": "image", "image": Image.new("RGB", (100, 50))}]

    def size(part, **options):
        processor = SimpleNamespace(image_processor=SimpleNamespace(patch_size=4, merge_size=2, size={}))
        (image,) = process_vision_info([{"content": [part]}], processor, ImageOptions(**options))["images"]
        return image.size

    (part,) = parts
    assert size(part) == (100, 50)
    assert size(part, max_pixels=1280) == (48, 24), "sqrt(1280 / 5000) of each side, rounded down to patches of 8"
    assert size(part, min_pixels=20_000) == (200, 104), "twice each side, rounded up"
    assert size({**part, "max_pixels": 512}, max_pixels=1280) == (32, 16), "the row's own goes first"
    assert size({"type": "image", "image": {"image": part["image"], "max_pixels": 512}}) == (32, 16)


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
