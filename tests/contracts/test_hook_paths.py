"""What is said at parse time, before anything starts, about a path or a signature that does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.config.rules.files import check_hook, check_hooks
from slime.rollout.base_types import HOOKS
from slime.rollout.hooks.signatures import signature_problem
from tests.contracts.conftest import PATH_FORMS
from tests.unit.argument_lines import check, command_line  # noqa: F401  fixtures

WRONG_PATHS = {
    "user_package/__init__.py": "{flag}: {path} names a file but no function in it, and has no public coroutine; "
    "write {path}:function.",
    "user_package/wrong.py:absent": "{cannot}: user_package/wrong.py was found, but it has no attribute 'absent'.",
    "user_package.wrong.absent": "{cannot}: user_package.wrong was found, but it has no attribute 'absent'.",
    "user_package.wrong:absent": "{cannot}: user_package.wrong was found, but it has no attribute 'absent'.",
    "user_package.nowhere.fn": "{cannot}: no module 'user_package.nowhere' is on the Python path.",
    "nowhere.wrong:fn": "{cannot}: no module 'nowhere' is on the Python path.",
    "user_package/nowhere.py:fn": "{cannot}: there is no file {here}/user_package/nowhere.py.",
    "user_package.broken.fn": "{cannot}: user_package.broken imports 'surely_not_installed', which is not installed.",
    "": "{flag}: '' is no hook path: write pkg.module.attr, pkg.module:attr or path/to/file.py:attr.",
    "fn": "{flag}: 'fn' is no hook path: write pkg.module.attr, pkg.module:attr or path/to/file.py:attr.",
    "user_package.wrong:NUMBER": "{flag} {path} does not fit: it is a int, not a function.",
}
# (flag, function): (what it is called as, its signature, why that does not fit)
WRONG_SIGNATURES = {
    ("custom_generate_function_path", "wrong:hook_text"): (
        "(args, sample, sampling_params)",
        "(args, sample)",
        "too many positional arguments",
    ),
    ("rollout_sample_hook_path", "hooks:generate"): (
        "(args, sample)",
        "(args, sample, sampling_params)",
        "missing a required argument: 'sampling_params'",
    ),
    ("rollout_function_path", "hooks:generate"): (
        "(args, rollout_id, data_source, evaluation=...)",
        "(args, sample, sampling_params)",
        "got an unexpected keyword argument 'evaluation'",
    ),
    ("custom_rollout_log_function_path", "hooks:log_eval"): (
        "(rollout_id, args, samples, rollout_extra_metrics, rollout_time)",
        "(rollout_id, args, data, extra_metrics)",
        "too many positional arguments",
    ),
    ("buffer_filter_path", "hooks:convert"): (
        "(args, rollout_id, buffer, num_samples)",
        "(args, samples)",
        "too many positional arguments",
    ),
}
FITS = {
    "rollout_function_path": "rollout",
    "eval_function_path": "rollout",
    "custom_generate_function_path": "generate_and_tell",
    "rollout_sample_hook_path": "mark_later",
    "custom_rm_path": "reward",
    "dynamic_sampling_filter_path": "keep_even",
    "buffer_filter_path": "pop_last",
    "rollout_sample_filter_path": "remove_first",
    "rollout_all_samples_process_path": "see_all",
    "custom_reward_post_process_path": "double_rewards",
    "custom_convert_samples_to_train_data_path": "convert",
    "custom_rollout_log_function_path": "log",
    "custom_eval_rollout_log_function_path": "log_eval",
    "data_source_path": "Numbers",
}


def problems(attribute: str, path: str) -> list[str]:
    """The sentences about one hook flag, found as a command line finds them."""
    value = [path] if attribute == "rollout_sample_hook_path" else path
    return list(check_hooks({attribute: value}, {}, {attribute: HOOKS[attribute]}, signature_problem))


@pytest.mark.parametrize("path", WRONG_PATHS)
@pytest.mark.parametrize("attribute", FITS)
def test_a_path_that_leads_to_no_function_is_explained(user_path: Path, attribute: str, path: str):
    flag = "--" + attribute.replace("_", "-")
    cannot = f"{flag}: cannot load {path!r}"
    assert problems(attribute, path) == [WRONG_PATHS[path].format(flag=flag, path=path, cannot=cannot, here=user_path)]


@pytest.mark.parametrize(("attribute", "function"), WRONG_SIGNATURES)
@pytest.mark.parametrize("form", PATH_FORMS)
def test_a_signature_that_does_not_fit_is_explained(user_path: Path, attribute: str, function: str, form: str):
    module, name = function.split(":")
    path = PATH_FORMS[form].format(module=module, attribute=name)
    called, signature, why = WRONG_SIGNATURES[attribute, function]
    what = f"--{attribute.replace('_', '-')} {path} does not fit"
    assert problems(attribute, path) == [f"{what}: it is called as {called}, but its signature is {signature}: {why}."]


def test_a_data_source_without_its_methods_is_explained(user_path: Path):
    assert problems("data_source_path", "user_package.wrong.OnlyGives") == [
        "--data-source-path user_package.wrong.OnlyGives does not fit: OnlyGives has no add_samples and no save and "
        "no load and no __len__; a data source needs get_samples, add_samples, save, load, __len__."
    ]


@pytest.mark.parametrize(("attribute", "function"), FITS.items())
@pytest.mark.parametrize("form", PATH_FORMS)
def test_a_function_that_fits_passes(user_path: Path, attribute: str, function: str, form: str):
    assert problems(attribute, PATH_FORMS[form].format(module="hooks", attribute=function)) == []


def test_functions_of_an_evaluation_set_are_named_with_it(user_path: Path):
    option = "evaluation data set gsm: custom_rm_path"
    [sentence] = check_hook(option, "user_package.wrong:NUMBER", HOOKS["custom_rm_path"], signature_problem)
    assert sentence == f"{option} user_package.wrong:NUMBER does not fit: it is a int, not a function."


@pytest.mark.parametrize("path", ["user_package.wrong:hook_text", "user_package/wrong.py:hook_text"])
def test_a_command_line_is_refused_for_it(user_path: Path, check, path: str):  # noqa: F811
    path = f"{user_path}/{path}" if ".py" in path else path
    checked = check(f"--custom-generate-function-path {path}")
    [sentence] = [one for one in checked.problems.environment if path in one]
    assert sentence.startswith(f"--custom-generate-function-path {path} does not fit: it is called as (args, sample, ")
