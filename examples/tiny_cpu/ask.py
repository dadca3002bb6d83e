"""Ask one or several models the same addition, with plain transformers, and show what each answers.

    python examples/tiny_cpu/ask.py --model before=outputs/tiny-cpu/sft/hf --model after=outputs/tiny-cpu/grpo/hf

Each model answers several times at temperature 1, as it is trained. It reads Hugging Face directories and knows not
how they were made.
"""

from __future__ import annotations

import argparse
from collections import Counter


def answers(model_path: str, question: str, *, num_answers: int, seed: int) -> Counter[str]:
    """How often the model gives each answer at temperature 1."""
    import torch
    from transformers import AutoTokenizer
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = Qwen3ForCausalLM.from_pretrained(model_path).eval()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    inputs = tokenizer([text] * num_answers, return_tensors="pt", add_special_tokens=False)
    tokens = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=5,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    responses = tokens[:, inputs["input_ids"].shape[1] :]
    return Counter(tokenizer.batch_decode(responses, skip_special_tokens=True))


def main() -> None:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=DIR", help="repeatable")
    parser.add_argument("--question", default="57+68=", help="two digits, plus, two digits, equals sign")
    parser.add_argument("--num-answers", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for item in args.model:
        name, _, path = item.partition("=")
        counts = answers(path, args.question, num_answers=args.num_answers, seed=args.seed)
        shown = "  ".join(f"{text} ({count}x)" for text, count in counts.most_common(6))
        print(f"{name:>12}: {args.question} {shown}")


if __name__ == "__main__":
    main()
