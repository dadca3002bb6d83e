"""RolloutManager: the Ray actor that owns the data source, the engines and the rollout functions.

`generate` = rollout function; `train_data` = dump -> metrics -> `TrainData` -> one share per data-parallel rank in
Ray's object store. They are two calls so that memory of a GPU that is shared can change hands beside the second.
It does not know when rollouts happen (the driver does), and nothing about how the trainer uses the shares.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray

from slime.backends.sglang_utils.engine_client import MEMORY_TAGS
from slime.backends.sglang_utils.server_control import Probe
from slime.config.args import Args
from slime.observability import logging_utils
from slime.observability.eval_samples import EvalSample, pick_eval_samples
from slime.observability.progress import counts_under_way
from slime.observability.rollout_metrics import compute_eval_metrics, compute_rollout_metrics
from slime.ray import progress_board
from slime.ray.http_post import use_distributed_post
from slime.ray.placement_group import Slot
from slime.ray.ray_actor import RayActor
from slime.ray.rollout.dp_split import split_train_data
from slime.ray.rollout.engine_ends import EngineEnds
from slime.ray.rollout.engine_state import engine_state
from slime.ray.rollout.engine_watch import EngineWatch
from slime.ray.rollout.replacements import Replacements
from slime.ray.rollout.router_watch import RouterWatch
from slime.ray.rollout.servers import RolloutServers, start_rollout_servers
from slime.ray.rollout.share_transport import put_share
from slime.ray.utils import redirect_output
from slime.rollout.base_types import call_rollout_fn, flatten
from slime.rollout.fully_async_rollout import save_data_source, settle_worker, stop_worker
from slime.rollout.hook_errors import blame_hook, hook_name
from slime.rollout.hook_returns import check_data_source, check_train_data, check_trainable
from slime.rollout.policy_filtration import filter_train_data
from slime.rollout.rewards import post_process_rewards
from slime.rollout.sample_errors import check_distinct
from slime.rollout.train_data import samples_to_train_data
from slime.rollout.weight_versions import SyncSchedule, WeightClock, staleness, staleness_metrics
from slime.utils import stacks
from slime.utils.api_keys import use_keys
from slime.utils.dumps import load_samples, save_dump, subsample
from slime.utils.full_disk import line_of_full_disk
from slime.utils.http_utils import init_http_client
from slime.utils.misc import Box, hook_args, load_function, needed, spare_garbage_collector
from slime.utils.outages import OUTAGES, origin
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

WEIGHTS = ("weights",)
LOAD_DEADLINE_S = 1800.0  # prompts and user code; the driver waits as long for the start
CONCURRENCY_GROUPS = {"evaluation": 1, "control": 1, "memory": 1, "settling": 1, "state": 1}
HOOKS_ON_SAMPLES = (
    "custom_rollout_log_function_path",
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
)
"""Flags of the hooks that are called between the rollout function and the trainer."""
MetricRecord = tuple[dict[str, float], str]


class RolloutManager(RayActor):
    """Generates and evaluates.

    One method runs at a time, in the order of the calls: the driver relies on that. Some do not wait for that order:
    `eval`, so that an evaluation may go on beside a rollout; `set_weight_version`, so that a rollout that keeps
    requests in flight hears of a sync; those that move the engines' memory, which go on beside `train_data`; and
    `engine_state`, which the watchdog asks for whatever goes on.

    Args:
        args: the run's flags.
        engine_slots: each slot that engines take.
        log_path: where this process's log goes; what user code prints still reaches the driver's terminal.
    """

    def __init__(self, args: Args, engine_slots: list[Slot], *, log_path: str) -> None:
        _configure_output(log_path)
        stacks.can_be_asked()
        use_keys(vars(args).get("run_keys"))
        progress_board.publish(
            progress_board.MANAGER, lambda: {"under_way": [list(one) for one in counts_under_way()]}
        )
        logging_utils.init_tracking(args, primary=False)
        self.args = args
        self._slots = engine_slots
        self._servers: RolloutServers | None = None
        self._watch: EngineWatch | None = None
        self._router_watch: RouterWatch | None = None
        self._replacements: Replacements | None = None
        self._ends: EngineEnds | None = None
        self._updatable: list[Any] = []
        self._data_source: Any = None
        self._parallel_config: dict[str, int] = {}
        self._finish: Callable[[], tuple[list[Box], list[MetricRecord]]] | None = None

    def start(self) -> None:
        """Start the engines and their router (if the run has any); meanwhile open the data source and the hooks."""
        # The thread is the one that reads data: a child process started in it would end with it.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="data-source") as thread:
            loading = thread.submit(self._load_user_code)
            if self.args.engine_models:
                self._start_servers()
            loading.result(timeout=LOAD_DEADLINE_S)
        spare_garbage_collector()

    def _load_user_code(self) -> None:
        if _draws_prompts(self.args) and self._data_source is None:
            self._open_data_source(self.args)
        self._generate = load_function(self.args.rollout_function_path)
        self._evaluate = load_function(self.args.eval_function_path)
        if self.args.dump_details:
            self._save_tokenizer()

    def _open_data_source(self, args: Args) -> None:
        path = args.data_source_path
        with blame_hook(f"--data-source-path {hook_name(path)}", only_exits=True):
            source = load_function(path)(hook_args(args))
        self._data_source = check_data_source(path, source)

    def _start_servers(self) -> None:
        self._servers = start_rollout_servers(self.args, slots=self._slots)
        self._servers.publish()
        self._router_watch = RouterWatch(self._servers.models)
        self._router_watch.start()
        if self.args.check_weight_update_equal:
            self._servers.overwrite_weights()
        init_http_client(self.args)
        if self.args.use_distributed_post:
            use_distributed_post(self.args)
        if self.args.use_fault_tolerance:
            self._replacements = replacements = Replacements(self._servers, self.args)
            self._watch = EngineWatch(
                replacements.urls,
                replacements.lose,
                interval_s=self.args.rollout_health_check_interval,
                timeout_s=self.args.rollout_health_check_timeout,
                first_wait_s=self.args.rollout_health_check_first_wait,
            )
            self._watch.start()
            OUTAGES.listen(self._suspect)
        else:
            self._ends = EngineEnds(self._servers.models)
            self._ends.start()
            OUTAGES.listen(self._ends.suspect)

    def _suspect(self, url: str) -> None:
        """Look at the engines when a request to a router of the run has failed."""
        assert self._watch is not None and self._servers is not None
        if origin(url) in [router.url for router in self._servers.routers.values()]:
            self._watch.suspect()

    @ray.method(concurrency_group="control")
    def replace_engines(self) -> None:
        """Start engines in the places of lost ones; those of the trained model serve after `register_engines`."""
        if self._watch is None or self._replacements is None:
            return
        self._watch.look(Probe.SCHEDULES)
        if number := self._replacements.replace():
            logger.warning("%d engine(s) were started in place of lost ones", number)

    @ray.method(concurrency_group="control")
    def pause_watch(self) -> int:
        """Look at the engines no more until `register_engines`: they get weights.

        Returns:
            a number that has changed when engines were lost or replaced.
        """
        if self._watch is None or self._replacements is None:
            return 0
        self._watch.pause()
        self._watch.look(Probe.SCHEDULES)  # a sync fails as a whole if one of its engines is gone or hangs
        return self._replacements.count

    @ray.method(concurrency_group="control")
    def engines_failed(self, numbers: Sequence[int], why: str) -> int:
        """Lose engines with which a weight sync has failed; where it named none, those that do not answer.

        Args:
            numbers: of those that it names, among the last of `get_updatable_engines`.
            why: it failed.

        Returns:
            as `pause_watch`.
        """
        if self._watch is None or self._replacements is None:
            return 0
        before = self._replacements.count
        for number in numbers:
            self._replacements.lose_engine(self._updatable[number], why)
        for probe in (Probe.LISTENS, Probe.SCHEDULES):  # a scheduler may wait in a collective with one that is gone
            if self._replacements.count == before:
                self._watch.look(probe)
        return self._replacements.count

    @ray.method(concurrency_group="control")
    def ended_engines(self) -> list[str]:
        """Without fault tolerance, which engines have ended though nobody has told them to, and why."""
        return self._ends.look() if self._ends is not None else []

    @ray.method(concurrency_group="control")
    def lacks_engines(self) -> bool:
        """Whether a model has lost all of its engines, and none that was started in their place serves yet."""
        return self._replacements is not None and bool(self._replacements.without_engine())

    @ray.method(concurrency_group="control")
    def hold_requests(self) -> None:
        """Have requests wait until `register_engines`: memory of the engines changes hands during a rollout."""
        if self._replacements is not None:
            self._replacements.hold_requests()

    @ray.method(concurrency_group="control")
    def register_engines(self) -> None:
        """Put new engines, which have the trainer's weights now, behind the router, and watch all again."""
        if self._watch is not None and self._replacements is not None:
            self._replacements.register()
            self._watch.resume()

    @ray.method(concurrency_group="state")  # asked for while engines are replaced, which takes minutes
    def engine_state(self) -> dict[str, Any]:
        """Address -> what each router and engine is busy with, or why it does not tell; for the stall report."""
        if self._servers is None:
            return {}
        routers = [router.url for router in self._servers.routers.values()]
        return engine_state(routers, self._replacements.urls().values() if self._replacements else [])

    def count_rollouts_per_epoch(self) -> int:
        """As `get_num_rollout_per_epoch`, before the start: the data source is opened for it."""
        if _draws_prompts(self.args):
            self._open_data_source(self.args)
        return self.get_num_rollout_per_epoch()

    def get_num_rollout_per_epoch(self) -> int:
        """Rollouts that go once through the data set (at least 1); 0 where there is none, so no epoch ends.

        A replay has no data set either. A run without training asks for nothing that happens at an epoch's end.
        """
        if self._data_source is None:
            return 0 if self.args.load_debug_rollout_data else 1
        if not len(self._data_source):
            return 0
        return max(1, len(self._data_source) // self.args.rollout_batch_size)

    @ray.method(concurrency_group="control")
    def get_updatable_engines(self) -> tuple[list[Any], list[int]]:
        """The engines that take the trainer's weights, and the GPUs of each."""
        found = self._servers.updatable if self._servers else []
        self._updatable = [engine for engine, _ in found]
        return [engine for engine, _ in found], [num_gpus for _, num_gpus in found]

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
        behind the rollouts that were asked for."""
        settle_worker()

    def generate(self, rollout_id: int) -> None:
        """Make the samples of one rollout; `train_data`, to be called next, makes of them what the trainer takes."""
        start, begun = time.monotonic(), WeightClock().version
        samples, metrics = self._samples(rollout_id)
        rollout_time_s = time.monotonic() - start
        self._finish = functools.partial(self._train_data, rollout_id, samples, metrics, rollout_time_s, begun)
        if any(vars(self.args)[name] for name in HOOKS_ON_SAMPLES):
            done = self._finish()  # a hook may ask the engines, which will not answer once they release their memory
            self._finish = lambda: done

    def train_data(self) -> tuple[list[Box], list[MetricRecord]]:
        """The training data of the rollout that was generated last.

        Returns:
            one Box with an object reference per data-parallel rank (none without trainers), and the metric records;
            nothing where it was not generated, which whoever asked for it hears from `generate`.
        """
        finish, self._finish = self._finish, None
        return finish() if finish else ([], [])

    def _train_data(
        self,
        rollout_id: int,
        samples: list[Sample],
        metrics: dict[str, float] | None,
        rollout_time_s: float,
        begun: int | None,
    ) -> tuple[list[Box], list[MetricRecord]]:
        self._dump(samples, str(rollout_id))
        if self.args.custom_convert_samples_to_train_data_path:  # which makes of them what is checked and trained on
            check_distinct(self._source_name(rollout_id), samples)
        elif not self.args.debug_rollout_only:
            check_trainable(self.args, self._source_name(rollout_id), samples)
        self._check_staleness(samples, rollout_id)
        self._log_rollout(rollout_id, samples, metrics, rollout_time_s)
        if self.args.debug_rollout_only:
            return [], logging_utils.take_pending()
        data = self._convert(samples) | ({} if begun is None else {"weight_version": begun})
        shares = split_train_data(self.args, data, self._parallel_config)
        boxes = [put_share(share, self.args.rollout_data_transport) for share in shares]
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
        output = call_rollout_fn(self._evaluate, hook_args(self.args), rollout_id, self._data_source, evaluation=True)
        self._dump([s for result in output.data.values() for s in result.get("samples") or []], f"eval_{step}")
        extra = dict(output.metrics or {})
        own = self._call_log(
            "custom_eval_rollout_log_function_path", rollout_id, hook_args(self.args), output.data, extra
        )
        if own is not None:
            metrics = compute_eval_metrics(self.args, output.data) | extra | own
            logging_utils.log(self.args, {**metrics, "eval/step": step}, "eval/step")
        return logging_utils.take_pending(), pick_eval_samples(output.data, self.args.log_eval_samples)

    @ray.method(concurrency_group="memory")
    def offload(self) -> None:
        """Have the engines that share GPUs with the trainer release their memory (--offload-rollout)."""
        if self._servers is not None:
            if self._watch is not None:
                self._watch.pause()
            self._do_without(self._servers.release_memory())

    @ray.method(concurrency_group="memory")
    def onload(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Have them take it again: everything, or some kinds of it."""
        if self._servers is not None:
            self._do_without(self._servers.resume_memory(tags))

    def _do_without(self, failed: list[tuple[Any, Exception]]) -> None:
        """Lose engines that did not move their memory; raises the reason where others cannot take their places."""
        for engine, error in failed:
            if self._replacements is None or not self._replacements.lose_engine(engine, str(error)):
                raise error

    @ray.method(concurrency_group="memory")
    def onload_weights(self) -> None:
        """Make room for weights, which must be sent then: there is nothing in it."""
        self.onload(WEIGHTS)

    @ray.method(concurrency_group="memory")
    def onload_kv(self) -> None:
        """Take what is needed to generate, besides weights."""
        self.onload([tag for tag in MEMORY_TAGS if tag not in WEIGHTS])

    def save(self, rollout_id: int) -> str | None:
        """Write the data source's state, as it is after the generation of `rollout_id`.

        Returns:
            why it was not written, if its disk is full.
        """
        if self._data_source is None:  # a replay has none
            return None
        try:
            with blame_hook(f"--data-source-path {hook_name(self.args.data_source_path)}: save", only_exits=True):
                save_data_source(self._data_source, rollout_id)
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
        self._finish = None
        if self._data_source is not None:
            args = hook_args(self.args)
            args.load = load
            self._open_data_source(args)

    @ray.method(concurrency_group="control")
    def let_go_on(self) -> None:
        """Let engines go on that a weight sync has stopped and whose trainer is lost: requests wait in them, whose
        answers are of no use, but are waited for."""
        if self._servers is not None:
            self._servers.let_go_on()

    def load(self, rollout_id: int) -> None:
        """Read the data source's state of `rollout_id`."""
        if self._data_source is not None:
            with blame_hook(f"--data-source-path {hook_name(self.args.data_source_path)}: load", only_exits=True):
                self._data_source.load(rollout_id)

    @ray.method(concurrency_group="control")
    def dispose(self) -> None:
        """End the engines and the router; after a failure beside a rollout that will not end any more."""
        stop_worker()
        if self._router_watch is not None:
            self._router_watch.stop()
        if self._watch is not None:
            self._watch.stop()
        if self._ends is not None:
            self._ends.stop()
        if self._servers is not None:
            self._servers.shutdown()
            self._servers = None

    def _samples(self, rollout_id: int) -> tuple[list[Sample], dict[str, float] | None]:
        """The rollout's samples, generated or replayed (--load-debug-rollout-data), and metrics of their making."""
        template = self.args.load_debug_rollout_data
        if template is None:
            output = call_rollout_fn(
                self._generate, hook_args(self.args), rollout_id, self._data_source, evaluation=False
            )
            return flatten(output.samples), output.metrics
        samples = load_samples(template.format(rollout_id=rollout_id), option="--load-debug-rollout-data")
        return subsample(samples, self.args.load_debug_rollout_data_subsample), None

    def _source_name(self, rollout_id: int) -> str:
        """Where the samples come from, for an error."""
        if template := self.args.load_debug_rollout_data:
            return f"--load-debug-rollout-data {template.format(rollout_id=rollout_id)}"
        return f"--rollout-function-path {hook_name(self.args.rollout_function_path)}"

    def _convert(self, samples: list[Sample]) -> dict[str, Any]:
        if path := self.args.custom_convert_samples_to_train_data_path:
            with blame_hook(f"--custom-convert-samples-to-train-data-path {hook_name(path)}"):
                columns = load_function(path)(hook_args(self.args), samples)
            return check_train_data(self.args, columns)
        raw_rewards, rewards = post_process_rewards(self.args, samples)
        if path := self.args.custom_reward_post_process_path:  # it may have put teacher log-probs on the samples
            check_trainable(self.args, f"--custom-reward-post-process-path {hook_name(path)}", samples)
        data = dict(samples_to_train_data(samples, raw_rewards, rewards))
        return filter_train_data(self.args, data, samples) if self.args.pf_ppo_reweight else data

    def _log_rollout(
        self, rollout_id: int, samples: list[Sample], extra: dict[str, float] | None, rollout_time_s: float
    ) -> None:
        extra = dict(extra or {})  # the user's function may add to it
        given = (rollout_id, hook_args(self.args), samples, extra, rollout_time_s)
        own = self._call_log("custom_rollout_log_function_path", *given)
        if own is None:
            return
        metrics = compute_rollout_metrics(self.args, samples, rollout_time_s) | extra | own
        metrics |= staleness_metrics(samples, WeightClock().trained_at(rollout_id)) | self._server_metrics()
        logging_utils.log(self.args, {**metrics, "rollout/step": rollout_id}, "rollout/step")

    def _call_log(self, attribute: str, *given: Any) -> dict[str, float] | None:
        """What the user's log function, if there is one, adds to slime's metrics; None where it replaces them."""
        if not (path := vars(self.args)[attribute]):
            return {}
        with blame_hook(f"--{attribute.replace('_', '-')} {hook_name(path)}"):
            returned = load_function(path)(*given)
            if isinstance(returned, dict):
                return logging_utils.numbers(returned)
            return None if returned else {}

    def _server_metrics(self) -> dict[str, float]:
        found = self._replacements.metrics() if self._replacements else {}
        if self._router_watch is not None:
            found["rollout/router_restarts"] = float(self._router_watch.count)
        return found

    def _check_staleness(self, samples: list[Sample], rollout_id: int) -> None:
        bound, age = self.args.max_weight_staleness, staleness(samples, WeightClock().trained_at(rollout_id))
        if bound is not None and age > bound:
            raise RuntimeError(
                f"--max-weight-staleness {bound}: --rollout-function-path {self.args.rollout_function_path} returned "
                f"tokens for rollout {rollout_id} that are {age} versions older than the trainer then"
            )

    def _dump(self, samples: list[Sample], rollout_id: str) -> None:
        if self.args.save_debug_rollout_data is None:
            return
        template = self.args.save_debug_rollout_data
        path = Path(template.format(rollout_id=rollout_id))
        if "{rollout_id" not in template and rollout_id.startswith("eval_"):
            path = path.with_name(f"eval_{path.name}")  # one file of rollouts, which can be replayed, and one of these
        save_dump(path, {"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]})

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
