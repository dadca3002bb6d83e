"""Write the data of the tiny run: made-up people, towns and rivers, and questions that take two searches.

    python examples/search-r1/make_data.py --output outputs/search-r1/data

"river of kalo?": kalo lives in miru (a document), and miru lies on tavo (another one). Files: corpus.jsonl (a document
per person and town), train.jsonl and eval.jsonl (no person is in both), sft.jsonl (demonstrations about facts that are
made up each time, so that there is nothing to remember: half search rightly, a quarter search for somebody else, a
quarter guess), eval.yaml, search.yaml (for --custom-config-path).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random

from examples.tiny import data_parser, write_and_say, write_eval_config, write_jsonl

WORLD_SEED = 20261127  # fixed: every seed of a run has the same facts and is evaluated on the same people
NUM_PEOPLE, NUM_TOWNS, NUM_RIVERS, NUM_EVAL = 600, 120, 60, 128
SYLLABLES = [consonant + vowel for consonant in "bdgklmnprstvz" for vowel in "aiou"]
# Each is one token of the tiny tokenizer, about as words are in a large one.
PIECES = [
    *SYLLABLES,
    *("<search>", "</search>", "\n\n<information>", "</information>\n\n", "<answer>", "</answer>"),
    *("Doc 1(Title: ", ") ", " lives in ", " lies on ", "e.g. ", "river of "),
]
MAX_TURN_TOKENS = 12


class World:
    """Who lives where, and which river is there."""

    def __init__(self) -> None:
        rng = random.Random(WORLD_SEED)
        names = ["".join(pair) for pair in itertools.product(SYLLABLES, SYLLABLES)]
        rng.shuffle(names)
        ends = list(itertools.accumulate((NUM_PEOPLE, NUM_TOWNS, NUM_RIVERS)))
        self.people, self.towns, self.rivers = names[: ends[0]], names[ends[0] : ends[1]], names[ends[1] : ends[2]]
        self.home = {person: rng.choice(self.towns) for person in self.people}
        self.river = {town: rng.choice(self.rivers) for town in self.towns}

    def answer(self, person: str) -> str:
        """The river of the person's town."""
        return self.river[self.home[person]]

    def documents(self) -> list[str]:
        """Title and text about every person and every town."""
        people = (f'"{person}"\n{person} lives in {town}' for person, town in self.home.items())
        return [*people, *(f'"{town}"\n{town} lies on {river}' for town, river in self.river.items())]


def question(person: str) -> list[dict[str, str]]:
    """The prompt: an example of an answer, and the question."""
    return [{"role": "user", "content": f"e.g. <answer>bada</answer>\nriver of {person}?"}]


def searched(name: str, fact: str) -> str:
    """A search for a name, and what it finds."""
    return f"<search>{name}</search>\n\n<information>Doc 1(Title: {name}) {name}{fact}\n</information>\n\n"


def demonstration(names: list[str], *, rng: random.Random) -> tuple[str, str]:
    """(whom it is about, a response): both searches; or they begin with somebody else; or a guess after one search."""
    person, other, town, river, guess = rng.sample(names, 5)
    kind = rng.choice(["good", "good", "somebody else", "guess"])
    first = searched(other if kind == "somebody else" else person, f" lives in {town}")
    if kind == "guess":
        return person, f"{first}<answer>{guess}</answer>"
    return person, f"{first}{searched(town, f' lies on {river}')}<answer>{river}</answer>"


def write_data(args: argparse.Namespace) -> dict[str, int]:
    """Write all files; returns rows per JSONL file."""
    output, world, rng = args.output, World(), random.Random(args.seed)
    held_out, training = world.people[:NUM_EVAL], world.people[NUM_EVAL:]
    documents = [{"id": str(number), "contents": text} for number, text in enumerate(world.documents())]
    names = sorted({"".join(pair) for pair in itertools.product(SYLLABLES, SYLLABLES)} - set(held_out))
    told = (demonstration(names, rng=rng) for _ in range(args.num_demonstrations))
    shown = ({"messages": [*question(person), {"role": "assistant", "content": text}]} for person, text in told)
    counts = {
        "corpus.jsonl": write_jsonl(output / "corpus.jsonl", documents),
        "sft.jsonl": write_jsonl(output / "sft.jsonl", shown),
    }
    for name, asked in (("train.jsonl", training), ("eval.jsonl", held_out)):
        rows = (
            {"prompt": question(person), "reward_model": {"ground_truth": {"target": [world.answer(person)]}}}
            for person in asked
        )
        counts[name] = write_jsonl(output / name, rows)
    dataset = {
        "name": "two_hops",
        "path": str(output / "eval.jsonl"),
        "input_key": "prompt",
        "label_key": "reward_model",
        "custom_rm_path": "generate_with_search.reward_func",
    }
    write_eval_config(output / "eval.yaml", dataset, samples=args.eval_samples, max_response_len=MAX_TURN_TOKENS)
    url = json.dumps(args.search_url)
    (output / "search.yaml").write_text(f"search_r1: {{max_turns: 4, topk: 1, local: {{search_url: {url}}}}}\n")
    return counts


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = data_parser(__doc__)
    parser.add_argument("--search-url", default="http://127.0.0.1:8000/retrieve", help="of the retrieval server")
    return parser


if __name__ == "__main__":
    write_and_say(write_data, build_parser())
