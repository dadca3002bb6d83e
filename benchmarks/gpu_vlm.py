"""A model that sees images on one GPU: GRPO of a Qwen3-VL of 2 B with random weights, trained by FSDP2 or Megatron.

    python benchmarks/gpu_vlm.py [--num-gpus 2]
    python benchmarks/gpu_vlm.py --tiny

Trainer and engine take turns on the GPU; every prompt has an image of 448 x 448 pixels, which is 196 tokens. The tower
is trained, or frozen in a second run; Megatron trains it in a third. Targets: log-probs of engine and trainer at most
0.02 apart (bf16), a checkpoint at the end. The step's parts are in the note.
"""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_fsdp import FSDP, judge  # noqa: E402
from benchmarks.gpu_models import QWEN3, run_python, write_random_weights  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Run,
    colocated,
    folder_of,
    grpo_flags,
    line_of,
    make_parser,
    parse_options,
    report,
    run_train,
    series_of,
)

TEXT = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
VISION = {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096,
          "patch_size": 16, "out_hidden_size": 2048, "num_position_embeddings": 2304,
          "deepstack_visual_indexes": [5, 11, 17]}  # fmt: skip
"""The shape of Qwen3-VL-2B."""
WAYS = {
    "trained tower": FSDP.split(),
    "frozen tower": [*FSDP.split(), "--freeze-vision-tower"],
    "megatron": ["--train-backend", "megatron"],
}
TOWER_ON_CUDA = ("--sglang-mm-attention-backend", "triton_attn")
"""SGLang's own choice on Hopper is FlashAttention 3, whose kernels a machine may lack."""


def main() -> None:
    parser = make_parser(__doc__, "gpu_vlm")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="default: all")
    parser.add_argument("--num-gpus", type=int, default=1, help="ranks of the trainer, each with an engine")
    options = parse_options(parser)
    rows = [row for way in options.way or WAYS for row in measured_run(way, options)]
    sys.exit(report(rows, options))


def measured_run(way: str, options: Namespace) -> list[Row]:
    """Do a run; its rows, printed as soon as they are there."""
    shape, side = ("tiny", 64) if options.tiny else ("VL-2B", 448)
    prompts, samples, response = (4, 4, 8) if options.tiny else (32, 8, 128)
    model = prepare_model(shape, options.output / "models", options.accelerator)
    data = write_prompts(options.output / "models" / f"{shape}.jsonl", side=side)
    name = f"vlm-{shape}-{way.split()[0]}" + f"-{options.num_gpus}" * (options.num_gpus > 1)
    save = options.output / "runs" / name / "checkpoints"
    more = [
        *colocated(options, tokens=16384, engine_share=0.4), *WAYS[way],
        "--actor-num-gpus-per-node", options.num_gpus, "--rollout-num-gpus-per-engine", 1,
        *(TOWER_ON_CUDA if options.accelerator == "cuda" else ()),
        "--prompt-data", data, "--apply-chat-template", "--multimodal-keys", '{"image": "images"}',
        "--save", save, "--save-interval", 4, "--checkpoint-contents", "model", "hf",
    ]  # fmt: skip
    flags = grpo_flags(prompts=prompts, samples=samples, response=response, rollouts=4, more=more)
    run = Run(name, str(model), flags)
    is_done = run_train(run, options)
    saved = sorted(path.name for path in save.glob("iter_*")) if is_done else []
    rows = judge(
        series_of(run, options),
        shape=f"{shape}, {way}, {prompts} x {samples} x {response} tokens, {options.num_gpus} GPUs",
    )
    note = f"checkpoint {', '.join(saved)}" if saved else f"see {folder_of(run, options) / 'console.log'}"
    rows.append(Row("colocated run: ended well", name, "4 rollouts", "", None, "status 0", bool(saved), note))
    for row in rows:
        print(line_of(row), flush=True)
    return rows


def prepare_model(shape: str, models: Path, device: str) -> Path:
    """The HF directory of a model that sees images, made once."""
    folder = models / f"{shape}-vl"
    if (folder / "config.json").is_file():
        return folder
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    run_python("tools/make_tiny_model.py", "--output", str(unfinished), "--family", "qwen3_vl")
    if shape != "tiny":
        file = unfinished / "processor_config.json"
        processor = json.loads(file.read_text())
        for part in ("image_processor", "video_processor"):
            processor[part] |= {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
        file.write_text(json.dumps(processor))
        (unfinished / "model.safetensors").unlink()
        config = full_config(json.loads((unfinished / "config.json").read_text()))
        write_random_weights(config, unfinished, device=device)
        (unfinished / "config.json").write_text(json.dumps(config))
    unfinished.rename(folder)
    return folder


def full_config(tiny: dict[str, Any]) -> dict[str, Any]:
    """The config of a tiny model with the sizes of the real one; ids of tokens stay."""
    text = {name: value for name, value in QWEN3.items() if name not in ("model_type", "architectures")}
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    tiny["text_config"] |= text | TEXT | {"rope_parameters": rope}
    tiny["vision_config"] |= VISION
    return tiny | {"dtype": "bfloat16", "initializer_range": 0.02}


def write_prompts(path: Path, *, side: int, count: int = 64) -> Path:
    """Questions about squares on a white ground, each with an image of its own."""
    from PIL import Image, ImageDraw

    rng = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for _ in range(count):
            picture, data = Image.new("RGB", (side, side), "white"), io.BytesIO()
            for _ in range(rng.randint(1, 9)):
                x, y, size = rng.randrange(side), rng.randrange(side), side // 8
                colour = tuple(rng.randrange(256) for _ in range(3))
                ImageDraw.Draw(picture).rectangle([x, y, x + size, y + size], fill=colour)
            picture.save(data, "PNG")
            uri = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
            prompt = [{"role": "user", "content": "<image>how many squares?"}]
            file.write(json.dumps({"prompt": prompt, "images": [uri]}) + "\n")
    return path


if __name__ == "__main__":
    main()
