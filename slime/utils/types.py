"""`Sample`, the one record that travels from the prompt file to the trainer, and small types that user code imports.

A sample's methods keep its parallel lists consistent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from slime.utils.misc import decode_int32_meta_array, deep_copied, with_attributes
from slime.utils.rewards import part_of, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from slime.config.args import Args

RolloutBatch = dict[str, Any]  # the keys: slime.utils.train_data.RolloutBatch

END_REASONS = ("done", "max_turns", "length", "budget", "env_error", "grader_error", "transport", "aborted")
"""Why an execution ended: its program was done; turns, tokens or another budget were used up; the environment, the
grader or the way to the engine failed; it was ended from outside."""
_TOP_P_ID_KEYS = ("top_p_token_ids", "top_p_kept_token_ids")
_TOP_P_OFFSET_KEYS = ("top_p_token_offsets", "top_p_kept_token_offsets")


@dataclass
class _Counters:
    """Numbers that are summed over the engine calls of one sample."""

    def to_dict(self) -> dict[str, Any]:
        """The counters by name."""
        return dict(self.__dict__)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of `to_dict`; unknown keys are dropped."""
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})

    def copy(self) -> Self:
        """Counters of their own with the same values."""
        return with_attributes(type(self), self.__dict__.copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()


@dataclass
class SpecInfo(_Counters):
    """Speculative-decoding counters of one sample, summed over its engine calls.

    A verification checks a few drafted tokens, accepts the first k of them, and samples one token more, which is not
    counted as accepted; `spec_accept_counts` [1 + depth] says how many accepted exactly k. Tokens of the answers
    include the first one of each, which no verification gives.
    """

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0
    spec_accept_counts: list[int] = field(default_factory=list)  # copies share it, so it is replaced, never changed

    @property
    def spec_accept_rate(self) -> float:
        """Accepted / drafted tokens; 0 when nothing was drafted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens of the answers per verification; 0 when nothing was verified."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: dict[str, Any]) -> None:
        """Add the counters of one engine answer, under the names of SGLang 0.5.17 or of older ones."""
        accepted = meta_info.get("spec_num_correct_drafts", meta_info.get("spec_accept_token_num", 0))
        drafted = meta_info.get("spec_num_proposed_drafts", meta_info.get("spec_draft_token_num", 0))
        counts = list(meta_info.get("spec_correct_drafts_histogram", ()))
        verified, tokens = meta_info.get("spec_verify_ct", 0), meta_info.get("completion_tokens", 0)
        self.include(SpecInfo(accepted, drafted, verified, tokens, counts))

    def include(self, other: SpecInfo) -> None:
        """Add the counters of another sample."""
        self.spec_accept_token_num += other.spec_accept_token_num
        self.spec_draft_token_num += other.spec_draft_token_num
        self.spec_verify_ct += other.spec_verify_ct
        self.completion_token_num += other.completion_token_num
        both = zip_longest(self.spec_accept_counts, other.spec_accept_counts, fillvalue=0)
        self.spec_accept_counts = list(map(sum, both))


@dataclass
class PrefixCacheInfo(_Counters):
    """How many prompt tokens of one sample the engine found in its prefix cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached / all prompt tokens; 0 when there were none."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: dict[str, Any]) -> None:
        """Add the counters of one engine answer."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


class Status(Enum):
    """Where a sample stands: TRUNCATED hit a length limit, ABORTED was ended by us, FAILED is for custom functions."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_END_OF_STATUS = {Status.COMPLETED: "done", Status.TRUNCATED: "length", Status.ABORTED: "aborted"}
# Inside Sample these three names are class variables, which a type checker does not take for types.
_Status: TypeAlias = Status
_SpecInfo: TypeAlias = SpecInfo
_PrefixCacheInfo: TypeAlias = PrefixCacheInfo

_SHARED = (str, int, float, type(None), Status)  # what copies of a sample may share: it cannot be changed
_COPIED = (list, dict, _Counters)
_OF_IMAGES = ("multimodal_inputs", "multimodal_train_inputs")  # large, and only read


@dataclass
class Sample:
    """One prompt, one response, its reward and its mask.

    Extra attributes survive `to_dict`. Example: a prompt of 3 tokens, turns [21, 22] and [23], a tool's answer [31]::

        tokens            = [11, 12, 13, 21, 22, 31, 23]
        response_length   = 4
        loss_mask         =             [ 1,  1,  0,  1]
        rollout_log_probs =             [-.3, -.1, 0., -.7]
    """

    Status: ClassVar[type[Status]] = Status
    SpecInfo: ClassVar[type[SpecInfo]] = SpecInfo
    PrefixCacheInfo: ClassVar[type[PrefixCacheInfo]] = PrefixCacheInfo

    group_index: int | None = None
    """Which prompt draw this is; the samples of a group share it. Rewards are normalised by it."""
    index: int | None = None
    """Unique, increasing number of the sample over the whole run; its sampling seed derives from it."""
    rollout_id: int | None = None
    """The execution that a sample came from: fan-out siblings share it and count once in a mean."""
    prompt: str | list[dict[str, Any]] = ""
    """Text ready to be tokenised, or a message list (SFT, custom generate functions)."""
    tokens: list[int] = field(default_factory=list)
    """[prompt + response] token ids."""
    multimodal_inputs: dict[str, Any] | None = None
    """{"images": list of PIL images}; the samples of a prompt, and copies of a sample, share it: it is only read."""
    multimodal_train_inputs: dict[str, Any] | None = None
    """What the processor made of the images for the model's forward pass: arrays by name, shared like the images."""
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    """R: tokens after the prompt, the model's and the tools'."""
    label: Any = None
    """What the reward function compares with; a string in most data sets."""
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """[R], 1 = trained. None = all ones."""
    weight_versions: list[str] = field(default_factory=list)
    """One entry per engine call: the weights that answered it."""
    rollout_log_probs: list[float] | None = None
    """[R] log-probabilities by the engine, after temperature; 0.0 on tokens that the model did not write."""
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    """[R + 1] where each response token's kept ids start in rollout_top_p_token_ids."""
    rollout_routed_experts: Any = None
    """[len(tokens) - 1, num_layers, topk]."""
    remove_sample: bool = False
    """True = loss mask all zero, the sample still counts in its group's statistics."""
    reward_is_trusted: bool = True
    """False = the reward says nothing about the policy (a sandbox or a grader failed): --on-untrusted-reward."""
    end_reason: str | None = None
    """One of `END_REASONS`; None = not ended, or whoever made the sample did not say."""
    teacher_log_probs: list[float] | None = None
    token_rewards: list[float | None] | None = None
    turn_rewards: list[float | None] | None = None
    """[R], or one of each turn (run of ones in the loss mask): what it earned beside `reward`; None = nothing."""
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    """Seconds spent outside the engine (tools, sandboxes)."""
    spec_info: _SpecInfo = field(default_factory=_SpecInfo)
    prefix_cache_info: _PrefixCacheInfo = field(default_factory=_PrefixCacheInfo)
    image_spans: list[list[int]] | None = None
    """[start, length] in `tokens` of each image, in order; None = no images. Other tokens with an image's id are words
    that the model wrote."""

    @property
    def loss_masks(self) -> list[int]:
        """Never exists: the old name of `loss_mask` was silently ignored, so using it is an error."""
        raise AttributeError("Sample has no loss_masks; the attribute is loss_mask: response_length zeros and ones")

    @loss_masks.setter
    def loss_masks(self, value: Any) -> None:
        raise AttributeError("Sample.loss_masks has no effect; assign loss_mask: response_length zeros and ones")

    @property
    def effective_response_length(self) -> int:
        """Trained response tokens: sum of the mask, or the response length when there is no mask."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def get_reward_value(self, args: Args) -> Any:
        """The reward as a number: `reward`, or of its entries what `args.reward_key` says when that flag is set."""
        return part_of(self.reward, args.reward_key, "--reward-key") if args.reward_key else self.reward

    @staticmethod
    def reward_of(args: Args, number: float) -> float | dict[str, float]:
        """A number as a reward that has every entry which --reward-key and --eval-reward-key read."""
        keys = (args.reward_key, args.eval_reward_key or args.reward_key) if args.reward_key else ()
        return {name: part for key in keys if key for name, part in parts_of(number, key).items()} or number

    def counts(self, args: Args) -> bool:
        """Whether the reward says something: it is trusted, or --on-untrusted-reward keep."""
        return bool(self.reward_is_trusted) or args.on_untrusted_reward == "keep"

    def note_end(self) -> None:
        """Set `end_reason` by the status where nobody has said more: completed is done, truncated is length."""
        self.end_reason = self.end_reason or _END_OF_STATUS.get(self.status)

    def to_dict(self) -> dict[str, Any]:
        """Every attribute by name, extra ones too; the status as its string, the two infos as dicts."""
        data = dict(self.__dict__)
        data.update(
            status=self.status.value,
            spec_info=self.spec_info.to_dict(),
            prefix_cache_info=self.prefix_cache_info.to_dict(),
        )
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Inverse of `to_dict`; keys that are no field become attributes."""
        data = dict(data)
        if "status" in data:
            data["status"] = Status(data["status"])
        if "spec_info" in data:
            data["spec_info"] = SpecInfo.from_dict(data["spec_info"])
        if "prefix_cache_info" in data:
            data["prefix_cache_info"] = PrefixCacheInfo.from_dict(data["prefix_cache_info"])
        names = {f.name for f in fields(cls)}
        sample = cls(**{key: value for key, value in data.items() if key in names})
        for key in data.keys() - names:
            setattr(sample, key, data[key])
        return sample

    def snapshot(self) -> Self:
        """The sample as it is now, with lists, dicts and counters of its own; what is in them is shared."""
        attributes = {key: value.copy() if isinstance(value, _COPIED) else value for key, value in vars(self).items()}
        return with_attributes(type(self), attributes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # As copy.deepcopy would, but at a fifth of its time: each sample of a rollout is copied from its prompt.
        twin = with_attributes(type(self), {})
        memo[id(self)] = twin
        for name, value in vars(self).items():
            is_shared = isinstance(value, _SHARED) or name in _OF_IMAGES
            twin.__dict__[name] = value if is_shared else deep_copied(value, memo)
        return twin

    def append_response_tokens(
        self,
        args: Args | None = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response and to each parallel list, which is extended in place: its holders see them.

        Args:
            args: only for routed experts and speculative decoding in `meta_info`.
            tokens: new token ids; None appends nothing (to take over `meta_info` alone).
            log_probs: one per token, by the engine; required for trainable tokens, forbidden for others.
            trainable: True for the model's own tokens; False (tool output, user turns) gets mask 0 and log-prob 0.0.
            meta_info: the engine's `meta_info` of this call.
            text: appended to `response`.
            update_terminal_info: False keeps status, weight versions and counters as they are.

        Raises:
            ValueError: lengths differ, log-probs lack or are forbidden, or `meta_info` does not fit; nothing changed.
        """
        tokens, meta_info = list(tokens or []), meta_info or {}
        previous = self.response_length
        self._check_append(tokens, log_probs, trainable=trainable)
        spans = self._top_p_spans(len(tokens), meta_info if trainable else {})
        experts = self._routed_experts(args, meta_info, num_tokens=len(self.tokens) + len(tokens))
        if self.rollout_log_probs is None and previous == 0 and tokens:
            self.rollout_log_probs = []
        if previous == 0:  # a prompt's list may be that of other samples of it; what begins here is its own
            self.tokens = list(self.tokens)
        self.tokens = _extended(self.tokens, tokens)
        self.response_length += len(tokens)
        mask = [1] * previous if self.loss_mask is None else self.loss_mask
        self.loss_mask = _extended(mask, [int(trainable)] * len(tokens))
        if self.token_rewards is not None:
            self.token_rewards = _extended(self.token_rewards, [None] * len(tokens))
        if self.rollout_log_probs is not None:
            new = log_probs if trainable and log_probs is not None else [0.0] * len(tokens)
            self.rollout_log_probs = _extended(self.rollout_log_probs, new)
        self.response += text or ""
        if spans is not None:
            self._append_top_p_spans(*spans, previous)
        if experts is not None:
            self.rollout_routed_experts = experts
        if update_terminal_info and meta_info.get("finish_reason"):
            self.update_from_meta_info(args, meta_info)

    def _append_top_p_spans(self, ids: list[int], ends: list[int], previous: int) -> None:
        if self.rollout_top_p_token_offsets is None:
            self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = [], [0] * (previous + 1)
        self.rollout_top_p_token_ids = _extended(self.rollout_top_p_token_ids, ids)
        self.rollout_top_p_token_offsets = _extended(self.rollout_top_p_token_offsets, ends)

    def update_from_meta_info(self, args: Args | None, meta_info: dict[str, Any]) -> None:
        """Take over how an engine call ended: status, weight version and counters."""
        if "spec_verify_ct" in meta_info:  # of an engine that drafts, whichever flag or file told it to
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(str(meta_info["weight_version"]))
        ended = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}
        self.status = ended.get(meta_info["finish_reason"]["type"], self.status)

    def _check_append(self, tokens: list[int], log_probs: Sequence[float] | None, *, trainable: bool) -> None:
        if log_probs is not None and not trainable:
            raise ValueError("non-trainable tokens take no log_probs: the model did not write them")
        if not trainable or not tokens:
            return
        if log_probs is None:
            raise ValueError(f"{len(tokens)} trainable tokens without log_probs; pass them, or trainable=False")
        if len(log_probs) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens but {len(log_probs)} log_probs")
        if self.response_length and self.rollout_log_probs is None:
            raise ValueError(f"the response already has {self.response_length} tokens without rollout_log_probs")

    def _top_p_spans(self, num_new: int, meta_info: dict[str, Any]) -> tuple[list[int], list[int]] | None:
        """(ids, where those of each token end) of `num_new` tokens to append; None where no token ever had any."""
        ids, offsets = (_ints(meta_info, keys) for keys in (_TOP_P_ID_KEYS, _TOP_P_OFFSET_KEYS))
        if (ids is None) != (offsets is None):
            raise ValueError("meta_info has only one of top_p_token_ids and top_p_token_offsets; both are needed")
        if ids is None or offsets is None:
            if self.rollout_top_p_token_ids is None:
                return None
            ids, offsets = [], [0] * (num_new + 1)
        if len(offsets) != num_new + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or sorted(offsets) != offsets:
            raise ValueError(f"top-p offsets must be {num_new + 1} rising entries from 0 to {len(ids)}: {offsets}")
        old = self.rollout_top_p_token_offsets
        start = 0 if old is None else int(old[-1])
        return ids, [start + offset for offset in offsets[1:]]

    def _routed_experts(self, args: Args | None, meta_info: dict[str, Any], *, num_tokens: int) -> Any:
        """[rows, num_layers, topk] of all tokens so far; None where the engine says nothing of experts."""
        flat = decode_int32_meta_array(meta_info, "routed_experts")
        if flat is None:
            return None
        if args is None:
            raise ValueError("meta_info has routed_experts: pass args (num_layers, moe_router_topk give their shape)")
        import numpy as np

        width = args.num_layers * args.moe_router_topk
        if len(flat) % width:
            raise ValueError(
                f"{len(flat)} routed_experts are no whole number of tokens with num_layers {args.num_layers} x "
                f"moe_router_topk {args.moe_router_topk}"
            )
        rows = flat.numpy().reshape(-1, args.num_layers, args.moe_router_topk)
        start = int(meta_info.get("routed_experts_start_len") or 0)
        num_old = 0 if self.rollout_routed_experts is None else len(self.rollout_routed_experts)
        if start > num_old:
            raise ValueError(f"routed_experts begin at token {start}, but the sample has those of {num_old} tokens")
        if start + len(rows) >= max(num_tokens, 1):
            raise ValueError(
                f"routed_experts of {start + len(rows)} tokens for {num_tokens}: the last token was never an input"
            )
        return np.concatenate([np.asarray(self.rollout_routed_experts)[:start], rows]) if start else rows


def _ints(meta_info: dict[str, Any], keys: Iterable[str]) -> list[int] | None:
    found = decode_int32_meta_array(meta_info, keys)
    return None if found is None else found.tolist()


def _extended(values: Any, new: Iterable[Any]) -> list[Any]:
    """The list `values` itself with `new` at its end; an array, a tensor or a tuple becomes a list first."""
    if not isinstance(values, list):
        values = values.tolist() if hasattr(values, "tolist") else list(values)
    values.extend(new)
    return values


@dataclass(frozen=True)
class ParamInfo:
    """A parameter's name and layout, without its values."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    attrs: dict[str, Any]
    size: int
    src_rank: int


@dataclass(frozen=True)
class MultimodalType:
    """A kind of input besides text, and the placeholder that stands for it in a prompt."""

    name: str
    placeholder: str


class MultimodalTypes:
    """The kinds of input besides text."""

    IMAGE = MultimodalType("image", "<image>")
    VIDEO = MultimodalType("video", "<video>")
    AUDIO = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        """Every kind, in a fixed order."""
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """The kind called `name`, or None."""
        return next((kind for kind in cls.all() if kind.name == name), None)
