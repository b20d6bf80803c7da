"""The command line as a user meets it: fast to list, strict at second 0, safe to interrupt."""

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from subquad.run_suite import REPOSITORY
from subquad.suite.commands import main
from subquad.suite.identity import identity
from subquad.suite.store import claims, endings, storage, target
from tests.processes import in_a_process, with_subquad
from tests.stored import store

HOME = Path(__file__).resolve().parents[2]
FEW_ROWS = ("--set", "task.num_train=2000", "--set", "task.num_test=100")
TRAIN = ("--set", "train.steps=60", "--set", "train.eval_every=20", *FEW_ROWS)


def call(*arguments):
    """A command in a process of its own, as a user has it."""
    command = [sys.executable, str(HOME / "run_suite.py"), *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, cwd=HOME, timeout=240, env=environment)


def test_what_needs_no_torch_does_not_import_it():
    """Neither help, nor lists, nor a fault that is known without it."""
    calls = [["--help"], ["list"], ["list", "models"], ["run", "--help"]]
    faulty = [
        ["h3/tabel2"],
        ["quickstart", "h3/tabel2"],
        ["quickstart", "--scale", "huge"],
        ["quickstart", "--only", "gla"],
        ["quickstart", "--set", "steps=3"],
        *(["quickstart", f"--{option}", "x"] for option in ("seeds", "within", "log", "executor")),
    ]
    code = (
        "import sys\nfrom subquad import run_suite\n"
        f"for call in {calls + [['run', *words] for words in faulty]!r}:\n"
        "    sys.argv[1:] = call\n"
        "    try:\n        run_suite.main()\n"
        "    except SystemExit as end:\n        print('exit code', end.code)\n"
        "    assert 'torch' not in sys.modules and 'pandas' not in sys.modules, call\n"
    )
    done = in_a_process(code)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^exit code (\d)$", done.stdout, re.MULTILINE) == ["0"] * len(calls) + ["2"] * len(faulty)
    assert done.stderr.count("error: ") == len(faulty)


def test_list_names_everything(command_line):
    out = command_line("list").stdout
    for name in ("mqar", "transformer++", "dss-exp-no-scale", "h3/table2"):
        assert name in out


def test_an_id_of_many_runs_names_five_of_them(command_line, tmp_path):
    for number in range(8):
        (tmp_path / f"0{number}.parquet").touch()
    five = "'0' is ambiguous: 00, 01, 02, 03, 04 and 3 more; give more of the id\n"
    for arguments in (("show", "0"), ("generate", "0", "--prompt", "a")):
        done = command_line(*arguments, "--results", tmp_path)
        assert (done.returncode, done.stderr) == (2, f"error: {five}")


def test_a_fault_of_the_grid_is_not_blamed_on_set(command_line, tmp_path):
    (tmp_path / "grid.yaml").write_text(
        "title: t\nbaseline: {task: {name: mqar}, model: {name: gla}, train: {steps: none}}\n"
    )
    done = command_line("run", tmp_path, "--dry-run", "--set", "train.lr=1e-3")
    assert done.stderr.startswith(f"error: {tmp_path / 'grid.yaml'}: train: steps:")


def test_a_fault_of_data_names_the_folder_that_was_given(command_line, tmp_path):
    done = command_line("run", "dss/table1-lra", "--data", tmp_path)
    assert done.stderr.startswith(f"error: --data {tmp_path}: lra-text: ")


def test_data_are_taken_where_only_a_part_of_the_tasks_reads_them(command_line, tmp_path):
    (tmp_path / "grid.yaml").write_text(
        "title: t\nbaseline: {model: {name: gla, d_model: 8}, train: {steps: 2}}\n"
        "sweep: {task.name: [mqar, text-file]}\n"
    )
    (tmp_path / "book.txt").write_text("a few words " * 2000)
    call = ("run", tmp_path, "--dry-run", "--data", tmp_path)
    done = command_line(*call)
    assert done.returncode == 0, done.stderr
    done = command_line(*call, "--only", "task.name=mqar")
    assert done.returncode == 2
    reason = f"no task of {tmp_path.name} that --only keeps reads data; leave --data out"
    assert done.stderr == f"error: --data {tmp_path}: {reason}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", ""),
        ("run", "quickstart", "--results", ""),
        ("run", "quickstart", "--data", ""),
        ("report", "quickstart", "--out", ""),
        ("report", "quickstart", "--by="),
        # an unset variable of a workflow must not make a comparison that cannot fail
        ("bench", "--compare", ""),
        ("compare", "main", ""),
        ("generate", "ab", "--prompt", ""),
        ("list", "--plugin", ""),
    ],
)
def test_an_empty_word_is_refused_by_every_command(command_line, arguments):
    done = command_line(*arguments)
    assert done.returncode == 2
    words = "the last word is empty; give a value (is a variable unset?), or leave it out"
    assert done.stderr == f"error: {shlex.join(arguments)}: {words}\n"
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["run", "status", "report", "show"])
def test_a_store_that_cannot_be_reached_is_one_line(command_line, monkeypatch, command):
    upath = pytest.importorskip("upath", reason="needs universal_pathlib; pip install -e '.[s3]'")

    def fail(*arguments, **options):
        raise RuntimeError("no credentials")

    for name in ("exists", "info", "ls", "find", "glob", "isdir"):
        monkeypatch.setattr(type(upath.UPath("memory://lost").fs), name, fail)
    done = command_line(command, "ab" if command == "show" else "quickstart", "--results", "memory://lost")
    assert done.returncode == 2
    assert re.fullmatch(r"error: memory://[^\n]*: no credentials\n", done.stderr)


def test_version_and_help_have_their_usual_names(command_line):
    done = command_line("--version")
    assert re.fullmatch(
        r"subquad \S+.*, (commit [0-9a-f]{10}(, with uncommitted changes)?|not a checkout)\n", done.stdout
    )
    for arguments in (("-h",), ("run", "-h"), ("data", "prepare", "-h")):
        done = command_line(*arguments)
        assert done.returncode == 0
        assert "Usage: " in done.stdout


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Settings of a Python that takes files and output for ASCII."""


def test_a_locale_without_utf8_changes_nothing(command_line, tmp_path):
    arguments = ["report", "mamba/table13", "--results", tmp_path]
    shown = command_line(*arguments)
    assert "—" in shown.stdout
    # the environment names the width that tables have here
    command, env = [sys.executable, "run_suite.py", *arguments], {**os.environ, **ASCII}
    done = subprocess.run(command, cwd=HOME, capture_output=True, timeout=240, env=env)
    assert (done.returncode, done.stdout.decode()) == (shown.returncode, shown.stdout), done.stderr


def test_in_python_a_locale_without_utf8_is_an_error_that_says_what_to_do():
    code = "from subquad import results\ntry:\n    results('quickstart')\nexcept ValueError as error:\n    print(error)"
    words = "the locale of this Python is not UTF-8, in which files are read; start it with PYTHONUTF8=1\n"
    assert in_a_process(code, **ASCII).stdout == words


def test_a_shell_completes_the_names_of_experiments(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(sys, "argv", ["subquad"])
    asked = {"_SUBQUAD_COMPLETE": "complete_bash", "COMP_WORDS": "subquad run h3/table1", "COMP_CWORD": "2"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(REPOSITORY)
    assert "h3/table12" in capsys.readouterr().out.splitlines()


def test_a_results_folder_that_cannot_be_written_is_refused_before_any_run(command_line, tmp_path):
    file = tmp_path / "file"
    file.touch()
    done = command_line("run", "quickstart", "--device", "cpu", "--results", file)
    assert done.returncode == 2
    assert "this is a file; name the folder of results" in done.stderr


@pytest.mark.parametrize(
    ("place", "reason"),
    [pytest.param("full", "No space left on device", marks=pytest.mark.slow), ("closed", "Broken pipe")],
)
def test_a_grid_goes_on_without_its_output(command_line, tmp_path, monkeypatch, place, reason):
    reader, writer = os.pipe()
    os.close(reader)
    only = ("--only", "model.name=attention", "--only", "model.d_model=8", "--device", "cpu", "--results", tmp_path)
    with open("/dev/full" if place == "full" else writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        done = command_line("run", "quickstart", "--seeds", "1", "--set", "train.steps=2", *only)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"standard output cannot be written ({reason}); the runs go on without it\n"
    (rows,) = tmp_path.rglob("*.parquet")
    assert endings.ending(rows).status == "ok"


def test_the_line_of_a_run_is_whole_in_a_pipe(command_line, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    only = ("--only", "model.name=attention", "--only", "model.d_model=8", "--device", "cpu", "--results", tmp_path)
    done = command_line("run", "quickstart", "--seeds", "1", "--set", "train.steps=2", *only)
    (run,) = tmp_path.rglob("*.parquet")
    first, last = done.stdout.splitlines()
    assert re.fullmatch(rf"ok +attention on mqar, seed 0 \[{run.stem[:6]}\]  accuracy 0\.\d+  \d+\.\d s", first)
    assert last.startswith("done: 1 run; now: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["status", "quickstart"],
        ["report", "quickstart"],
        ["--version"],
        ["run", "quickstart", "--dry-run", "--seeds", "1", "--only", "model.name=gla"],
    ],
)
def test_a_command_without_room_for_its_output_fails_in_one_line(command_line, tmp_path, monkeypatch, arguments):
    with open("/dev/full", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        results = [] if arguments[0] in ("list", "--version") else ["--results", tmp_path]
        done = command_line(*arguments, *results)
    assert done.returncode == 2
    assert done.stderr == "error: standard output cannot be written (No space left on device)\n"


def test_a_command_with_a_closed_output_is_carried_out(command_line, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    done = command_line("list", "models")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_results_folder_that_is_read_only_is_refused_only_if_runs_are_left(command_line, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EROFS, "Read-only file system")

    arguments = ["run", "quickstart", "--only", "model.name=attention", "--only", "model.d_model=8", "--device", "cpu"]
    arguments += ["--set", "train.steps=2", "--results", tmp_path]
    assert command_line(*arguments, "--seeds", "1").returncode == 0
    # superusers may write to any folder, so a folder that they cannot write to is simulated
    monkeypatch.setattr(target, "probe", refuse)
    monkeypatch.setattr(claims, "sweep", refuse)
    done = command_line(*arguments, "--seeds", "1")
    assert done.returncode == 0, done.stderr
    assert "1 of 1 runs are already stored" in done.stdout
    done = command_line(*arguments, "--seeds", "2")
    assert done.returncode == 2
    assert "nothing can be written there (Read-only file system)" in done.stderr


def test_a_plan_needs_no_data_and_says_how_long_it_takes(command_line, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    planned = command_line("run", "mamba/piano", "--scale", "small", "--dry-run", "--results", tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "no data" in planned.stdout
    assert re.search(r"about [0-9.]+ hours of NVIDIA H200 for \d+ runs", planned.stdout)
    done = command_line("run", "mamba/piano", "--scale", "small", "--results", tmp_path)
    assert done.returncode == 2
    assert "no data; call" in done.stderr


def test_an_interruption_while_torch_is_imported_raises_nothing():
    code = (
        "import signal, sys, types\n"
        "from subquad.suite import commands\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "sys.modules['torch'].__spec__ = types.SimpleNamespace(_initializing=True)\n"
        "def app(**options):\n"
        "    try:\n        signal.raise_signal(signal.SIGINT)\n"
        "    finally:\n        print('raised', flush=True)\n"
        "commands.command_tree = lambda: app\n"
        "commands.main(None)"
    )
    done = in_a_process(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("name", ["", "report.jpg", "file/report.md"])
def test_a_report_that_cannot_be_written_is_one_line(command_line, tmp_path, name):
    (tmp_path / "file").touch()
    more = ("--format", "png") if name.endswith("jpg") else ()
    done = command_line("report", "quickstart", *more, "--out", tmp_path / name)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --out ")
    assert len(done.stderr.splitlines()) == 1


def test_the_name_of_the_file_says_the_format(command_line, tmp_path):
    assert command_line("report", "h3/table2", "--out", tmp_path / "x.svg").stdout == f"wrote {tmp_path / 'x.svg'}\n"
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")
    command_line("report", "h3/table2", "--out", tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
    done = command_line("report", "h3/table2", "--format", "md", "--out", tmp_path / "x.html")
    assert "the two do not agree" in done.stderr


@pytest.mark.parametrize("of", ["", "/h3"])
def test_a_page_of_committed_rows_is_not_written_among_them(command_line, tmp_path, monkeypatch, of):
    """One of rows elsewhere lies beside those rows."""
    monkeypatch.chdir(tmp_path)
    committed = tmp_path / "rows" / "reference"
    (committed / "h3").mkdir(parents=True)
    there = replace(REPOSITORY, reference=committed)
    asked = ("report", "h3/table2", "--format", "html", "--results")
    command_line(*asked, f"rows/reference{of}", repository=there)
    assert list(tmp_path.rglob("*.html")) == [tmp_path / "results/local/h3/table2/report.html"]
    done = command_line(*asked, "rows", repository=there)
    assert done.stdout == "wrote rows/h3/table2/report.html\n"


def test_a_damaged_grid_does_not_hide_the_others(command_line, tmp_path):
    for name, text in (("good", "title: whole\nbaseline: {task: {}}\n"), ("bad", "title: [")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "grid.yaml").write_text(text)
    done = command_line("list", "experiments", repository=replace(REPOSITORY, reports=tmp_path))
    assert done.returncode == 0
    assert "whole (scales: paper)" in done.stdout
    assert re.search("bad.*cannot be read: .*not valid YAML", done.stdout)


def test_rows_with_null_columns_are_shown_and_reported(command_line, tmp_path):
    path = store(tmp_path, [{"metric": "loss", "value": 0.5}], experiment="quickstart")
    assert "loss" in command_line("show", path.stem, "--results", tmp_path).stdout
    assert command_line("report", "quickstart", "--results", tmp_path).returncode == 0


def test_a_dry_run_prints_the_plan_and_writes_nothing(command_line, tmp_path):
    done = command_line("run", "h3/table2", "--dry-run", "--results", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^[0-9a-f]{16}  to do  ", done.stdout, re.MULTILINE)) == 64
    assert "train.lr = 0.0005" in done.stdout
    assert not list(tmp_path.iterdir())


def quick(results, *more, train=TRAIN):
    one = ("run", "quickstart", "--only", "model.name=linear-attention", "--seeds", 1, "--device", "cpu", *train)
    return (*one, "--results", results, *more)


def rows(results):
    frame = storage.read(storage.files([results], "quickstart"))
    frame = frame[frame["metric"].isin(["accuracy", "loss"])]
    return frame[["run_id", "metric", "split", "slice", "step", "value"]].to_dict("records")


def few_steps(results):
    few = ("train.steps=2", "train.eval_every=2", "train.batch_size=4", "task.num_train=8", "task.num_test=8")
    train = [word for setting in few for word in ("--set", setting)]
    return quick(results, "--only", "model.d_model=8", train=train)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the rows of a run of a few steps."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.raises(SystemExit) as end:
        main(REPOSITORY, [*map(str, few_steps(folder))])
    assert end.value.code == 0
    return folder


@pytest.fixture
def stored(trained, tmp_path):
    """The arguments of a run of a few steps, which is stored below tmp_path."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return few_steps(tmp_path)


def test_a_grid_runs_is_skipped_reported_and_shown(command_line, stored, tmp_path):
    again = command_line(*stored)
    assert "1 of 1 runs are already stored" in again.stdout
    assert "weights" not in again.stdout
    assert (
        "1 of these kept no weights; --force --keep-weights repeats all runs asked for"
        in command_line(*stored, "--keep-weights").stdout
    )
    report = command_line("report", "quickstart", "--results", tmp_path)
    assert report.returncode == 0, report.stderr
    assert "Linear attention" in report.stdout
    run_id = rows(tmp_path)[0]["run_id"]
    shown = command_line("show", run_id[:8], "--results", tmp_path)
    assert run_id in shown.stdout
    assert "accuracy" in shown.stdout
    assert re.search(r"threads +1 ", shown.stdout)
    assert re.search(r'operators +{"[a-z_]+": {"backend": "torch", "version": [0-9]+}', shown.stdout)


def test_a_stored_run_with_older_operators_is_named_and_repeated_only_by_force(command_line, stored):
    today = REPOSITORY.versions()
    later = replace(REPOSITORY, versions=lambda: {name: version + 1 for name, version in today.items()})
    assert "older operators" not in command_line(*stored, "--dry-run").stdout
    for more in (("--dry-run",), ()):
        printed = command_line(*stored, *more, repository=later).stdout
        (line,) = (line for line in printed.splitlines() if "stored with older operators" in line)
        assert re.search(r"\([a-z_]+ [0-9]+ \(now [0-9]+\).*: [0-9a-f]{16}\); --force repeats them", line)
        assert "1 of 1 runs are already stored" in printed or "1 run, 0 to do" in printed
    printed = command_line(*stored, "--dry-run", "--force", repository=later).stdout
    assert "1 run, 1 to do" in printed
    assert "older operators" not in printed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Rows of a grid that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    assert call(*quick(folder)).returncode == 0
    return rows(folder)


@pytest.mark.parametrize("start", [("-m", "subquad"), ("-c", "from subquad.__main__ import main; main()")])
def test_an_interruption_while_an_installation_is_imported_ends_it_without_a_traceback(tmp_path, start):
    """Ctrl-C arrives while a library of the command line is imported; the second way is that of the entry point."""
    (tmp_path / "typer.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    command = [sys.executable, "-P", *start]
    done = subprocess.run(command, env=with_subquad(tmp_path), cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interruption_before_the_command_starts_exits_with_130():
    class Interrupted(list):
        def __iter__(self):
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            main(REPOSITORY, Interrupted())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130


def imports_torch(process, results):
    """Whether the process has begun to import torch; of one that has ended, nothing is known."""
    with contextlib.suppress(OSError):
        return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    return False


def carries_out_a_run(process, results):
    return any(results.rglob("*.claim"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, carries_out_a_run),
        (signal.SIGINT, imports_torch),
        (signal.SIGTERM, carries_out_a_run),
        (signal.SIGKILL, carries_out_a_run),
    ],
)
def test_an_interrupted_grid_continues_with_the_same_numbers(whole, command_line, tmp_path, number, moment):
    broken = tmp_path / "broken"
    command = [sys.executable, str(HOME / "run_suite.py"), *map(str, quick(broken))]
    process = subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE)
    while not moment(process, broken):
        assert process.poll() is None, "the grid has ended before it was interrupted"
        time.sleep(0.02)
    process.send_signal(number)
    # the grace of SIGTERM is six seconds, and that of the others a minute
    process.wait(timeout=50 if number == signal.SIGTERM else 240)
    if number != signal.SIGKILL and not list(broken.rglob("*.parquet")):
        assert process.returncode == 130
    done = command_line(*quick(broken))
    assert done.returncode == 0, done.stderr
    assert rows(broken) == whole


@pytest.mark.slow
def test_runs_side_by_side_give_the_rows_of_runs_in_sequence(command_line, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    options = ("--set", "train.steps=3", "--set", "train.eval_every=3", "--set", "train.batch_size=4", *FEW_ROWS)
    base = ("run", "quickstart", "--only", "model.name=linear-attention", "--device", "cpu", *options, "--seeds", 2)
    assert command_line(*base, "--results", one).returncode == 0
    done = command_line(*base, "--results", two, "--jobs", 2)
    assert done.returncode == 0, done.stderr
    assert sorted(map(str, rows(one))) == sorted(map(str, rows(two)))


def test_a_report_names_a_file_that_cannot_be_read_and_leaves_it_out(command_line, tmp_path):
    path = tmp_path / "quickstart" / "paper" / "0123.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not parquet")
    done = command_line("report", "quickstart", "--results", tmp_path)
    assert done.returncode == 0
    assert "0123.parquet" in done.stderr


def test_doctor_says_what_works_and_why_the_rest_does_not(command_line):
    done = command_line("doctor")
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout
    assert "GPU" in done.stdout
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) > 80


def test_report_of_a_paper_is_the_scoreboard_of_its_experiments(command_line):
    shown = command_line("report", "h3").stdout
    assert shown.startswith("experiments of h3\n")
    assert "h3/table2" in shown
    assert "mamba/" not in shown


@pytest.mark.parametrize("arguments", [("show", "0373a9"), ("list",), ("data", "list")])
def test_a_table_in_a_pipe_has_every_word_whole(command_line, arguments):
    done = command_line(*arguments)
    assert done.returncode == 0, done.stderr
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) > 80


LONG = "9" * 400


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", LONG), "File name too long"),
        (("report", LONG), "File name too long"),
        (("compare", LONG, "main"), "File name too long"),
        (("generate", LONG, "--prompt", "a"), "File name too long"),
        (("compare", "http://127.0.0.1:1/x", "r0"), "a web page holds no folder"),
        (("export", "http://127.0.0.1:1/x"), "a web page holds no folder"),
        (("status", "quickstart", "--results", "-1"), "this is no folder but the beginning of an option"),
        (("run", "quickstart", "--dry-run", "--results", "-1"), "this is no folder but the beginning of an option"),
        (("report", "\x1b]0;title\x07"), r"\x1b]0;title\x07"),
    ],
)
def test_what_can_be_no_place_is_one_visible_line(command_line, arguments, words):
    done = command_line(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert line.isprintable()


STEERING = "\x1b[2J\x1b]0;owned\x07\u202e"
"""It would clear the screen, set the title and turn the direction of writing."""


@pytest.mark.parametrize("command", ["show", "report", "compare", "status", "export"])
def test_rows_of_others_do_not_steer_the_terminal(command_line, tmp_path, stored, command):
    (path,) = tmp_path.rglob("*.parquet")
    (root,) = [parent for parent in path.parents if parent.name == "quickstart"]
    rows = storage.load(path).to_pylist()
    rows.append({**rows[-1], "metric": f"mine{STEERING}", "unit": STEERING, "value": 0.5})
    settings = json.loads(rows[0]["config"])
    if command != "status":
        # a run of other settings is none of the grid
        settings["note"] = STEERING
    for row in rows:
        for name in ("error", "stand_in", "device", "torch", "commit", "python", "precision", "cuda"):
            row[name] = (row[name] or "") + STEERING
        row |= {"config": json.dumps(settings), "run_id": identity(settings)}
    theirs = tmp_path / "theirs" / path.relative_to(root.parent).with_stem(identity(settings))
    storage.write(theirs, rows)
    arguments = {
        "show": ("show", theirs.stem, "--results", tmp_path / "theirs"),
        "report": ("report", "quickstart", "--results", tmp_path / "theirs"),
        "compare": ("compare", tmp_path / "theirs", root.parent, "--all"),
        "status": ("status", "quickstart", "--results", tmp_path / "theirs"),
        "export": ("export", "quickstart", "--results", tmp_path / "theirs", "--format", "json"),
    }[command]
    done = command_line(*arguments)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "\u202e" not in done.stdout + done.stderr


def test_a_document_says_what_the_plan_of_the_quickstart_says(command_line, tmp_path):
    """A reader who is told two minutes and 15 seconds believes neither."""
    plan = command_line("run", "quickstart", "--dry-run", "--results", tmp_path).stdout
    (seconds,) = re.findall(r"about (\d+) seconds of AMD EPYC \(2 cores\) for 15 runs", plan)
    assert 10 <= int(seconds) <= 20
    document = " ".join((Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text().split())
    assert "a quarter of a minute on two cores of an AMD EPYC" in document
