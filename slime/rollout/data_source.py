"""Where prompts come from: the prompt file read epoch after epoch, and a buffer of groups that is served first.

It hands out groups of samples without a response and keeps its place, so that a resumed run goes on with the next
prompt. It does not generate, score or decide what enters the buffer.
"""

from __future__ import annotations

import copy
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.checkpoints.paths import entries_of, manifest_of_state, state_path, to_disk, write_manifest
from slime.checkpoints.rollout_files import load_dump, samples_of, with_plain_images
from slime.config.args import Args
from slime.config.lora_policies import policies_of
from slime.config.prompt_sources import prompt_sources
from slime.processes.directories import READABLE, open_new
from slime.rollout.hooks.errors import blame_hook, hook_name
from slime.rollout.hooks.returns import check_picked
from slime.rollout.sample_hooks import current_rollout_id
from slime.rollout.sampling.weight_versions import WeightClock, of_earlier_run
from slime.utils.data import Dataset
from slime.utils.eval_config import PromptSource, sources_of
from slime.utils.files.streams import is_stream
from slime.utils.misc import load_function, needed, on_error
from slime.utils.processing_utils import image_options, load_processor, load_tokenizer
from slime.utils.types import Sample
from slime.weights.adapters import POLICY

logger = logging.getLogger(__name__)
Group = list[Sample]
_POLICIES = "policies"


class DataSource(ABC):
    """What a rollout needs of a data source (--data-source-path names a class like this, made as `cls(args)`)."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """Exactly `num_samples` groups of n_samples_per_prompt samples."""

    @abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back, to be handed out again."""

    @abstractmethod
    def save(self, rollout_id: int) -> None:
        """Store the place under --save, to resume after this rollout."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Restore the place stored after this rollout from --load."""

    @abstractmethod
    def __len__(self) -> int:
        """Prompts in one epoch."""

    def __call__(self, num_samples: int) -> list[Group]:
        """As `get_samples`: --rollout-all-samples-process-path may call the data source."""
        return self.get_samples(num_samples)


@dataclass
class _Place:
    """Where a data set's next prompt is, and how far it is behind its share, in prompts."""

    sample_offset: int = 0
    epoch_id: int = 0
    behind: float = 0.0


class Mixture:
    """The prompts of several data sets, each drawn as often as its weight says.

    The order is no draw of lots: every prompt comes from the data set that is furthest behind its share, so that any
    stretch of a run has the shares that were asked for, to a prompt or two. Each data set goes on epoch after epoch by
    itself.

    Args:
        sources: settings and prompts of each.
        shuffles: every epoch of a data set has an order of its own.
    """

    def __init__(self, sources: Sequence[tuple[PromptSource, Dataset]], *, shuffles: bool) -> None:
        self._sources, self._shuffles = {source.name: (source, dataset) for source, dataset in sources}, shuffles
        self._places = {name: _Place() for name in self._sources}
        self._order_epochs()

    def __len__(self) -> int:
        return sum(len(dataset) for _, dataset in self._sources.values())

    def _order_epochs(self) -> None:
        for name, (_, dataset) in self._sources.items():
            if self._shuffles:
                dataset.shuffle(self._places[name].epoch_id)

    def draw(self, rollout_id: int) -> Sample:
        """The next prompt, by the weights of this rollout."""
        weights = {name: source.weight_at(rollout_id) for name, (source, _) in self._sources.items()}
        total = sum(weights.values())
        for name, weight in weights.items():
            self._places[name].behind += weight / total
        drawn = max((name for name, weight in weights.items() if weight), key=lambda name: self._places[name].behind)
        self._places[drawn].behind -= 1
        return self._sources[drawn][1].draw(self._places[drawn], shuffles=self._shuffles)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Name -> place of each data set: plain values."""
        return {name: vars(place).copy() for name, place in self._places.items()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Go to the places that `state_dict` described; data sets that it has not begin anew, with one warning."""
        new = [name for name in self._places if name not in state]
        gone = [name for name in state if name not in self._places]
        if new or gone:
            logger.warning(
                "the saved state has other data sets: %s begin at their first prompt, %s are not drawn any more",
                *(", ".join(names) or "none" for names in (new, gone)),
            )
        self._places = {name: _Place(**state.get(name, {})) for name in self._places}
        self._order_epochs()


class RolloutDataSource(DataSource):
    """The prompt file, in order or shuffled per epoch; the next epoch follows without a gap.

    Args:
        args: reads `prompt_sources`, `hf_checkpoint`, `trust_remote_code`, `prompt_truncation`,
            `filter_prompts_workers`, `skip_malformed_data`, `rollout_shuffle`, `rollout_seed`,
            `n_samples_per_prompt`, `save`, `load`. Without `rollout_global_dataset` there is no file: samples are
            empty but for their numbers, for a rollout function that makes its own prompts.
    """

    def __init__(self, args: Args) -> None:
        self.args = args
        self.epoch_id = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        self.dataset = _open_datasets(args) if args.rollout_global_dataset else None
        self._order_epoch()

    def _order_epoch(self) -> None:
        if isinstance(self.dataset, Dataset) and self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next `num_samples` prompts as groups; group_index and index go up over the whole run."""
        return [self._next_group() for _ in range(num_samples)]

    def _next_prompt(self) -> Sample:
        if self.dataset is None:
            return Sample()
        if isinstance(self.dataset, Dataset):
            return self.dataset.draw(self, shuffles=self.args.rollout_shuffle)
        if self.sample_offset >= len(self.dataset):
            self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
        self.sample_offset += 1
        return self.dataset.draw(current_rollout_id() or 0)

    def _next_group(self) -> Group:
        prompt = self._next_prompt()
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[Group]) -> None:
        """A file takes nothing back.

        Raises:
            RuntimeError: always, when there is something to take.
        """
        if samples:
            raise RuntimeError(
                f"{type(self).__name__} cannot take back {len(samples)} groups; use --data-source-path "
                "slime.rollout.data_source.RolloutDataSourceWithBuffer"
            )

    def state_dict(self) -> dict[str, Any]:
        """The place: plain values only."""
        return {
            "sample_offset": self.sample_offset,
            "epoch_id": self.epoch_id,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": copy.deepcopy(self.metadata),
            "num_prompts": len(self),
            **({"sources": self.dataset.state_dict()} if isinstance(self.dataset, Mixture) else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place that `state_dict` described."""
        if state.get("num_prompts", len(self)) != len(self):
            logger.warning(
                "the data source's state was saved with %d prompts, but --prompt-data %s has %d now",
                *(state["num_prompts"], self.args.prompt_data, len(self)),
            )
        place = self._place_in(state)
        self.sample_offset = place["sample_offset"]
        self.epoch_id = place["epoch_id"]
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = dict(state["metadata"])
        if isinstance(self.dataset, Mixture):
            self.dataset.load_state_dict(state.get("sources", {}))
        self._order_epoch()

    def _place_in(self, state: dict[str, Any]) -> dict[str, Any]:
        """The place in one file, also where a mixture was saved: the file's own, or its beginning."""
        if "sources" not in state or not isinstance(self.dataset, Dataset):
            return state
        if self.dataset.name not in state["sources"]:
            logger.warning(
                "the saved state is of the data sets %s: --prompt-data %s begins at its first prompt",
                ", ".join(state["sources"]),
                self.args.prompt_data,
            )
        return {"sample_offset": 0, "epoch_id": 0} | state["sources"].get(self.dataset.name, {})

    def save(self, rollout_id: int) -> None:
        """Write the state, as it is now, as that after this rollout under --save; complete or not at all.

        Raises:
            OSError, RuntimeError: it cannot be written (`slime.utils.errors`); one that was there stays.
        """
        if self.args.save is None:
            return
        import torch  # a second of import that only a saving process pays

        path = state_path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".tmp{os.getpid()}")
        with on_error(lambda: temporary.unlink(missing_ok=True)):
            # Readable for those with whom the checkpoint is shared; a resumed run trusts what is in it.
            with open_new(temporary, mode=READABLE) as file:
                torch.save({**self.state_dict(), "trained_at": WeightClock().trained_at(rollout_id)}, file)
            (entry,) = entries_of(path.parent, [temporary]).values()
            write_manifest(manifest_of_state(path), {path.name: entry})
            os.replace(temporary, path)
        to_disk(path.parent)

    def load(self, rollout_id: int | None = None) -> None:
        """Restore the state that --load holds for this rollout; without --load or a rollout, begin anew.

        Raises:
            UsageError: the state is damaged; or its buffer holds objects (what user code put on its samples),
                which only a run trusts that goes on from its own --save.
        """
        if self.args.load is None or rollout_id is None or rollout_id < 0:
            return
        path = state_path(self.args.load, rollout_id)
        if not path.exists():
            logger.warning("no data source state at %s: prompts start from the first epoch's beginning", path)
            return
        is_own = self.args.save is not None and os.path.realpath(self.args.save) == os.path.realpath(self.args.load)
        remedy = f"only a run that saves there too trusts it; if --load {self.args.load} is your own, --save it there"
        self.load_state_dict(load_dump(path, trusted=is_own, remedy=remedy))
        logger.info("data source goes on at prompt %d of epoch %d (%s)", self.sample_offset, self.epoch_id, path)


def _open_datasets(args: Args) -> Dataset | Mixture:
    sources = sources_of(args) or prompt_sources(args)
    opened = [(source, _open_dataset(args, source)) for source in sources]
    if len(opened) == 1:
        return opened[0][1]
    return Mixture(opened, shuffles=args.rollout_shuffle)


def _open_dataset(args: Args, source: PromptSource) -> Dataset:
    trust = args.trust_remote_code
    return Dataset(
        source.path,
        load_tokenizer(args.hf_checkpoint, trust_remote_code=trust),
        load_processor(args.hf_checkpoint, trust_remote_code=trust) if source.multimodal_keys else None,
        source.max_prompt_len,
        prompt_key=source.input_key,
        multimodal_keys=source.multimodal_keys,
        label_key=source.label_key,
        tool_key=source.tool_key,
        metadata_key=source.metadata_key,
        seed=args.rollout_seed,
        apply_chat_template=source.apply_chat_template,
        apply_chat_template_kwargs=source.apply_chat_template_kwargs,
        source=source,
        truncation=args.prompt_truncation,
        num_workers=args.filter_prompts_workers,
        skip_malformed=args.skip_malformed_data,
        keep_messages=args.reward_model_path is not None,
        images=image_options(args),
        stream_window=args.stream_shuffle_rows if args.stream_prompts or is_stream(source.path) else None,
    )


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The prompt file behind a buffer of groups: what was given back is handed out first. The buffer is saved too."""

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.buffer: list[Group] = []
        self._pick = load_function(args.buffer_filter_path) if args.buffer_filter_path else pop_first

    def get_samples(self, num_samples: int) -> list[Group]:
        """Groups from the buffer, as the buffer filter picks them, filled up with new prompts."""
        groups: list[Group] = []
        if self.buffer and num_samples:
            if path := self.args.buffer_filter_path:
                with blame_hook(f"--buffer-filter-path {hook_name(path)}"):
                    picked = self._pick(self.args, None, self.buffer, num_samples)
                groups = list(check_picked(self.args, picked, self.buffer, num_samples))
            else:  # the check looks through the whole buffer
                groups = pop_first(self.args, None, self.buffer, num_samples)
        return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, samples: list[Group]) -> None:
        """Append groups to the buffer.

        Raises:
            ValueError: something is no group of n_samples_per_prompt samples.
        """
        for group in samples:
            if not isinstance(group, list) or len(group) != self.args.n_samples_per_prompt:
                raise ValueError(
                    f"the buffer takes groups of {self.args.n_samples_per_prompt} samples (--n-samples-per-prompt), "
                    f"not {len(group) if isinstance(group, list) else type(group).__name__}"
                )
            self.buffer.append(group)

    def get_buffer_length(self) -> int:
        """Groups in the buffer."""
        return len(self.buffer)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Merge into the metadata that is saved with the state."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """The metadata that is saved with the state."""
        return self.metadata

    def state_dict(self) -> dict[str, Any]:
        """The place and the buffer's groups."""
        made: dict[int, Any] = {}
        buffer = [[with_plain_images(copy.deepcopy(sample).to_dict(), made) for sample in g] for g in self.buffer]
        return {**super().state_dict(), "buffer": buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place that `state_dict` described, with its buffer.

        What was generated of it has weight versions. A process that has had no sync yet counts from 1 again, so they
        are counted back from there: otherwise old tokens would be taken for new ones (--max-weight-staleness).
        """
        super().load_state_dict(state)
        self.buffer = samples_of(state.get("buffer", []))
        trained_at = state.get("trained_at")
        if trained_at is not None and WeightClock().version is None:
            for sample in (sample for group in self.buffer for sample in group):
                sample.weight_versions = of_earlier_run(sample.weight_versions, trained_at)


class PolicyDataSource(DataSource):
    """The prompt files of several policies (--lora-policies), each as of a run of its own; the default for them.

    A sample's metadata says whose it is, and which built-in reward it gets. Groups are numbered over all policies.
    """

    def __init__(self, args: Args) -> None:
        self.sources = {policy.name: RolloutDataSourceWithBuffer(policy.of(args)) for policy in policies_of(args)}
        self.policies, self._args = policies_of(args), args

    def __len__(self) -> int:
        return len(self.sources[self.policies[0].name])

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next `num_samples` groups of each policy, in turn."""
        drawn = [self._of(number, num_samples) for number in range(len(self.policies))]
        return [group for turn in zip(*drawn, strict=True) for group in turn]

    def _of(self, number: int, num_samples: int) -> list[Group]:
        policy, count = self.policies[number], len(self.policies)
        groups = self.sources[policy.name].get_samples(num_samples)
        for sample in (sample for group in groups for sample in group if POLICY not in sample.metadata):
            sample.group_index = needed(sample.group_index) * count + number
            sample.index = needed(sample.index) * count + number
            sample.metadata = {**sample.metadata, POLICY: policy.name}
            if policy.reward_path:
                sample.custom_rm_path = policy.reward_path
            elif policy.reward:
                sample.metadata["rm_type"] = policy.reward
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Give groups back to their policies."""
        for group in samples:
            self.sources[group[0].metadata[POLICY]].add_samples([group])

    def save(self, rollout_id: int) -> None:
        """As of one policy; its state holds the places of all."""
        first = next(iter(self.sources.values()))
        first.metadata.pop(_POLICIES, None)
        trained = {"trained_at": WeightClock().trained_at(rollout_id)}
        first.metadata[_POLICIES] = {name: source.state_dict() | trained for name, source in self.sources.items()}
        first.save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Restore the place of every policy; one that the state does not know begins anew."""
        state = RolloutDataSourceWithBuffer(self.policies[0].of(self._args))
        state.load(rollout_id)
        for name, of_one in state.metadata.get(_POLICIES, {}).items():
            if name in self.sources:
                self.sources[name].load_state_dict(of_one)


def pop_first(args: Args, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """The default buffer filter: first in, first out."""
    picked = buffer[:num_samples]
    del buffer[: len(picked)]
    return picked
