"""Whether engines can draft (speculative decoding), with weights that a sync keeps, and sample the policy then.

Each kind of engine is judged by its own settings; names of tensors and configs are read as plain JSON.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.args import Args
from slime.config.problems import NoEffect
from slime.config.sglang.served_models import names_of_tensors
from slime.utils.accelerator import is_built_for_amd
from slime.utils.errors import sentences
from slime.weights.names import read_config, text_config

if TYPE_CHECKING:
    from slime.config.sglang.topology import ModelPlan

OWN_LAYER, SEPARATE = ("EAGLE", "NEXTN"), ("EAGLE", "NEXTN", "EAGLE3", "STANDALONE")
"""Algorithms that may draft with a layer of the model, and with a model of their own."""
WITHOUT_MODEL = ("NGRAM",)
SEVERAL_LAYERS = (
    "MiMoV2ForCausalLM",
    "MiMoV2FlashForCausalLM",
    "Step3p5ForCausalLM",
    "Step3p7ForConditionalGeneration",
)
"""Architectures whose drafts SGLang (0.5.17) makes with a worker that takes no weights out of memory."""
LAYER_UNSAID = ("qwen3_next", "qwen3_5")
"""Families whose drafting layer shows in names of tensors only."""
_DRAFT = "--sglang-speculative-algorithm"


@dataclass(frozen=True)
class _Drafting:
    """How the engines of one kind draft.

    Attributes:
        settings: their ServerArgs values.
        model_path: of the model that they serve; `config` is its config.json.
        where: begins each sentence, for a group of --sglang-config.
    """

    settings: Mapping[str, Any]
    model_path: str
    config: Mapping[str, Any]
    where: str = ""

    @property
    def algorithm(self) -> str | None:
        """In capitals; None where they do not draft."""
        given = self.settings.get("speculative_algorithm")
        return str(given).upper() if given else None

    @property
    def flag(self) -> str:
        """The algorithm's, as sentences begin."""
        return f"{self.where}{_DRAFT} {self.algorithm}"

    @property
    def head_path(self) -> str | None:
        """Of a draft that is no part of the model."""
        given = self.settings.get("speculative_draft_model_path")
        return None if given is None or same_directory(given, self.model_path) else given


def same_directory(path: str, other: str) -> bool:
    """Return whether two paths are of one directory, links followed."""
    return os.path.realpath(path) == os.path.realpath(other)


def draft_with_own_layer(models: Sequence[ModelPlan]) -> bool:
    """Return whether engines that take the trainer's weights draft with a layer of the model that they serve."""
    kinds = [
        _Drafting(group.settings, model.model_path, {})
        for model in models
        for group in model.groups
        if model.update_weights and group.takes_weights
    ]
    return any(kind.algorithm in OWN_LAYER and kind.head_path is None for kind in kinds)


def draft_problems(args: Args, models: Sequence[ModelPlan], hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about engines that could not draft, would draft with stale weights, or would not sample the policy.

    Args:
        args: reads `sglang_overrides`, `hf_checkpoint`, `accelerator`, `mtp_num_layers`, `debug_rollout_only`,
            `check_weight_update_equal`, `rollout_external`, `spec_auto_off`, `deterministic`.
        models: of the run; those that take the trainer's weights are judged, each group of them by its settings.
        hf_config: the content of the config.json of `hf_checkpoint`.
    """
    kinds = []
    for model in models:
        path = model.model_path
        for group in model.groups if model.update_weights else ():
            if group.takes_weights:
                config = hf_config if path == args.hf_checkpoint else read_config(path)
                is_own = any(
                    value != args.sglang_overrides.get(name)
                    for name, value in group.settings.items()
                    if name.startswith("speculative_") or name in NOT_WITH_AUTO_OFF
                )
                where = f"--sglang-config, model {model.name}: " if is_own else ""
                kinds.append(_Drafting(group.settings, path, config, where))
    kinds = kinds or [_Drafting(args.sglang_overrides, args.hf_checkpoint, hf_config)]
    yield from dict.fromkeys(sentence for kind in kinds for sentence in _problems_of_drafts(args, kind))


def _problems_of_drafts(args: Args, kind: _Drafting) -> Iterator[str]:
    settings, algorithm = kind.settings, kind.algorithm
    if algorithm is None:
        lone = [name for name in settings if name.startswith("speculative_") and name != "speculative_algorithm"]
        if lone:
            flags = [f"{kind.where}--sglang-{name.replace('_', '-')}" for name in lone]
            yield NoEffect(flags, f"without {_DRAFT}", "give that, or leave them out" if lone[1:] else "leave it out")
        if args.spec_auto_off and kind.where:
            yield f"{kind.where}--spec-auto-off needs engines that draft; leave it out, or have all of them draft."
        return
    if algorithm not in {*SEPARATE, *WITHOUT_MODEL}:
        yield f"{kind.flag} is not supported here; take one of {', '.join([*SEPARATE, *WITHOUT_MODEL])}."
        return
    yield from _problems_of_algorithm(args, kind, algorithm)


def _problems_of_algorithm(args: Args, kind: _Drafting, algorithm: str) -> Iterator[str]:
    settings, flag, path = kind.settings, kind.flag, kind.head_path
    yield from sentences(
        (
            args.accelerator == "cpu" or is_built_for_amd(),
            f"{flag} needs an NVIDIA GPU: elsewhere SGLang (0.5.17) takes the likeliest token where it verifies "
            "drafts, instead of sampling; leave it out.",
        ),
        (
            args.deterministic and kind.where,  # the flag itself is refused elsewhere
            f"{flag} does not go with --deterministic: drafts are not sampled with the seeds of the samples.",
        ),
        (
            path is not None and algorithm in SEPARATE and not Path(path, "config.json").is_file(),
            f"{kind.where}--sglang-speculative-draft-model-path {path} has no config.json; give the directory of a "
            "draft model.",
        ),
        (
            path is None and algorithm in SEPARATE and algorithm not in OWN_LAYER,
            f"{flag} drafts with a model of its own; give its directory as --sglang-speculative-draft-model-path.",
        ),
    )
    if path is None and algorithm in OWN_LAYER:
        yield from _own_layer_problems(args, kind)
    token_map = settings.get("speculative_token_map")
    loose = {
        f"--sglang-{name.replace('_', '-')}": settings.get(name, 1.0)
        for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
    }
    yield from sentences(
        (
            token_map,
            f"{kind.where}--sglang-speculative-token-map {token_map}: the draft would keep a copy of the output layer "
            "that no weight sync changes; leave it out.",
        ),
        *(
            (
                share != 1.0,
                f"{kind.where}{option} {share:g} accepts drafts that the policy would not have sampled, and their "
                "log-probs are not those of what was sampled; leave it out.",
            )
            for option, share in loose.items()
        ),
    )
    if args.spec_auto_off:
        yield from _auto_off_problems(args, kind)


def _own_layer_problems(args: Args, kind: _Drafting) -> Iterator[str]:
    config, flag = text_config(kind.config), kind.flag
    architecture = next(iter(kind.config.get("architectures") or ()), str(config.get("model_type")))
    has_layer = bool(config.get("num_nextn_predict_layers"))
    if str(config.get("model_type")).startswith(LAYER_UNSAID):
        names = names_of_tensors(Path(kind.model_path))
        has_layer = not names or any(name.startswith("mtp.") for name in names)
    if not has_layer:
        yield (
            f"{flag}: --hf-checkpoint {kind.model_path} has no layer that drafts (num_nextn_predict_layers of its "
            "config.json); give a head as --sglang-speculative-draft-model-path, or take NGRAM, which needs none."
        )
    elif architecture in SEVERAL_LAYERS:
        yield (
            f"{flag}: SGLang cannot update the drafting layers of {architecture} from memory; leave it out, or give "
            "another head as --sglang-speculative-draft-model-path."
        )
    elif args.check_weight_update_equal and not args.mtp_num_layers and not args.debug_rollout_only:
        yield (
            f"--check-weight-update-equal overwrites the layer that drafts ({flag}), and without --mtp-num-layers no "
            "sync brings it back; give that where the model's family has it, or leave one of the two out."
        )


NOT_WITH_AUTO_OFF = (
    "speculative_adaptive",
    "speculative_adaptive_config",
    "enable_dp_attention",
    "enable_two_batch_overlap",
    "enable_pdmux",
)


def _auto_off_problems(args: Args, kind: _Drafting) -> Iterator[str]:
    """What SGLang needs to stop drafting while it runs."""
    settings, topk = kind.settings, kind.settings.get("speculative_eagle_topk", 1)
    why = [
        *(f"--sglang-{name.replace('_', '-')}" for name in NOT_WITH_AUTO_OFF if settings.get(name)),
        *sentences(
            (kind.algorithm not in ("EAGLE", "NEXTN", "EAGLE3"), f"{_DRAFT} {kind.algorithm}"),
            (topk != 1, f"--sglang-speculative-eagle-topk {topk}"),
            (args.rollout_external, "--rollout-external-engine-addrs"),
        ),
    ]
    return sentences(
        (
            why,
            f"{kind.where}--spec-auto-off does not go with {' and '.join(why)}: SGLang stops drafting at run time for "
            "EAGLE, NEXTN and EAGLE3 with one draft at a time, in engines of this run; leave one of the two out.",
        )
    )
