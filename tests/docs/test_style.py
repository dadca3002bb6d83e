"""Pages are plain English: docs/STYLE.md, as far as a program can check it; paths and flags that they name exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {f"reference/{name}" for name in ("flags", "hooks", "metrics", "models", "compatibility", "api")}
PAGES = {str(path.relative_to(ROOT / "docs").with_suffix("")): path for path in sorted(ROOT.glob("docs/**/*.md"))}
CHECKED = {name: path for name, path in PAGES.items() if name not in GENERATED and not name.startswith("zh/")}
MAX_LINE, MAX_PARAGRAPH, MAX_SENTENCE, MAX_PAGE = 120, 90, 40, 1200
# The left column of the table of plain words: turns that only these pages know.
DIALECT = re.compile(
    r"\b(?:knows? (?:no(?:thing)?|not)\b|goes? on with|gone on with|went on with|is no [a-z]+ of ours|are waited for|"
    r"lies? behind|behind the router|beside (?:it|the|training)|of which its|is told|are told|be told)",
)
PLACES = ("scripts/", "tools/", "examples/", "benchmarks/", "tests/", "docs/", "slime/", "docker/")
PARSERS = ("slime/cli.py", "slime/backends/megatron_utils/server/flags.py", "slime/backends/sglang_utils/join.py")
# Flags of other programs that pages show.
FOREIGN = {
    "--pid", "--group-add", "--build-arg",
    "--address", "--generate", "--local-dir", "--dest", "--no-deps", "--target", "--gpus", "--ipc",
    "--shm-size", "--ulimit", "--rm", "--nodes", "--gpus-per-node", "--folder", "--lone-engine", "--network",
    "--learning-rate", "--security-opt", "--max-sandboxes", "--image", "--nproc-per-node", "--generators",
    "--max-groups", "--container-mounts", "--disable-radix-cache", "--no-is-symmetric", "--rollout-bach-size",
    "--tools", "--bare", "--show", "--max-output", "--tool-timeout", "--system-prompt", "--protocol",
}  # fmt: skip


def prose(text: str) -> list[str]:
    """Return the paragraphs and list items of a page, without tables, code and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(\||#|<!--|!\[|> )", line)]
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
    return [" ".join(block.split()) for block in blocks if block.strip()]


def sentences(paragraph: str) -> list[str]:
    return re.split(r"(?<=[.:;!?])\s+(?=[A-Z`*\[(])", paragraph)


def violations(text: str, *, is_short: bool) -> list[str]:
    """Return what of docs/STYLE.md a page breaks."""
    lines = text.splitlines()
    found = [
        f"line {n}: {len(line)} characters"
        for n, line in enumerate(lines, 1)
        if len(line) > MAX_LINE and not line.startswith("|")
    ]
    for paragraph in prose(text):
        if len(paragraph.split()) > MAX_PARAGRAPH:
            found.append(f"{len(paragraph.split())} words in a paragraph: {paragraph[:60]}")
        long = [sentence for sentence in sentences(paragraph) if len(sentence.split()) > MAX_SENTENCE]
        found += [f"{len(sentence.split())} words in a sentence: {sentence[:60]}" for sentence in long]
        found += [f"dialect: {match.group()}" for match in DIALECT.finditer(paragraph)]
    words = len(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).split())
    if is_short and words > MAX_PAGE:
        found.append(f"{words} words")
    if not any(line.startswith(("**In short:**", "**You will:**")) for line in lines[:6]):
        found.append("no summary on top: **In short:** ...")
    if "**Next:**" not in text:
        found.append("no next step at the end: **Next:** ...")
    return found


@cache
def known_flags() -> set[str]:
    """Flags of train.py, and those that a tool, a script or a benchmark names."""
    known = set(re.findall(r"--[a-z][\w-]*", (ROOT / "docs/reference/flags.md").read_text()))
    for folder, pattern in (("tools", "*.py"), ("scripts", "**/*.sh"), ("examples", "**/*"), ("benchmarks", "*.py")):
        for path in (ROOT / folder).glob(pattern):
            if path.is_file() and path.suffix in (".py", ".sh"):
                known |= set(re.findall(r"--[a-z][\w-]*", path.read_text()))
    known |= {flag.replace("--sglang-", "--", 1) for flag in known}  # a server that somebody starts has them so
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    return known | set(re.findall(r"--[a-z][\w-]*", "".join((ROOT / file).read_text() for file in PARSERS))) | FOREIGN


@pytest.mark.parametrize("name", CHECKED)
def test_a_page_is_plain_english(name: str) -> None:
    text = CHECKED[name].read_text()
    if name == "index":  # the front page is a list of pages
        text = f"**In short:** the front page.\n{text}\n**Next:** any of them."
    if name == "STYLE":  # it shows what not to write
        text = re.sub(r"^ +- Before:.*(\n {5,}.*)*", "", text, flags=re.MULTILINE)
    assert violations(text, is_short=not name.startswith("reference/")) == []


WITHOUT_EXAMPLE = {"index", "reference/upstream_names", "reference/verl_parameters"}  # lists alone


@pytest.mark.parametrize("name", sorted(CHECKED.keys() - WITHOUT_EXAMPLE))
def test_a_page_has_an_example(name: str) -> None:
    assert re.search(r"^`{3,}", CHECKED[name].read_text(), re.MULTILINE), "no block to copy: a command, code, output"


@pytest.mark.parametrize("name", CHECKED)
def test_flags_and_paths_of_a_page_exist(name: str) -> None:
    text = CHECKED[name].read_text()
    if (
        name == "migration"
    ):  # the left columns have flags of others; tests/contracts/test_migration_page.py has the right
        text = re.sub(r"^\|.*", "", text, flags=re.MULTILINE)
    single = re.sub(r"--[\w-]+(\*[\w-]*|-`)", "", text)  # `--eval-*` and `--sglang-` name several
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]", single))
    passed_through = ("--sglang-", "--router-", "--non-persistent", "--replication", "--eval-")
    assert {flag for flag in flags - known_flags() if not flag.startswith(passed_through)} == set()
    code = re.findall(r"(?<![\w/.$~-])((?:[\w.-]+/)+[\w.-]+\.(?:py|sh|yaml|txt|md))(?![\w/])", text)
    paths = [path for path in code if path.startswith(PLACES)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x" * 121, "121 characters"),
        ("word " * 91, "91 words in a paragraph"),
        ("A " + "word " * 40 + "end.", "42 words in a sentence"),
        ("Half-made answers are gone on with.", "dialect: gone on with"),
    ],
)
def test_what_breaks_a_rule_is_found(text: str, what: str) -> None:
    page = f"# T\n\n**In short:** short.\n\n{text}\n\n**Next:** more.\n"
    assert any(found.startswith(what) or what in found for found in violations(page, is_short=True))


def test_the_chinese_pages_have_the_headings_and_code_of_the_english_ones() -> None:
    mirrored = {f"docs/{page}.md" for page in ("install", "quick_start")} | {
        str(page.relative_to(ROOT)) for page in (ROOT / "docs/start").glob("*.md")
    }
    pairs = {f"docs/zh/{Path(page).name}": page for page in {"README.md", *mirrored}}
    assert {str(page.relative_to(ROOT)) for page in (ROOT / "docs/zh").glob("*.md")} == set(pairs)
    for chinese, english in pairs.items():
        texts = [(ROOT / name).read_text() for name in (chinese, english)]
        blocks = [re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL) for text in texts]
        assert blocks[0] == blocks[1], chinese
        bare = [re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL) for text in texts]
        levels = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in bare]
        assert levels[0] == levels[1], chinese


def test_the_learning_path_is_the_same_in_readme_site_and_chinese() -> None:
    paths = [
        [
            Path(link).stem
            for link in re.findall(r"^\d\. \[[^\]]+\]\(([^)]+)\)", (ROOT / name).read_text(), re.MULTILINE)
        ]
        for name in ("README.md", "docs/zh/README.md")
    ]
    front = re.findall(r"^\d · .*<(?:\w+/)?(\w+)>", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    assert paths[0] == paths[1] == front[:7] == front[7:] and len(paths[0]) == 7


def test_the_page_of_environment_variables_has_those_that_a_user_sets() -> None:
    set_by_slime = re.compile(
        r"SLIME_(DOCS|RAY|WORKER_PIDS|ROOT|ASK|ENGINE_API|API_KEY_|DASHBOARD|SCRIPT_|HOST_IP_ENV)"
    )
    files = [path for folder in ("slime", "slime_plugins", "scripts") for path in (ROOT / folder).rglob("*")]
    read = [path.read_text() for path in files if path.suffix in (".py", ".sh") and path.is_file()]
    named = {name for text in read for name in re.findall(r"\bSLIME_[A-Z0-9_]+", text)}
    page = (ROOT / "docs/reference/environment_variables.md").read_text()
    missing = {name for name in named if name not in page and not set_by_slime.match(name)}
    assert {name for name in missing if not name.startswith("SLIME_AGENT_")} == set()  # docs/agent_harness.md


def test_every_example_has_a_page_that_the_list_of_examples_names() -> None:
    listed = re.findall(r"\]\((\S+)/README\.md\)", (ROOT / "examples/README.md").read_text())
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - set(listed) == set()
    assert [name for name in listed if not (ROOT / "examples" / name / "README.md").is_file()] == []


def test_generated_pages_are_what_their_tools_make() -> None:
    from tools import make_compatibility, make_pictures

    assert make_compatibility.DEFAULT_OUTPUT.read_text() == make_compatibility.render()
    drawn = {path.stem: path.read_text() for path in make_pictures.OUTPUT.glob("*.svg")}
    assert drawn == {name: make_pictures.render(picture) for name, picture in make_pictures.PICTURES.items()}
