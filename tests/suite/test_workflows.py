"""The workflows and the action, as far as they can be held without their host: what they name exists."""

import re
import shlex
import subprocess

import pytest
import yaml

from subquad.run_suite import HOME
from subquad.suite.commands import command_tree

GROUP = command_tree()
ACTION = HOME / "action.yml"
WORKFLOWS = sorted((HOME / ".github" / "workflows").glob("*.yml"))
CONTEXTS = {"github", "inputs", "steps", "cancelled"}
"""Contexts and functions of GitHub with which our expressions may begin."""


def load(path):
    # YAML 1.1 reads the key `on` as true
    return {("on" if key is True else key): value for key, value in yaml.safe_load(path.read_text()).items()}


def steps(path):
    """Every step of a workflow or of the action."""
    found = load(path)
    jobs = [found["runs"]] if "runs" in found else found["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def scripts(path):
    return [step["run"] for step in steps(path) if "run" in step]


def lines(script):
    """The commands of a script as words, without quotes, redirections left in."""
    for line in script.replace("\\\n", " ").splitlines():
        yield shlex.split(line.strip(), comments=True)


def check_command(words):
    """A command of ours can be given: its target of make, its command line, its files."""
    if words[0] == "make":
        targets = set(re.findall(r"^([\w.$()/-]+):", (HOME / "Makefile").read_text(), re.MULTILINE))
        named = [word for word in words[1:] if "=" not in word]
        assert {word.replace(".venv/", "$(VENV)/") for word in named} <= targets, words
    ours = [index for index, word in enumerate(words) if word.endswith("run_suite.py")]
    for index in ours:
        end = words.index("|") if "|" in words else len(words)
        given = [word for word in words[index + 1 : end] if word != "2>&1"]
        GROUP.commands[given[0]].make_context(given[0], given[1:])
    for word in words:
        if re.match(r"(\./)?(tests|\.ci|constraints)\S*$", word):
            assert (HOME / word).exists(), f"{word} is named and missing"
    return bool(ours) or words[0] in ("make", ".ci/run")


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.name)
def test_every_script_is_bash_and_names_what_exists(path, monkeypatch):
    monkeypatch.chdir(HOME)
    checked = 0
    for script in scripts(path):
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        variables = script.replace("$GITHUB_ACTION_PATH/", "").replace('"$PLUGIN"', "examples/my_kernel.py")
        variables = variables.replace('"$SHAPES"', "quick").replace('"$RESULTS"', "results")
        checked += sum(check_command(words) for words in lines(variables) if words)
    assert checked


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_what_its_host_asks_for(path):
    found = load(path)
    assert found["permissions"] == {"contents": "read"}
    for name, job in found["jobs"].items():
        assert job["timeout-minutes"] > 0, name
        assert {job["needs"]} <= set(found["jobs"]) if "needs" in job else True
    for step in steps(path):
        assert ("run" in step) != ("uses" in step)
        if "uses" in step:
            # a tag can be moved to other code
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.name)
def test_expressions_use_contexts_that_exist(path):
    text = path.read_text()
    for expression in re.findall(r"\$\{\{(.*?)\}\}", text):
        words = re.findall(r"(?<![\w.'-])([a-z]+)[.(]", re.sub(r"'[^']*'", "", expression))
        assert words, expression
        assert set(words) <= CONTEXTS | {"matrix"}, expression
    identifiers = {step["id"] for step in steps(path) if "id" in step}
    assert set(re.findall(r"steps\.(\w+)\.", text)) <= identifiers


def test_the_code_of_a_stranger_gets_no_secret_and_leaves_nothing_behind():
    for path in WORKFLOWS:
        assert "pull_request_target" not in load(path)["on"], path.name
    path = HOME / ".github" / "workflows" / "submission.yml"
    text = re.sub(r"^\s*#.*$", "", path.read_text(), flags=re.MULTILINE)
    assert "secrets." not in text
    assert "github.token" not in text
    # another workflow would restore what the code has left in a cache
    assert "cache" not in text
    (fetched,) = (step for step in steps(path) if "checkout" in step.get("uses", ""))
    assert fetched["with"]["ref"] == "${{ github.event.pull_request.base.sha }}"
    assert fetched["with"]["persist-credentials"] is False
    (checked,) = (script for script in scripts(path) if "submissions check" in script)
    for word in ("unshare --net", "--no-new-privs", "--clear-groups", "env -i"):
        assert word in checked


def test_the_page_on_the_action_names_its_inputs():
    _, _, page = (HOME / "docs" / "benchmarks.md").read_text().partition("## A kernel of your own in CI")
    inputs = load(ACTION)["inputs"]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(inputs)
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    calls = [
        step for job in yaml.safe_load(example)["jobs"].values() for step in job["steps"] if "subquad" in step["uses"]
    ]
    assert len(calls) == 2
    # the example pins what our workflows pin
    others = [step["uses"] for job in yaml.safe_load(example)["jobs"].values() for step in job["steps"]]
    others = {name for name in others if not name.startswith("OWNER/subquad@")}
    assert others == {step["uses"] for path in WORKFLOWS for step in steps(path) if step.get("uses") in others}
    assert {name.partition("@")[0] for name in others} > {"actions/cache", "actions/upload-artifact"}
    for call in calls:
        assert set(call["with"]) <= set(inputs)
        assert {name for name, value in inputs.items() if value.get("required")} <= set(call["with"])


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.name)
def test_every_action_is_pinned_by_its_digest(path):
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name in used if not name.startswith("./")), used
