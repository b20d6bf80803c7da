"""Every refusal of a command is one line on standard error, exit code 2, and nothing written.

REFUSED is the table to which a new refusal is added, where it needs nothing but a command line.
"""

import shlex

import pytest

from subquad.suite.executors.contract import PACKAGES

FIGURE = "run mamba/figure8-scan --dry-run"
DURATION = "expected a duration above zero"

REFUSED = [
    # names
    ("run h3/tabel2", "unknown experiment 'h3/tabel2'", "did you mean 'h3/table2'"),
    ("run h3", "'h3' has several experiments; name one of: h3/figure2, "),
    ("run docs", "docs: the folder has no grid.yaml; `list experiments`"),
    ("run quickstart --scale huge", "unknown scale 'huge'"),
    ("report quikstart", "unknown experiment 'quikstart'", "'quickstart'"),
    ("list modles", "no kind or folder 'modles' (did you mean 'models'?)"),
    ("show ffffffff", "ffffffff"),
    (f"generate ffffffff --prompt a --seed {2**63}", "'--seed': Input should be less than or equal to"),
    ("check", "error: check: Missing argument 'part'. Choose from: model, task, operator; see "),
    ("generate docs --prompt a", "docs: this is a folder; name a run or a file of weights"),
    ("weights import docs --out a.weights", "docs: no folder with a config.json"),
    ("check task flip-flop", "unknown task 'flip-flop'; there are: ", "your own needs --plugin"),
    ("bench causal_conv", "unknown operator 'causal_conv'", "did you mean 'causal_conv1d'"),
    # --set and --only
    (
        "run quickstart --set train.stepz=3",
        "error: --set train.stepz=3: train: stepz: unknown key",
        "did you mean 'steps'",
    ),
    ("run quickstart --set model.name=gsaa", "unknown model 'gsaa'", "'gsa'"),
    ("run quickstart --set model.name=7", "unknown model 7"),
    (
        "run quickstart --set task.num_kv_pairs=99",
        "error: --set task.num_kv_pairs=99: task mqar: num_kv_pairs=99 needs length",
    ),
    ("run quickstart --set task.length=sixty", "length", "sixty"),
    ("run quickstart --set model.init_std=.nan", "--set", "model.init_std=.nan", "finite number"),
    ("run quickstart --set train.keep_metric=loss2", "train.keep_metric", "did you mean 'loss'"),
    ("run quickstart --set train.micro_batch_size=0", "micro_batch_size"),
    ("run quickstart --set model.norm=batch --set train.micro_batch_size=2", "the batch cannot be divided"),
    (
        "run quickstart --set train.lr=1e-3 --set model.num_heads=3",
        "error: --set model.num_heads=3: model attention: num_heads=3 does not divide",
    ),
    ("run quickstart --only model.name=gla --set model.num_heads=3", "num_heads=3"),
    (
        "run quickstart --set train.steps=x --set task.length=y",
        "error: --set train.steps=x --set task.length=y: task mqar: length:",
    ),
    (
        "run quickstart --set trian.lr=1",
        "error: --set trian.lr=1: 'trian.lr': a dotted key starts with task, model, train",
    ),
    ("run quickstart --set train={}", "'train': expected a dotted key of one option, such as train.lr"),
    ("run quickstart --only lr=1e-3", "--only lr: no run has this key (did you mean 'train.lr'?)"),
    ("run quickstart --only model.name=rwkv", "--only model.name=rwkv", "no run has it", "--plugin"),
    ("run quickstart --only task=mqar", "--only task: task has several settings; name one of them, such as task."),
    ("run quickstart --only model.nam=gla", "--only model.nam", "did you mean 'model.name'"),
    ("check task text-file", "error: text-file: no data; give --set data=FILE, any text."),
    ("check task text-file --set data=/gone/a.txt", "error: text-file: /gone/a.txt: there is no such file or folder"),
    ("check task mqar --set length", "--set 'length': expected option=value, e.g. num_train=1000"),
    ("check model gla --set num_heads=1 --set num_heads=2", "--set num_heads is given twice"),
    ("check model gla --set num_heads=3", "num_heads=3 does not divide"),
    # folders
    ("run quickstart --data /no/such/folder --dry-run", "--data /no/such/folder: there is no such file or folder"),
    ("run speech-commands/sample --data nowhere", "nowhere"),
    ("run quickstart --data .", "--data .: no task of quickstart reads data; leave --data out"),
    (f"{FIGURE} --data .", "no task of mamba/figure8-scan reads data"),
    ("status quickstart --data .", "no task of quickstart reads data"),
    ("data rate mqar --data .", "--data .: mqar makes its data as it runs; leave --data out"),
    ("run gsa/table1-small --data . --set task.data=x", "--set task.data names the data as well"),
    *(
        (f"{command} --results /no/such", "--results /no/such: there is no such folder")
        for command in ("report quickstart", "status quickstart", "collect quickstart", "show 0373a9")
    ),
    # devices, processes and executors
    ("run quickstart --device tpu", "--device"),
    ("run quickstart --device cpu:7", "--device 'cpu:7': expected cpu"),
    # torch keeps the number of a device in eight bits
    ("run quickstart --device cuda:999", "--device 'cuda:999': expected cpu"),
    ("run quickstart --device cuda:99", "--device"),
    ("profile quickstart --device tpu", "expected cpu, cuda or cuda:N"),
    ("bench --device cuda:99", "--device"),
    ("run quickstart --device cpu --nproc 4096 --dry-run", "--nproc 4096: every process needs a core"),
    ("run quickstart --nproc 2 --jobs 2", "give one of them"),
    ("run quickstart --nproc 2 --executor slurm", "for the executor local"),
    (
        "run quickstart --device cpu --nproc 2 --set model.norm=batch",
        "leave out micro_batch_size and train in one process",
    ),
    (f"{FIGURE} --device cpu --nproc 2", "times one device"),
    ("run quickstart --executor-options gpus", "--executor-options 'gpus': expected key=value, e.g. gpus=1"),
    ("run quickstart --executor-options sharded=true", "give --nproc"),
    ("run quickstart --nproc 2 --executor-options sharded=7", "sharded"),
    ("run quickstart --executor lokal", "unknown executor 'lokal'", "did you mean 'local'"),
    ("run quickstart --executor-options gpus=0.5", "--executor-options (local)", "gpus"),
    ("run quickstart --executor ray --executor-options adress=auto", "adress", "did you mean 'address'"),
    ("run quickstart --executor ray --executor-options gpus=2", "gpus", "less than or equal to 1"),
    ("run quickstart --executor ray --executor-options address=here", "address=here", "host:port"),
    ("run quickstart --executor ray --executor-options address=localhost:9", "no Ray cluster answers there"),
    ("run quickstart --executor ray --device cuda:1", "--device cuda:1", "Ray chooses the GPU"),
    ("run quickstart --executor slurm --executor-options minutes=2", "minutes=2", "give 3 minutes or more"),
    ("run quickstart --retry-failed --force", "--force --retry-failed"),
    *((f"run quickstart --within {text}", DURATION) for text in ("1e30h", "8x", "m", "-1m", "nan", "0s")),
    # the experiment does not have these
    (f"{FIGURE} --keep-weights", "--keep-weights: mamba/figure8-scan measures"),
    (f"{FIGURE} --log tensorboard", "--log tensorboard: mamba/figure8-scan"),
    ("profile mamba/figure8-scan", "`bench` times operators"),
    ("profile gsa/figure4c --scale cpu", "--set speed.measure=decode --set speed.new_tokens=null"),
    # reports
    ("report", "name an experiment or a paper (h3), or give --all"),
    ("report quickstart --all", "name an experiment or a paper, or give --all, not both"),
    ("report h3 --scale small", "a scoreboard shows experiments at their own scales"),
    ("report h3 --by train.lr", "name the experiment"),
    ("report --all --by train.lr", "name the experiment"),
    ("report --all --against H3", "report --against: name the one experiment"),
    ("report h3/table2 --against H9", "--against: no row 'H9'"),
    ("report h3/table7 --against Transformer-1.3B", "--against: times have no seeds"),
    ("report h3/table2 --row H3", "report --row: give --against"),
    ("report tables --scale small", "report tables --scale: the page has all scales"),
    ("report tables --results results/reference", "report tables --results: the page shows"),
    (
        "report kernels --scale smal --results results/reference",
        "--scale smal: no stored rows of kernels have it; there are: ",
    ),
    ("report quickstart --full --format md", "report --full: md has all tables", "leave it out"),
    (
        "report h3/table2 --by task --results results/reference",
        "--by task: task has several settings; name one of them",
    ),
    ("export h3/table2 --only slice=x", "no row has it; there are: '', length=20"),
    ("report kernels --figure cells", "the figures of kernels are changes or shares"),
    ("report h3/table2 --figure shares", "the figures of h3/table2 are lines, seeds, costs, curves or cells"),
    ("report h3 --figure cells", "report --figure: name the one experiment"),
    ("report quickstart --figure costs", "quickstart --figure costs: a figure of kind costs needs one"),
    # the grid's own kind has an x that costs have not, and columns that lines have not
    ("report mamba/figure4 --figure curves", "a metric of train_seconds, train_flops, train_tokens, such as"),
    ("report kernels/models --figure lines", "x: a figure of kind lines needs one"),
    ("report quickstart --out x.xls", "--out x.xls: the ending must be one of .png, "),
    ("report quickstart --out docs", "--out docs: this is a folder"),
    ("report tables --out x.png", "tables: this table has no figure"),
    ("report h3/table2 --against H3 --out x.png", "report h3/table2 --against: this table has no figure"),
    ("report h3/table2 --by train.lr --results results/reference --out x.png", "h3/table2: this table has no figure"),
    ("report quickstart --update-docs", "--update-docs writes all documents", "nothing beside it"),
    # elsewhere
    ("export quickstart --to trackio --out rows.csv", "export --to trackio: a viewer gets the rows and no file"),
    ("export h3/table2 --verdicts --only metric=loss", "export --verdicts: verdicts are of tables"),
    ("export leaderboard/parameters --verdicts", "no stored run has a number of a paper to compare with, or a claim"),
    # benchmarks
    ("bench --compare no-such-branch", "'no-such-branch'", "neither a git revision", "folder"),
    ("bench --against peer", "'peer'", "neither a git revision"),
    ("bench --compare HEAD --against peers", "give one of them"),
    ("results verify docs", "results verify docs: no rows below it; `run EXPERIMENT --results docs` makes some"),
    ("bench --update-budgets --shapes paper", "--update-budgets"),
    ("bench --minutes 3", "bench --minutes: only --arena continues"),
    ("bench --arena --compare HEAD", "bench --arena", "leave --against and --compare out"),
    ("bench embedding --arena", "no other project has a kernel for embedding"),
]

STORING = ("run", "report", "bench")
"""Commands that are given a folder of results where the table names none."""


@pytest.mark.parametrize(("line", "words"), [pytest.param(line, words, id=line) for line, *words in REFUSED])
def test_a_wrong_argument_is_one_line_and_exit_code_2(command_line, tmp_path, line, words):
    arguments = shlex.split(line)
    for executor, (package, *_) in PACKAGES.items():
        if executor in arguments:
            pytest.importorskip(package)
    if arguments[0] in STORING and "--results" not in arguments and arguments[1:2] != ["tables"]:
        arguments += ["--results", str(tmp_path)]
    done = command_line(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    (said,) = done.stderr.strip().splitlines()
    for word in words:
        assert word in said
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_commit_that_is_none_is_refused_before_rows_could_name_it(command_line, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_COMMIT", "main")
    done = command_line("run", "quickstart", "--results", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: SUBQUAD_COMMIT=main: expected the hash of a commit, or the hash and -dirty\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["NVIDIA_TF32_OVERRIDE", "TRITON_F32_DEFAULT"])
def test_a_precision_from_the_environment_is_refused_before_rows_claim_another(
    command_line, tmp_path, monkeypatch, name
):
    monkeypatch.setenv(name, "1")
    done = command_line("run", "quickstart", "--results", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: the environment has {name}=1, which changes the precision of products")
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("report quickstart --format jpg", "Invalid value for '--format': 'jpg' is not one of 'terminal', "),
        ("run quickstart --nproc two", "unable to parse string as an integer, got 'two'; see "),
        ("run quickstart --nproc 0 --dry-run", "'--nproc'"),
        ("profile quickstart --steps 0", "Invalid value for '--steps'"),
        ("data rate mqar --seconds inf", "less than or equal to 3600, got 'inf'; see "),
        ("data rate mqar --seconds -1", "or equal to 0.01, got '-1'; see "),
        *((f"run quickstart {option} {10**40}", option) for option in ("--seeds", "--threads", "--jobs")),
        ("report --scal paper", "error: report: No such option: --scal"),
        ("report quickstart --scale", "error: report: Option '--scale' requires an argument; see"),
        ("--scale paper", "error: No such option: --scale"),
        ("run", "error: run: Missing argument 'experiments'; see "),
        ("data prepar", "error: data: No such command 'prepar'"),
    ],
)
def test_wrong_words_are_named_in_one_line_without_the_words_of_a_library(command_line, line, reason):
    done = command_line(*shlex.split(line))
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Value error" not in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_table_without_rows_says_which_scales_have_some(command_line, tmp_path):
    """A table of dashes would say that nothing has been run."""
    words = "note: no run of scale paper is stored; there are runs of small\n"
    assert command_line("report", "mamba/table6", "--scale", "paper").stderr == words
    for quiet in (("--scale", "small"), ("--scale", "paper", "--results", tmp_path)):
        assert command_line("report", "mamba/table6", *quiet).stderr == ""
