"""Make a tiny Qwen3 (or a model of another family) with random weights and a character tokenizer, as an HF directory.

    python tools/make_tiny_model.py --output models/tiny-qwen3
    python tools/make_tiny_model.py --output models/tiny-moe --family qwen3_moe
    python tools/make_tiny_model.py --output models/tiny-vl --family qwen3_vl

Every printable ASCII character is one token; the role names of the chat template are one token each, so a chat prompt
stays short. A model that sees images gets a processor, too, which needs torchvision; the others do without, because
the model classes are imported from their own modules.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

from slime.models.families import FAMILIES  # noqa: E402
from slime.models.family import resolved  # noqa: E402

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
ROLE_TOKENS = ["system", "user", "assistant", "tool"]
CHARACTERS = ["\n", *sorted(set(string.printable) - set(string.whitespace)), " "]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
IMAGE_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""Key of the config -> token."""
CHAT_WITH_IMAGES = CHAT_TEMPLATE.replace(
    "message['content'] +",
    "(message['content'] if message['content'] is string else parts(message['content'])) +",
).replace(
    "{% for message",
    "{% macro parts(content) %}{% for part in content %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endmacro %}"
    "{% for message",
)
"""The same for messages whose contents are lists of texts and images."""


def build_tokenizer(extra_tokens: Sequence[str] = (), *, sees_images: bool = False) -> PreTrainedTokenizerFast:
    """The character tokenizer: specials, then role names, then characters; another character becomes `<unk>`.

    Args:
        extra_tokens: texts of more than one character that shall be one token each.
        sees_images: there are the tokens around an image and in its place, and a chat template that writes them.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [*SPECIAL_TOKENS, *(IMAGE_TOKENS.values() if sees_images else ())]
    vocabulary = {token: i for i, token in enumerate([*special, *ROLE_TOKENS, *CHARACTERS, *extra_tokens])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in [*ROLE_TOKENS, *extra_tokens]]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_WITH_IMAGES if sees_images else CHAT_TEMPLATE
    return wrapped


OWN_CONFIG = """from transformers import {theirs}Config


class {own}Config({theirs}Config):
    model_type = "{family}"
"""
"""The config's class of a family that transformers does not know, which it loads with --trust-remote-code."""


def build_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """The shape from the command line; the vocabulary is rounded up, so that TP can split it without padding."""
    family = FAMILIES[args.family]
    name = family.hf_type or args.family
    module = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    vocab_size = -(-len(tokenizer) // args.vocab_multiple) * args.vocab_multiple
    shape = {} if family.is_latent else {"head_dim": args.head_dim or args.hidden_size // args.heads}
    settings = {"num_key_value_heads": args.kv_heads, **shape, **family.tiny_config(args)}
    config: PretrainedConfig = vars(module)[f"{family.hf_class}{'Text' * family.sees_images}Config"](
        vocab_size=vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.ffn_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=args.max_positions,
        # SGLang gives models with experts an output layer of their own, which a tied checkpoint would leave empty.
        tie_word_embeddings=args.tie_embeddings and not family.has_experts,
        initializer_range=args.init_std,
        rope_parameters={"rope_type": "default", "rope_theta": args.rope_theta, **settings.pop("rope_parameters", {})},
        eos_token_id=tokenizer.eos_token_id,
        # With a padding id transformers would make its embedding zero, and a policy that samples the token would get
        # a gradient thousands of times the usual one through the first normalisation. The tokenizer has one anyway.
        pad_token_id=None,
        bos_token_id=None,
        **settings,
    )
    if not family.sees_images:
        return config
    size = args.vision_hidden_size
    vision = {"depth": args.vision_layers, "hidden_size": size, "num_heads": 2, "intermediate_size": 2 * size}
    vision["initializer_range"] = args.init_std
    vision |= {"out_hidden_size": args.hidden_size, **resolved(family.tiny_vision, args)}
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in IMAGE_TOKENS.items()}
    whole: PretrainedConfig = vars(module)[f"{family.hf_class}Config"](
        text_config=config.to_dict(), vision_config=vision, tie_word_embeddings=config.tie_word_embeddings, **ids
    )
    return whole


def build_processor(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast) -> Any:
    """The processor of Qwen's models that see images: it turns them into patches, and each into its tokens.

    An image of 16 to 65,536 pixels keeps its size, but for being rounded to whole patches.
    """
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    sizes = {"merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 256, "longest_edge": 65536}}
    sizes |= {"patch_size": config.vision_config.patch_size}
    kind, video = Qwen3VLProcessor, Qwen3VLVideoProcessor
    if config.model_type == "qwen2_5_vl":
        kind, video = Qwen2_5_VLProcessor, Qwen2VLVideoProcessor
    return kind(Qwen2VLImageProcessor(**sizes), tokenizer, video(**sizes), chat_template=tokenizer.chat_template)


def make_tiny_model(args: argparse.Namespace) -> int:
    """Write tokenizer, config and fp32 safetensors to `args.output`; returns the number of parameters."""
    import torch

    family = FAMILIES[args.family]
    name = family.hf_type or args.family
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    tokenizer = build_tokenizer(args.extra_tokens, sees_images=family.sees_images)
    torch.manual_seed(args.seed)
    kind = "ForConditionalGeneration" if family.sees_images else "ForCausalLM"
    config = build_config(args, tokenizer)
    model = vars(modeling)[f"{family.hf_class}{kind}"](config).to(torch.float32)
    args.output.mkdir(parents=True, exist_ok=True)
    if family.sees_images and importlib.util.find_spec("torchvision") is None:
        print("torchvision is not installed: the model gets no processor, and can be trained on texts alone")
    elif family.sees_images:
        build_processor(config, tokenizer).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    with open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet):  # a progress bar over one shard
        model.save_pretrained(args.output)
    if name != args.family:
        rename_family(args.output, args.family)
    if family.tiny_adds:
        add_to_config(args.output, family.tiny_adds)
    return sum(parameter.numel() for parameter in model.parameters())


def add_to_config(model: Path, values: Mapping[str, Any]) -> None:
    """Let the config.json of a saved model say more: what transformers drops, and SGLang reads."""
    config = {**json.loads((model / "config.json").read_text()), **values}
    (model / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def rename_family(model: Path, family: str) -> None:
    """Let the config.json of a saved model say `family`, for which transformers has no class of its own."""
    config = json.loads((model / "config.json").read_text()) | {"model_type": family}
    if own := FAMILIES[family].own_class:
        config["architectures"] = [f"{own}ForCausalLM"]
        config["auto_map"] = {"AutoConfig": f"configuration_{family}.{own}Config"}
        code = OWN_CONFIG.format(own=own, theirs=FAMILIES[family].hf_class, family=family)
        (model / f"configuration_{family}.py").write_text(code)
    (model / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def build_parser() -> argparse.ArgumentParser:
    """The command line; the defaults give 0.9 M parameters."""
    families = [name for name, family in FAMILIES.items() if family.hf_class]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument(
        "--extra-tokens", nargs="+", default=[], metavar="TEXT", help="texts that are one token each, e.g. a tag"
    )
    parser.add_argument("--family", choices=families, default="qwen3", help="kind of model")
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer, of which a token takes 2")
    parser.add_argument("--expert-ffn-size", type=int, default=64, help="width of an expert")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers")
    parser.add_argument("--hidden-size", type=int, default=128, help="channels between layers")
    parser.add_argument("--ffn-size", type=int, default=384, help="width of an MLP")
    parser.add_argument("--heads", type=int, default=4, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=2, help="key and value heads")
    parser.add_argument("--head-dim", type=int, default=None, help="hidden size / heads when not given")
    parser.add_argument("--vision-layers", type=int, default=2, help="layers of the part that sees images")
    parser.add_argument("--vision-hidden-size", type=int, default=32, help="channels between them")
    parser.add_argument("--max-positions", type=int, default=2048, help="longest sequence")
    parser.add_argument("--rope-theta", type=float, default=10000.0, help="base of the rotary embedding")
    parser.add_argument("--init-std", type=float, default=0.02, help="standard deviation of the random weights")
    parser.add_argument(
        "--vocab-multiple", type=int, default=128, help="round the vocabulary up to a multiple of this"
    )
    parser.add_argument(
        "--tie-embeddings",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share input and output embedding (dense models alone)",
    )
    return parser


def main() -> None:
    """Make the model and say how large it is."""
    args = build_parser().parse_args()
    if args.output.exists() and not args.output.is_dir():
        raise SystemExit(f"error: --output {args.output} is a file; name a directory")
    count = make_tiny_model(args)
    print(f"{args.output}: {args.family} with {count / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
