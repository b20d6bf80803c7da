"""The commands that documents show can be given: every one is parsed, and those of the tutorials are carried out."""

import re
import shlex

import pytest
import yaml

from subquad.run_suite import HOME
from subquad.suite.commands import command_tree
from subquad.suite.options import options_in, parse
from subquad.suite.settings.config import find_experiments
from subquad.tasks import TASKS
from tests.reports.test_readme import documents

GROUP = command_tree()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:(?:^|\s)python \S*run_suite\.py|^subquad) (.*)")
EXPERIMENTS = find_experiments(HOME / "reports")
TUTORIALS = ("running.md", "your-mixer.md", "your-task.md")


def commands(path):
    """The arguments of every command in the blocks of a document, without comments and what a pipe receives."""
    for language, block in FENCE.findall(path.read_text()):
        if language not in ("", "bash"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if match := COMMAND.search(line):
                words = shlex.split(match[1], comments=True)
                yield words[: words.index("|")] if "|" in words else words


DOCUMENTS = [path for path in documents() if any(commands(path))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(HOME)))
def test_every_command_of_a_document_can_be_parsed(path, monkeypatch):
    monkeypatch.chdir(HOME)
    for words in commands(path):
        if words == ["--version"] or words[1:] == ["--help"]:
            continue
        command, rest = GROUP, words
        while hasattr(command, "commands"):
            assert rest[0] in command.commands, f"{' '.join(words)}: there is no command {rest[0]}"
            command, rest = command.commands[rest[0]], rest[1:]
        try:
            # a command keeps the names of its help option from its first context
            context = command.make_context(words[0], list(rest), **GROUP.context_settings)
        except Exception as error:
            pytest.fail(f"{' '.join(words)}: {error}")
        check_names(words, context.params)


def check_names(words, options):
    """The experiments of a command exist, and so does their scale; a task of `data` exists and has its options."""
    if words[0] == "data" and (task := options.get("task")):
        texts = [text.removeprefix("task.") for text in options.get("overrides") or ()]
        parse(TASKS.load(task), options_in(texts, "--set", ""), task)
    names = options.get("experiments") or [options.get("experiment")]
    for name in filter(None, names):
        if name in EXPERIMENTS and options.get("scale"):
            config = yaml.safe_load(EXPERIMENTS[name].read_text())
            assert options["scale"] in config.get("scales", {"paper": {}}), f"{' '.join(words)}: no such scale"
        if name not in EXPERIMENTS and name.islower() and "/" in name:
            paper = any(known.startswith(f"{name}/") for known in EXPERIMENTS)
            assert paper or (HOME / name / "grid.yaml").exists(), f"{' '.join(words)}: there is no experiment {name}"


def test_the_tests_read_the_documents():
    found = {path.name: len(list(commands(path))) for path in DOCUMENTS}
    assert found["README.md"] > 0
    assert {path.relative_to(HOME).as_posix() for path in DOCUMENTS} > {
        "README.md",
        *(f"docs/{name}" for name in TUTORIALS),
    }


@pytest.mark.parametrize("name", TUTORIALS)
def test_the_commands_of_a_tutorial_are_carried_out(name, command_line, monkeypatch, tmp_path):
    """Runs are planned and not trained; reports show the committed rows where there are any."""
    monkeypatch.chdir(HOME)
    seen = set()
    for words in commands(HOME / "docs" / name):
        if words[0] == "run":
            words = [*(word for word in words if word != "--dry-run"), "--dry-run"]
        if tuple(words) in seen or words[0] == "status" or words[1] == "tables":
            continue
        seen.add(tuple(words))
        if words[0] in ("run", "report") and "--results" not in words:
            words = [*words, "--results", tmp_path]
        done = command_line(*words)
        assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.stderr}"
    assert len(seen) > 2


@pytest.mark.parametrize(("page", "example"), [("your-mixer.md", "my_mixer.py"), ("your-task.md", "my_task.py")])
def test_the_blocks_of_a_tutorial_are_together_its_example(page, example):
    """A reader may paste them one after the other into a file."""
    _, _, source = (HOME / "examples" / example).read_text().split('"""', 2)
    blocks = re.findall(r"```python\n(.*?)```", (HOME / "docs" / page).read_text(), re.DOTALL)
    written = [line for block in blocks for line in block.splitlines() if line]
    assert written == [line for line in source.splitlines() if line]
