"""Flags of the evaluation. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.parser import flag

_DATA = ("eval_prompt_data", "eval_config")


@dataclass
class EvalFlags:
    """Evaluation."""

    eval_interval: int | None = flag(
        None, "evaluate before training, every N rollouts, at epoch ends and after the last rollout", at_least=1
    )
    eval_only: bool = flag(
        False, "evaluate the loaded weights and end; needs no training data, and what only training reads is ignored"
    )
    eval_prompt_data: list[str] | None = flag(None, "NAME PATH pairs", nargs="+", needs="eval_interval")
    eval_config: str | None = flag(None, "YAML or JSON file with the evaluation datasets", needs="eval_interval")
    eval_function_path: str | None = flag(
        None, "hook: as --rollout-function-path (default), called with evaluation=True", needs=_DATA
    )
    skip_eval_before_train: bool = flag(False, "no evaluation before the first rollout", needs="eval_interval")
    eval_input_key: str | None = flag(None, "as --input-key (default), for evaluation", needs=_DATA)
    eval_label_key: str | None = flag(None, "as --label-key (default), for evaluation", needs=_DATA)
    eval_tool_key: str | None = flag(None, "as --tool-key (default), for evaluation", needs=_DATA)
    n_samples_per_eval_prompt: int = flag(1, "responses per evaluation prompt", needs=_DATA, at_least=1)
    eval_temperature: float | None = flag(
        None, "as --rollout-temperature (default), for evaluation; 0 = greedy", needs=_DATA, at_least=0
    )
    eval_top_p: float | None = flag(None, "as --rollout-top-p (default), for evaluation", needs=_DATA)
    eval_top_k: int | None = flag(None, "as --rollout-top-k (default), for evaluation", needs=_DATA)
    eval_max_response_len: int | None = flag(
        None, "as --rollout-max-response-len (default), for evaluation", needs=_DATA, at_least=1
    )
    eval_max_prompt_len: int | None = flag(
        None, "most tokens of an evaluation prompt; see --prompt-truncation", needs=_DATA, at_least=1
    )
    eval_min_new_tokens: int | None = flag(None, "fewest tokens of an evaluation response", needs=_DATA, at_least=0)
    eval_max_context_len: int | None = flag(
        None, "as --rollout-max-context-len (default), for evaluation", needs=_DATA, at_least=1
    )
