"""The schedules of train.py and train_async.py, on a fake run that writes down the verbs it is asked for.

The order of the verbs is all that the two drivers decide, so the list of calls is their whole behaviour.
"""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

import train
import train_async
from slime.checkpoints.paths import TRACKER_FILE, state_path
from slime.config.args import Args
from slime.ray import checkpoints, driver, run_parts, schedule
from slime.ray.lifetime import RunPlan
from slime.ray.rollout.shares import HOOKS_ON_SAMPLES
from slime.ray.run import TrainingRun
from slime.ray.run_parts import RunParts
from slime.ray.schedule import ExitRequest, attempts
from slime.ray.utils import ActorFailure, ActorLost
from slime.utils.errors import UsageError


class FakeRun(TrainingRun):
    """Real periods and plan, recorded verbs."""

    calls: list[str]
    evaluating: int | None = None

    def _start(self):
        self.plan = RunPlan(
            start_rollout_id=self.args.first, num_rollout=self.args.num_rollout, num_rollout_per_epoch=9
        )
        self.calls = self.args.calls
        self.upkeep.version, self.upkeep.sends_weights = 1, True

    def finish(self, *, failed=False):
        self.calls.append("finish")

    def start_generate(self, rollout_id):
        self.calls.append(f"start {rollout_id}")
        return rollout_id

    def wait_generated(self, pending):
        self.calls.append(f"wait {pending}")
        return [pending]

    def drain(self, pending):
        self.calls.append(f"drain {pending}")

    def train_step(self, rollout_id, data):
        assert data == [rollout_id]
        self.calls.append(f"train {rollout_id}")

    def save_if_due(self, rollout_id):
        self._end_if_asked(rollout_id)
        if self._save_is_due(rollout_id):
            self.calls.append(f"save {rollout_id}")

    def sync_weights(self):
        self.upkeep.version += 1
        self.calls.append("sync")

    def _start_eval(self, rollout_id, *, step):
        self.finish_eval()
        self.evaluating = step
        self.calls.append(f"eval {step}")

    def finish_eval(self):
        if self.evaluating is not None:
            self.calls.append(f"evaluated {self.evaluating}")
        self.evaluating = None


NO_EXIT = {
    "exit_signal_handler": False,
    "exit_signal": "SIGTERM",
    "exit_duration_in_mins": None,
    "async_save": False,
}


def run_args(**changes):
    defaults = {
        "first": 0,
        "num_rollout": 2,
        "save": "somewhere",
        "save_hf": None,
        "save_interval": None,
        "eval_interval": 1,
        "eval_only": False,
        "skip_eval_before_train": False,
        "update_weights_interval": 1,
        "async_buffer_size": 1,
        "max_weight_staleness": None,
        "update_weights_in_flight": False,
        "debug_train_only": False,
        "debug_rollout_only": False,
        "colocate": False,
        "release_train": False,
        "max_restarts": 0,
        "use_fault_tolerance": False,
        "elastic_rollout": False,
        "deterministic": False,
        "peer_checkpoint_interval": None,
        **NO_EXIT,
        **dict.fromkeys(HOOKS_ON_SAMPLES),
        "calls": [],
    }
    return SimpleNamespace(**(defaults | changes))


@pytest.fixture(params=[train, train_async])
def driver_module(request, monkeypatch):
    monkeypatch.setattr(request.param, "TrainingRun", FakeRun)
    return request.param


def calls_of(module, **changes):
    args = run_args(**changes)
    module.train(args)
    return args.calls


def test_the_synchronous_driver_trains_saves_syncs_and_evaluates_in_this_order(monkeypatch):
    monkeypatch.setattr(train, "TrainingRun", FakeRun)
    assert calls_of(train) == [
        *["eval 0", "evaluated 0"],
        *["start 0", "wait 0", "train 0", "sync", "eval 1", "evaluated 1"],
        *["start 1", "wait 1", "train 1", "save 1", "sync", "eval 2", "evaluated 2"],
        "finish",
    ]


def test_both_drivers_evaluate_after_the_last_rollout_though_the_interval_does_not_divide(driver_module):
    calls = calls_of(driver_module, num_rollout=3, eval_interval=2, save=None)
    assert [call for call in calls if call.startswith("evaluated")] == ["evaluated 0", "evaluated 2", "evaluated 3"]


def test_the_asynchronous_driver_generates_one_rollout_ahead_and_drains_before_each_sync(monkeypatch):
    monkeypatch.setattr(train_async, "TrainingRun", FakeRun)
    assert calls_of(train_async, num_rollout=3, eval_interval=None, save=None) == [
        *["start 0", "wait 0", "start 1", "train 0", "drain 1", "sync"],
        *["wait 1", "start 2", "train 1", "drain 2", "sync"],
        *["wait 2", "train 2", "drain None", "sync"],
        "finish",
    ]


def test_the_asynchronous_driver_syncs_every_interval_and_after_the_last_rollout(monkeypatch):
    monkeypatch.setattr(train_async, "TrainingRun", FakeRun)
    calls = calls_of(train_async, num_rollout=3, update_weights_interval=2, eval_interval=None, save=None)
    assert [call for call in calls if call.split()[0] in ("train", "sync")] == [
        *["train 0", "train 1", "sync", "train 2", "sync"]
    ]


def test_the_data_source_is_saved_before_a_rollout_ahead_draws_its_prompts():
    """The manager runs its calls in order, so what counts is the order in which they are made."""
    asked = []

    class Method:
        def __init__(self, name):
            self.name = name

        def remote(self, *values):
            asked.append((self.name, *values))

    run = TrainingRun(run_args())
    run.plan = RunPlan(start_rollout_id=0, num_rollout=2, num_rollout_per_epoch=1)
    run.parts.manager = SimpleNamespace(
        generate=Method("generate"), train_data=Method("train_data"), save=Method("save")
    )
    run.start_generate(0)
    run.start_generate(1)
    begun = {rollout_id: [("generate", rollout_id), ("train_data",)] for rollout_id in range(2)}
    assert asked == [*begun[0], *begun[1], ("save", 1)], "an interval of None saves after the last only"
    run.args.save_interval = 1
    asked.clear()
    run.start_generate(0)
    run.start_generate(1)
    assert asked == [*begun[0], ("save", 0), *begun[1], ("save", 1)]


def warnings_of_a_run(caplog, *, trained, **profile):
    """What a run says at its end that trained on these rollouts."""
    flags = {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 5, "ray_timeline_path": None}
    run = TrainingRun(run_args(**(flags | profile)))
    run._trained = trained
    caplog.clear()
    run.finish()
    return caplog.text


def test_a_run_that_recorded_nothing_says_so_at_its_end(caplog):
    assert "this run trains on rollouts from 0 to 2; change them" in warnings_of_a_run(caplog, trained=range(3))
    assert "this run trains on no rollout" in warnings_of_a_run(caplog, trained=range(0))
    assert "name rollouts 3 to 4" in warnings_of_a_run(caplog, trained=range(5, 9))
    assert not warnings_of_a_run(caplog, trained=range(4))
    assert not warnings_of_a_run(caplog, trained=range(3), use_pytorch_profiler=False)


def test_both_drivers_only_evaluate_what_was_loaded_with_eval_only(driver_module):
    assert calls_of(driver_module, num_rollout=0, eval_only=True) == ["eval 0", "evaluated 0", "finish"]
    assert calls_of(driver_module, num_rollout=0, eval_only=True, first=5) == ["eval 5", "evaluated 5", "finish"]
    assert calls_of(driver_module, num_rollout=0, first=5) == ["finish"], "nothing to do, and not asked to evaluate"


def test_both_drivers_evaluate_before_training_unless_told_not_to(driver_module):
    assert calls_of(driver_module)[0] == "eval 0"
    assert calls_of(driver_module, skip_eval_before_train=True)[0] == "start 0"


def test_a_resumed_run_goes_on_at_its_rollout_and_does_not_evaluate_again(driver_module):
    calls = calls_of(driver_module, first=3, num_rollout=5)
    assert calls[0] == "start 3"
    assert [call for call in calls if call.startswith("train")] == ["train 3", "train 4"]


def test_both_drivers_end_after_the_rollout_in_which_a_signal_comes_and_save_it(driver_module, monkeypatch):
    """--exit-signal-handler: the signal comes while rollout 1 of 5 is trained."""
    train_step = FakeRun.train_step

    def train_and_ask(self, rollout_id, data):
        train_step(self, rollout_id, data)
        if rollout_id == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def start(self):
        begin(self)
        self._exit.listen()

    begin = FakeRun._start
    monkeypatch.setattr(FakeRun, "_start", start)
    monkeypatch.setattr(FakeRun, "train_step", train_and_ask)
    before = signal.getsignal(signal.SIGUSR1)
    calls = calls_of(driver_module, num_rollout=5, exit_signal_handler=True, exit_signal="SIGUSR1")
    assert signal.getsignal(signal.SIGUSR1) == before, "a second one does what it always did"
    assert [call for call in calls if call.startswith(("train", "save"))] == ["train 0", "train 1", "save 1"]
    assert calls[-1] == "finish" and "eval 2" not in calls


def test_a_run_whose_time_is_over_says_so(monkeypatch):
    """--exit-duration-in-mins 2"""
    now = [0.0]
    monkeypatch.setattr(schedule.time, "monotonic", lambda: now[0])
    request = ExitRequest(None, 2)
    assert request.is_possible and request.why() is None
    now[0] = 120.0
    assert request.why() == "--exit-duration-in-mins 2 are over"
    assert not ExitRequest(None, None).is_possible


def test_the_state_of_a_rollout_that_may_be_the_last_is_there_and_removed_if_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "get", lambda ref, *_: ref)
    run = TrainingRun(run_args(exit_duration_in_mins=60, save=str(tmp_path)))
    run.plan = RunPlan(start_rollout_id=0, num_rollout=9, num_rollout_per_epoch=9)

    def save(rollout_id):
        path = state_path(str(tmp_path), rollout_id)
        path.parent.mkdir(exist_ok=True)
        path.write_text("state")

    nothing = SimpleNamespace(remote=lambda *_: None)
    run.parts.manager = SimpleNamespace(
        generate=nothing, train_data=nothing, save=SimpleNamespace(remote=lambda number: save(number) or "saved")
    )
    run.start_generate(0)
    assert state_path(str(tmp_path), 0).exists()
    run.save_if_due(0)
    assert not list((tmp_path / "rollout").iterdir()), "it was not the last"


def test_both_drivers_go_on_from_the_checkpoint_after_a_loss_and_end_when_no_restart_is_left(
    driver_module, monkeypatch
):
    """Rollout 1 loses a trainer each time; what follows begins at the checkpoint of rollout 0."""

    def lose(self, rollout_id, data):
        self.calls.append(f"train {rollout_id}")
        if rollout_id == 1 and self.calls.count("train 1") <= self.args.losses:
            raise ActorLost("rank 0 is lost")

    def start_again(self):
        self.calls.append("again")
        self.plan = RunPlan(start_rollout_id=1, num_rollout=3, num_rollout_per_epoch=9)

    monkeypatch.setattr(FakeRun, "train_step", lose)
    monkeypatch.setattr(FakeRun, "_start_again", start_again)
    changes = {"num_rollout": 3, "eval_interval": None, "save_interval": 1, "max_restarts": 2}
    calls = calls_of(driver_module, losses=2, **changes)
    assert [call for call in calls if call.startswith(("train", "again", "finish"))] == [
        *["train 0", "train 1", "again", "train 1", "again", "train 1", "train 2", "finish"]
    ]
    with pytest.raises(ActorLost):
        calls_of(driver_module, losses=3, **changes)


def test_a_loss_while_another_attempt_is_prepared_takes_one_too_and_no_other_failure_is_retried():
    prepared = []

    def start_again():
        prepared.append("again")
        if len(prepared) < 3:
            raise ActorLost("a new rank is lost too")

    done = []
    for attempt in attempts(3, start_again):
        with attempt:
            done.append(len(prepared))
            if not prepared:
                raise ActorLost("rank 0 is lost")
    assert done == [0, 3], "two preparations failed, the third did not"
    assert prepared == ["again"] * 3
    prepared.clear()
    with pytest.raises(ActorLost, match="a new rank"):
        for attempt in attempts(1, start_again):
            with attempt:
                raise ActorLost("rank 0 is lost")
    prepared.clear()
    with pytest.raises(ActorFailure, match="crooked"):
        for attempt in attempts(3, start_again):
            with attempt:
                raise ActorFailure("the weights are crooked")
    assert not prepared


def test_both_drivers_end_the_run_when_a_verb_fails(driver_module, monkeypatch):
    monkeypatch.setattr(FakeRun, "train_step", lambda self, rollout_id, data: 1 / 0)
    args = run_args()
    with pytest.raises(ZeroDivisionError):
        driver_module.train(args)
    assert args.calls[-1] == "finish"


def test_the_synchronous_driver_refuses_what_it_cannot_do_ahead():
    for name, flag in (("async_buffer_size", "--async-buffer-size"), ("update_weights_interval", "--update-weights-")):
        with pytest.raises(UsageError, match=rf"{flag}.* 2: train.py syncs the weights after every .* train_async.py"):
            train.check(run_args(**{name: 2}))
        train.check(run_args(debug_rollout_only=True, **{name: 2}))
    train.check(run_args())


def test_the_asynchronous_driver_refuses_colocated_engines():
    with pytest.raises(UsageError, match="--colocate"):
        train_async.check(run_args(colocate=True))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"update_weights_interval": 2}, "needs --update-weights-interval 1, not 2"),
        ({"exit_signal_handler": True}, "does not go with --exit-signal-handler"),
        ({"exit_duration_in_mins": 5}, "does not go with --exit-duration-in-mins"),
    ],
)
def test_the_asynchronous_driver_refuses_to_repeat_what_a_resumed_run_would_begin_otherwise(changes, sentence):
    with pytest.raises(UsageError, match=sentence):
        train_async.check(run_args(deterministic=True, **changes))
    train_async.check(run_args(**changes))
    train_async.check(run_args(deterministic=True, save=None, **changes))
    train_async.check(run_args(deterministic=True))


def test_the_asynchronous_driver_refuses_trainers_that_end_while_engines_generate():
    with pytest.raises(UsageError, match="--release-train: train_async.py trains while engines generate"):
        train_async.check(run_args(release_train=True))


@pytest.fixture
def parsed(monkeypatch, tmp_path):
    flags = {"save": None, "eval_only": False, "debug_rollout_only": False, "wandb_key": "a secret"}
    flags["colocate"] = False
    checked = SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path), dry_run=False, **flags), explicit=())
    monkeypatch.setattr(
        driver, "CommandLine", lambda: SimpleNamespace(answer=lambda argv: None, check=lambda argv: checked)
    )
    monkeypatch.setattr(driver, "accept", lambda checked: checked.args)
    monkeypatch.setattr(driver, "check_plan", lambda args: None)
    monkeypatch.setattr(driver.signal, "signal", lambda *_: None)
    return tmp_path


def drive_into(error: BaseException) -> int:
    def schedule(args):
        raise error

    return driver.drive(schedule)


def test_unusable_input_ends_with_status_2_and_one_line_per_problem(parsed, capsys):
    assert drive_into(UsageError(["--a is wrong", "--b too"])) == 2
    assert capsys.readouterr().err == "error: --a is wrong\nerror: --b too\n"


def test_a_failing_actor_is_one_line_and_its_traceback_a_file(parsed, capsys):
    assert drive_into(ActorFailure("training on rollout 3 failed: ValueError: no", "remote traceback")) == 1
    path = parsed / "logs" / "error.txt"
    expected = f"error: training on rollout 3 failed: ValueError: no\nfull traceback: {path}\n"
    assert capsys.readouterr().err == expected
    assert path.read_text().startswith("remote traceback")


def test_ctrl_c_is_no_traceback(parsed, capsys):
    assert drive_into(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_last_line_of_an_interrupted_run_is_the_command_that_goes_on(parsed, capsys, monkeypatch):
    args = driver.CommandLine().check([]).args
    args.save = str(parsed)
    line = ["python", "train.py", "--fresh-output", "--save", "my runs/1", "--wandb-key", "a secret"]
    monkeypatch.setattr(driver.sys, "orig_argv", line)
    assert drive_into(KeyboardInterrupt()) == 130
    command = "python train.py --save 'my runs/1' --wandb-key '***' --resume auto"
    assert capsys.readouterr().err == f"interrupted\nto begin again, for there is no checkpoint yet:\n{command}\n"
    (parsed / TRACKER_FILE).write_text("7")
    assert drive_into(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == f"interrupted\nto go on after rollout 7:\n{command}\n"
    args.eval_only = True
    assert drive_into(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n", "nothing is saved"


def test_sigterm_ends_with_its_own_status_whatever_ray_makes_of_it(parsed, monkeypatch):
    monkeypatch.setattr(driver._Terminated, "arrived", False)

    def schedule(args):
        with pytest.raises(SystemExit) as caught:
            driver._leave(15, None)
        assert caught.value.code == 143
        raise SystemExit(1)  # as Ray's wait raises it, whatever the code was

    assert driver.drive(schedule) == 143
    monkeypatch.setattr(driver._Terminated, "arrived", False)
    with pytest.raises(SystemExit) as caught:
        drive_into(SystemExit(7))
    assert caught.value.code == 7, "a hook's own"


def test_a_run_without_trainers_needs_no_slots_for_them_to_begin_again():
    """As with --debug-rollout-only, after the rollout manager is lost: no placement is asked for."""
    parts = RunParts(SimpleNamespace(elastic_dp=False))
    parts.use_what_is_left(resumes=False)
    assert parts.groups == []


@pytest.mark.parametrize(("per_epoch", "style"), [(4, "cosine"), (0, "constant"), (0, "cosine")])
def test_epochs_are_counted_before_trainers_get_their_schedule(monkeypatch, per_epoch, style):
    schedule = {"lr_warmup_fraction": None, "lr_warmup_iters": 0, "lr_decay_iters": None, "lr_decay_style": style}
    batch = {"rollout_batch_size": 2, "n_samples_per_prompt": 1, "global_batch_size": 2, "ppo_epochs": 1}
    length = {"num_rollout": None, "num_epoch": 3, "debug_rollout_only": False, "weight_decay_incr_style": "constant"}
    parts = RunParts(Args(**schedule, **batch, **length).freeze())
    counted = SimpleNamespace(remote=lambda: per_epoch)
    parts.manager = SimpleNamespace(count_rollouts_per_epoch=counted, start=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(run_parts, "get", lambda value, *_: value)
    monkeypatch.setattr(parts, "_start_trainers", lambda beside: {"num_rollout": parts.args.num_rollout})
    if not per_epoch and style == "cosine":
        with pytest.raises(UsageError, match="--lr-decay-style cosine needs the number of train steps"):
            parts.start()
    else:
        assert parts.start() == {"num_rollout": 3 * per_epoch or None}
