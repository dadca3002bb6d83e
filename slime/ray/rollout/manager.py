"""RolloutManager: the Ray actor that owns the data source, the engines and the rollout functions.

`generate` = rollout function; `train_data` = dump -> metrics -> `TrainData` -> one share per data-parallel rank in
Ray's object store. They are two calls so that memory of a GPU that is shared can change hands beside the second.
The driver decides when rollouts happen.
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray

from slime.config.args import Args
from slime.observability import logging_utils
from slime.observability.rollout_metrics import log_eval_rollout_data
from slime.observability.rollout_records.recorder import SampleRecorder
from slime.observability.trackers import EvalSample, pick_eval_samples
from slime.processes.progress import counts_under_way
from slime.ray.placement import Slot
from slime.ray.rollout.engine_control import EngineControl
from slime.ray.rollout.shares import Generated, Shares, call_log_hook, dump_samples, make_samples, make_shares
from slime.ray.utils import MANAGER, publish_progress, redirect_output
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.fully_async_rollout import save_data_source, settle_worker, stop_worker
from slime.rollout.hooks.errors import blame_hook, hook_name
from slime.rollout.hooks.returns import check_data_source
from slime.rollout.sampling.weight_versions import SyncSchedule, WeightClock
from slime.utils.errors import line_of_full_disk
from slime.utils.http.api_keys import use_keys
from slime.utils.misc import hook_args, load_function, needed, spare_garbage_collector
from slime.utils.processing_utils import load_processor, load_tokenizer

logger = logging.getLogger(__name__)

LOAD_DEADLINE_S = 1800.0  # prompts and user code; the driver waits as long for the start
RECORDS_DEADLINE_S = 20.0  # the driver waits a minute for `dispose`
CONCURRENCY_GROUPS = {"evaluation": 1, "control": 1, "memory": 1, "settling": 1, "state": 1}
MetricRecord = tuple[dict[str, float], str]


class RolloutManager(EngineControl):
    """Generates and evaluates.

    One method runs at a time, in the order of the calls: the driver relies on that. Some do not wait for that order:
    `eval`, so that an evaluation may go on beside a rollout; `set_weight_version`, so that a rollout that keeps
    requests in flight is notified of a sync; those that move the engines' memory, which run next to `train_data`; and
    `engine_state`, which the watchdog asks for whatever goes on.

    Args:
        args: the run's flags.
        engine_slots: each slot that engines take.
        log_path: where this process's log goes; what user code prints still reaches the driver's terminal.

    Attributes:
        data_source: None in a replay.
        rollout_function, eval_function: the hooks.
        recorder: of samples, for pages.
    """

    def __init__(self, args: Args, engine_slots: list[Slot], *, log_path: str) -> None:
        _configure_output(log_path)
        use_keys(vars(args).get("run_keys"))
        publish_progress(MANAGER, lambda: {"under_way": [list(one) for one in counts_under_way()]})
        logging_utils.init_tracking(args, primary=False)
        super().__init__(args, engine_slots)
        self.data_source: Any = None
        self._parallel_config: dict[str, int] = {}
        self._generated: Generated | None = None
        self.recorder = SampleRecorder(args)

    def start(self) -> None:
        """Start the engines and their router (if the run has any); meanwhile open the data source and the hooks."""
        # The thread is the one that reads data: a child process started in it would end with it.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="data-source") as thread:
            loading = thread.submit(self.load_user_code)
            if self.args.engine_models:
                self._start_engines()
            loading.result(timeout=LOAD_DEADLINE_S)
        spare_garbage_collector()

    def load_user_code(self) -> None:
        """Open the data source, and load the functions of rollouts and evaluations."""
        if _draws_prompts(self.args) and self.data_source is None:
            self._open_data_source(self.args)
        self.rollout_function = load_function(self.args.rollout_function_path)
        self.eval_function = load_function(self.args.eval_function_path)
        if self.args.dump_details:
            self._save_tokenizer()

    def _open_data_source(self, args: Args) -> None:
        path = args.data_source_path
        with blame_hook(f"--data-source-path {hook_name(path)}", only_exits=True):
            source = load_function(path)(hook_args(args))
        self.data_source = check_data_source(path, source)

    def count_rollouts_per_epoch(self) -> int:
        """As `get_num_rollout_per_epoch`, before the start: the data source is opened for it."""
        if _draws_prompts(self.args):
            self._open_data_source(self.args)
        return self.get_num_rollout_per_epoch()

    def get_num_rollout_per_epoch(self) -> int:
        """Rollouts that go once through the data set (at least 1); 0 where there is none, so no epoch ends.

        A replay has no data set either. A run without training asks for nothing that happens at an epoch's end.
        """
        if self.data_source is None:
            return 0 if self.args.load_debug_rollout_data else 1
        if not len(self.data_source):
            return 0
        return max(1, len(self.data_source) // self.args.rollout_batch_size)

    def set_train_parallel_config(self, config: dict[str, int]) -> None:
        """Tell how many data-parallel ranks share a rollout (`dp_size`, `cp_size`, ...)."""
        self._parallel_config = config

    def set_sync_schedule(self, schedule: SyncSchedule) -> None:
        """Tell which rollouts this run does, and when the weights are synced."""
        WeightClock().follow(schedule)

    @ray.method(concurrency_group="control")
    def set_weight_version(self, version: int) -> None:
        """Tell that every engine has the weights of this sync."""
        WeightClock().publish(version)

    @ray.method(concurrency_group="settling")
    def settle(self) -> None:
        """Wait until every group that may be begun with the engines' weights is finished, where groups are begun
        for later rollouts than those that were asked for."""
        settle_worker()

    def generate(self, rollout_id: int) -> None:
        """Make the samples of one rollout; `train_data`, to be called next, makes of them what the trainer takes."""
        self._generated = make_samples(self.args, rollout_id, self.rollout_function, self.data_source)

    @ray.method(num_returns=2)
    def train_data(self) -> tuple[Shares, list[MetricRecord]]:
        """The training data of the rollout that was generated last.

        Returns:
            what `make_shares` does, and the metric records;
            nothing where it was not generated: the caller gets the error from `generate`.
        """
        rollout, self._generated = self._generated, None
        if rollout is None:
            return [], []
        of_engines = self._engine_metrics() | self._note_drafts(rollout.samples)
        boxes = make_shares(self.args, rollout, self._parallel_config, of_engines, self.recorder)
        return boxes, logging_utils.take_pending()

    @ray.method(concurrency_group="evaluation")
    def eval(self, rollout_id: int, step: int) -> tuple[list[MetricRecord], list[EvalSample]]:
        """Evaluate the engines' current weights.

        Args:
            rollout_id: passed to the evaluation function and to hooks.
            step: value of "eval/step", the rollouts that the weights were trained on; it names the dump, too.

        Returns:
            the metric records, and the answers to show (--log-eval-samples).
        """
        output = call_rollout_fn(
            self.eval_function, hook_args(self.args), rollout_id, self.data_source, evaluation=True
        )
        made = {n: [*(r.get("samples") or ()), *(r.get("untrusted") or ())] for n, r in output.data.items()}
        dump_samples(self.args, [sample for samples in made.values() for sample in samples], f"eval_{step}")
        self.recorder.evaluation(step, made)
        extra = dict(output.metrics or {})
        given = (rollout_id, hook_args(self.args), output.data, extra)
        own = call_log_hook(self.args, "custom_eval_rollout_log_function_path", *given)
        if own is not None:
            log_eval_rollout_data(step, self.args, output.data, extra | own)
        return logging_utils.take_pending(), pick_eval_samples(output.data, self.args.log_eval_samples)

    def save(self, rollout_id: int) -> str | None:
        """Write the data source's state, as it is after the generation of `rollout_id`.

        Returns:
            why it was not written, if its disk is full.
        """
        if self.data_source is None:  # a replay has none
            return None
        try:
            with blame_hook(f"--data-source-path {hook_name(self.args.data_source_path)}: save", only_exits=True):
                save_data_source(self.data_source, rollout_id)
        except (OSError, RuntimeError) as error:  # torch's serializer makes the one of the other
            if (problem := line_of_full_disk(error)) is None:
                raise
            return f"the data source's state found no room ({problem})"
        return None

    def begin_again(self, load: str | None) -> None:
        """Forget what was drawn and generated, after all calls before this one: a data source as at the start, which
        takes its state from `load`.

        What a user's rollout function keeps for itself stays as it is.
        """
        stop_worker()
        self._generated = None
        if self.data_source is not None:
            args = hook_args(self.args)
            args.load = load
            self._open_data_source(args)

    def load(self, rollout_id: int) -> None:
        """Read the data source's state of `rollout_id`."""
        if self.data_source is not None:
            with blame_hook(f"--data-source-path {hook_name(self.args.data_source_path)}: load", only_exits=True):
                self.data_source.load(rollout_id)

    @ray.method(concurrency_group="control")
    def dispose(self) -> None:
        """End the engines and the router; after a failure next to a rollout that will not end any more."""
        with ExitStack() as ending:  # the last that is given comes first; each, whatever fails before it
            ending.callback(self.recorder.finish, RECORDS_DEADLINE_S)
            ending.callback(self._end_engines)
            ending.callback(stop_worker)

    def _save_tokenizer(self) -> None:
        """Beside the dumps of --dump-details: what turns their tokens into text again."""
        args, directory = self.args, Path(needed(self.args.dump_details)) / "tokenizer"
        load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code).save_pretrained(directory)
        processor = load_processor(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        if processor is not None:
            processor.save_pretrained(directory.with_name("processor"))


def _draws_prompts(args: Args) -> bool:
    """Whether the data source is used: a replay draws nothing from it, an evaluation nothing from slime's own."""
    if args.load_debug_rollout_data is not None:
        return False
    return not args.eval_only or not args.data_source_path.startswith("slime.rollout.data_source.")


def _configure_output(log_path: str) -> None:
    """Log to a file; warnings and what user code prints go to stdout, which Ray shows on the driver's terminal."""
    redirect_output(log_path, stdout=False)
    logging_utils.configure_logger("rollout manager")
    visible = logging.StreamHandler(sys.stdout)
    visible.setLevel(logging.WARNING)
    visible.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(visible)
