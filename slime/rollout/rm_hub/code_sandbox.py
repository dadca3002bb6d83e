"""The reward of rm_type code: the response's program run against test cases by a sandbox-fusion-compatible service.

The service runs the program (POST <--code-sandbox-url>/run_code); nothing that a model wrote runs in this process. It
knows how a program is found in a response, how test cases are written down and what passing means.

Test cases are metadata["test_cases"], else the label, as JSON text or as values:

- `{"inputs": [stdin, ...], "outputs": [stdout, ...]}`, or a list of `{"input": stdin, "output": stdout}`:
  a test passes when the program ends well and prints the expected text (blanks at line ends and empty last lines do
  not count);
- a list of statements such as `"assert add(1, 2) == 3"`, or one text of them: Python code that is run after the
  program, each entry by itself; a test passes when it ends without an error.

metadata may also hold `language` (else the tag of the fenced block, else python) and `run_timeout` in seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.args import Args
from slime.rollout.rm_hub.service import Service, ask, unusable
from slime.utils.async_utils import gather_or_cancel
from slime.utils.misc import needed
from slime.utils.types import Sample

OPENING_FENCE = re.compile(r"[ \t]*```[ \t]*([\w+#-]*)")
CLOSING_FENCE = re.compile(r"[ \t]*```[ \t]*")
END_OF_REASONING = "</think>"
LANGUAGES = {
    "py": "python",
    "python": "python",
    "python3": "python",
    "c++": "cpp",
    "cpp": "cpp",
    "java": "java",
    "js": "nodejs",
    "javascript": "nodejs",
    "nodejs": "nodejs",
    "ts": "typescript",
    "typescript": "typescript",
    "go": "go",
    "rust": "rust",
    "bash": "bash",
    "sh": "bash",
}
RUN_TIMEOUT_S = 10.0
COMPILE_TIMEOUT_S = 30.0
# The service queues requests itself when all its sandboxes are busy.
QUEUE_MARGIN_S = 60.0


@dataclass(frozen=True)
class TestCase:
    """One run of the program: `stdin` and the `stdout` it must print, or `code` that is run after it."""

    __test__ = False  # pytest: no test class

    stdin: str = ""
    stdout: str | None = None
    code: str = ""


def extract_code(response: str) -> tuple[str, str] | None:
    """(program, tag of the fence) of the last closed fenced block after the reasoning; None without one.

    Example:
        >>> extract_code("Here:\\n```python\\nprint(1)\\n```")
        ('print(1)\\n', 'python')
    """
    # Line by line: one expression over the text would look for the end of every fence that has none.
    closed: tuple[str, str] | None = None
    tag: str | None = None
    program: list[str] = []
    for line in response.rpartition(END_OF_REASONING)[2].split("\n"):
        if tag is None:
            if opening := OPENING_FENCE.match(line):
                tag, program = opening[1].lower(), []
        elif CLOSING_FENCE.fullmatch(line):
            closed, tag = ("".join(f"{text}\n" for text in program), tag), None
        else:
            program.append(line)
    return closed


def read_test_cases(label: Any, metadata: Mapping[str, Any]) -> list[TestCase]:
    """The test cases of a prompt, in the forms of the module's docstring.

    Raises:
        ValueError: there are none, or they have no such form.
    """
    given = metadata.get("test_cases")
    given = label if given is None else given
    parsed = _from_json(given)
    cases = _pairs(parsed) if isinstance(parsed, Mapping) else [_case(entry) for entry in _as_list(parsed)]
    if not cases:
        raise ValueError(f"the code reward found no test cases in metadata['test_cases'] or the label: {given!r:.200}")
    return cases


def _from_json(value: Any) -> Any:
    """JSON text of a list or object as such; other text stays, it is code."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value] if value.strip() else []
    return list(value) if isinstance(value, list | tuple) else []


def _pairs(cases: Mapping[str, Any]) -> list[TestCase]:
    inputs, outputs = cases.get("inputs"), cases.get("outputs")
    if cases.get("fn_name"):
        raise ValueError("the code reward has no tests by function name (fn_name); write them as assert statements")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"test cases need 'inputs' and 'outputs', two lists of one length, got {dict(cases)!r:.200}")
    return [TestCase(stdin=_text(i), stdout=_text(o)) for i, o in zip(inputs, outputs, strict=True)]


def _case(entry: Any) -> TestCase:
    if isinstance(entry, str):
        return TestCase(code=entry)
    if isinstance(entry, Mapping):
        stdin, stdout = entry.get("input", entry.get("stdin")), entry.get("output", entry.get("stdout"))
        if stdout is not None:
            return TestCase(stdin=_text(stdin or ""), stdout=_text(stdout))
    raise ValueError(f"a test case is a statement or {{'input': stdin, 'output': stdout}}, not {entry!r:.200}")


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs agree but for blanks at line ends and empty last lines."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


async def code_reward(args: Args, response: str, sample: Sample) -> float:
    """1.0 when the response's program passes every test case, else 0.0; no program is 0.0 too.

    The first test runs alone, because most wrong programs already fail it; the others run side by side, at most
    --code-sandbox-concurrency requests at a time in this process.

    Raises:
        RewardError: the service failed.
        ValueError: the prompt has no test cases.
    """
    metadata = sample.metadata
    cases = read_test_cases(sample.label, metadata)
    found = extract_code(response)
    if found is None:
        return 0.0
    program, tag = found
    language = metadata.get("language") or LANGUAGES.get(tag, "python")
    runner = _Runner(args, sample, program=program, language=language)
    if not await runner.passes(cases[0]):
        return 0.0
    return float(all(await gather_or_cancel(runner.passes(case) for case in cases[1:])))


class _Runner:
    """One program and the service that runs it."""

    def __init__(self, args: Args, sample: Sample, *, program: str, language: str) -> None:
        self.sample, self.program, self.language = sample, program, language
        self.run_timeout_s = float(sample.metadata.get("run_timeout") or RUN_TIMEOUT_S)
        self.service = Service(
            "the code sandbox of --code-sandbox-url",
            needed(args.code_sandbox_url).rstrip("/") + "/run_code",
            max_in_flight=args.code_sandbox_concurrency,
            timeout_s=COMPILE_TIMEOUT_S + self.run_timeout_s + QUEUE_MARGIN_S,
            max_tries=5,
            proxy=args.http_proxy,
        )

    async def passes(self, case: TestCase) -> bool:
        """Whether the program passes one test."""
        payload = {
            "code": f"{self.program}\n{case.code}\n" if case.code else self.program,
            "language": "python" if case.code else self.language,
            "stdin": case.stdin,
            "compile_timeout": COMPILE_TIMEOUT_S,
            "run_timeout": self.run_timeout_s,
        }
        answer = await ask(self.service, payload, self.sample, reject=_sandbox_failure)
        if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
            raise unusable(self.service, self.sample, answer)
        if answer["status"] == "Failed":  # it did not compile, crashed, or ran too long
            return False
        printed = (answer.get("run_result") or {}).get("stdout") or ""
        return case.stdout is None or same_output(printed, case.stdout)


def _sandbox_failure(answer: Any) -> str | None:
    """Why the sandbox itself failed, which says nothing about the program."""
    if isinstance(answer, dict) and answer.get("status") == "SandboxError":
        return f"SandboxError: {str(answer.get('message'))[:500]}"
    return None
