"""The policies of a run that trains several LoRA adapters over one base (--lora-policies): their file, their flags.

Each policy is trained on prompts of its own, with a reward, rank, scale and rate of its own; what its entry leaves out
is the flags'. All of them are generated together by the same engines: a sample says whose it is in its metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from slime.config.args import Args
from slime.config.problems import Check, Problems, Rule, broken, for_each, plain_option, read_file
from slime.config.prompt_sources import SUFFIXES, prompt_sources
from slime.config.rules import files, generation
from slime.utils.errors import UsageError, sentences
from slime.utils.files.yaml_config import load_yaml, validate
from slime.weights.adapters import POLICY

if TYPE_CHECKING:
    from slime.plugins import Table

FLAG = "--lora-policies"
DATA_SOURCE = "slime.rollout.data_source.PolicyDataSource"
USUAL_DATA_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
USUAL_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
_NAME = r"[A-Za-z0-9_-]+"


class LoraPolicy(BaseModel):
    """One of the policies of a run; None is what the flag says.

    Attributes:
        name: in metrics, checkpoints and requests.
        data: its prompt file (--prompt-data).
        reward: name of a built-in reward (--rm-type), or path of a function (--custom-rm-path).
        rank: of its adapters (--lora-rank, which is also the most).
        alpha: their scale times the rank (--lora-alpha).
        lr: its learning rate (--lr).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: Annotated[str, Field(pattern=f"^{_NAME}$")]
    data: Annotated[str, Field(min_length=1)] | None = None
    reward: Annotated[str, Field(min_length=1)] | None = None
    rank: Annotated[int, Field(ge=1)] | None = None
    alpha: Annotated[float, Field(gt=0)] | None = None
    lr: Annotated[float, Field(ge=0)] | None = None

    @property
    def reward_path(self) -> str | None:
        """Its reward, where that is a function of the user's."""
        return self.reward if self.reward and ("." in self.reward or ":" in self.reward) else None

    def of(self, args: Args) -> Args:
        """The flags of a run that trained this policy alone."""
        own = {"prompt_data": self.data, "lora_rank": self.rank, "lora_alpha": self.alpha, "lr": self.lr}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        if self.reward:
            given |= {"custom_rm_path": self.reward_path, "rm_type": None if self.reward_path else self.reward}
        alone = args.replace(**given)
        return alone.replace(prompt_sources=prompt_sources(alone)) if self.data else alone


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    policies: Annotated[list[LoraPolicy], Field(min_length=1)]


def policies_of(args: Args) -> Sequence[LoraPolicy]:
    """The policies of a run, in the order in which they are trained; none where there is one, which has no name."""
    return vars(args).get("policies") or ()


def read_policies(path: str) -> list[LoraPolicy]:
    """Read the file of --lora-policies: a list of mappings.

    Raises:
        FileUnusable: it is not there or cannot be read.
        UsageError: with one sentence and line per problem.
    """
    return validate(_File, load_yaml(path, FLAG)).policies


def policy_values(args: Args, problems: Problems) -> dict[str, Any]:
    """What follows from --lora-policies: attribute -> value; what is wrong with the file goes to `problems`."""
    policies = read_file(problems, read_policies, args.lora_policies) or () if args.lora_policies else ()
    values: dict[str, Any] = {"policies": tuple(policies)}
    if policies and args.data_source_path == USUAL_DATA_SOURCE:
        values["data_source_path"] = DATA_SOURCE
    if policies and args.prompt_data is None and all(policy.data for policy in policies):
        values["prompt_data"] = policies[0].data
    return values


_ALONE = {
    "lora_adapter_path": "each policy starts anew, or from its part of --load",
    "use_critic": "a critic would need a head for each policy",
    "keep_old_actor": "copies of old weights are kept of one policy",
    "release_train": "it is not proven with several policies",
    "async_save": "the policies take turns in the model while a checkpoint is written",
    "save_hf": "merged weights are one policy's; merge an adapter with tools/convert_lora.py",
    "peer_checkpoint_interval": "copies in memory hold one policy's state",
    "save_debug_train_data": "its file holds one policy's data",
    "group_rm": "one function would score the groups of all policies",
    "pf_ppo_reweight": "draws are made over one policy's groups",
    "buffer_filter_path": "it would pick from the groups of all policies",
    "custom_convert_samples_to_train_data_path": "it sees the samples of all policies at once",
    "custom_reward_post_process_path": "it sees the samples of all policies at once",
}
"""Attribute -> why it does not go with several policies."""
POLICIES: tuple[Check, ...] = (
    for_each(
        lambda a: _ALONE,
        lambda a, name: bool(vars(a).get(name)),
        lambda a, name: f"{plain_option(name)} does not go with {FLAG}: {_ALONE[name]}; leave one of the two out.",
    ),
    Rule(
        lambda a: a.lora_serve != "adapter",
        f"--lora-serve {{lora_serve}} does not go with {FLAG}: merged weights are one policy's; give adapter.",
    ),
    Rule(
        lambda a: a.kl_ctrl == "adaptive",
        f"--kl-ctrl adaptive does not go with {FLAG}: it follows one policy's KL; give fixed.",
    ),
    Rule(
        lambda a: a.data_source_path != DATA_SOURCE,
        f"--data-source-path {{data_source_path}} does not go with {FLAG}, whose file names prompts; leave it out.",
    ),
    Rule(
        lambda a: a.rollout_function_path.replace(":", ".") != USUAL_ROLLOUT,
        f"--rollout-function-path {{rollout_function_path}} does not go with {FLAG}: slime's own default alone makes "
        "equally many groups of each policy; leave it out.",
    ),
    Rule(
        lambda a: "hf" in a.checkpoint_contents,
        f"--checkpoint-contents hf does not go with {FLAG}: merged weights are one policy's; leave hf out.",
    ),
    lambda args, *_: _wrong_entries(args),
    lambda args, *_: _wrong_evaluations(args),
)


def _wrong_evaluations(args: Args) -> Iterator[str]:
    names = [policy.name for policy in policies_of(args)]
    for dataset in args.eval_datasets:
        if dataset.metadata_overrides.get(POLICY) not in names:
            yield (
                f"evaluation data set {dataset.name} does not say which policy of {FLAG} answers it: give it "
                f"metadata_overrides with {POLICY}: one of {', '.join(names)}, in --eval-config."
            )


def _wrong_entries(args: Args) -> Iterator[str]:
    names, file = [policy.name for policy in policies_of(args)], f"{FLAG} {args.lora_policies}"
    for policy in policies_of(args):
        where, times, reward = f"{file}: {policy.name}", names.count(policy.name), policy.reward
        graders = [] if policy.data else [s.where for s in args.prompt_sources if s.names_reward or s.custom_rm_path]
        yield from sentences(
            (times > 1, f"{file}: the name {policy.name} is there {times} times; give each its own."),
            (
                policy.rank is not None and args.lora_rank is not None and policy.rank > args.lora_rank,
                f"{where}: rank {policy.rank} is over --lora-rank {args.lora_rank}, the room of every policy; raise "
                "the flag to the largest rank.",
            ),
            (
                policy.data is None and args.prompt_data is None,
                f"{where} has no data, and there is no --prompt-data; name its prompt file.",
            ),
            (
                policy.data and policy.data.endswith(SUFFIXES),
                f"{where}: data {policy.data} is a mixture; give a policy one file, or all of them the mixture as "
                "--prompt-data.",
            ),
            (
                reward and graders,
                f"{where}: reward {reward} stands beside the reward of {''.join(graders[:1])}; leave one of the two "
                "out.",
            ),
            (
                reward and args.custom_rm_path,
                f"{where}: reward {reward} stands beside --custom-rm-path {args.custom_rm_path}, which would go "
                "first; leave the flag out, and give every policy its reward.",
            ),
        )


def policy_problems(args: Args, given: Collection[str] = ()) -> Iterator[str]:
    """Yield a sentence for everything that is wrong with --lora-policies, but for their data and rewards."""
    if policies_of(args):
        yield from broken(POLICIES, args, given)


def data_problems(args: Args, *, known: Table[Any], needs_label: Callable[[str], bool], fields: str) -> Problems:
    """Return what is wrong with the prompts of the run, or with those and the reward of each of its policies.

    Arguments as of `generation.check_rewards`.
    """
    problems = Problems()
    if not policies_of(args):
        problems.environment += files.check_train_data(args, reads_reward=generation.uses_builtin_reward(args))
    for policy in policies_of(args):
        where = f"{FLAG} {args.lora_policies}: {policy.name}: "
        try:
            of_one = policy.of(args).replace(eval_datasets=[])
        except UsageError as error:
            problems.environment += [where + text for text in error.messages]
            continue
        data = files.check_train_data(of_one, reads_reward=generation.uses_builtin_reward(of_one))
        reward = generation.check_rewards(of_one, known=known, needs_label=needs_label, fields=fields)
        problems.environment += [where + text for text in data]
        problems.wrong += [where + text for text in reward]
    return problems


def reward_hooks(args: Args) -> Iterator[tuple[str, str, str]]:
    """Yield (where it is given, attribute, path) of each policy's reward that is a function."""
    for policy in policies_of(args):
        if path := policy.reward_path:
            yield f"{FLAG} {args.lora_policies}: {policy.name}: reward", "custom_rm_path", path
