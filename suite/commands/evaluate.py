"""`evaluate`: runs tasks of lm-evaluation-harness on a trained language model and stores the results as rows."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.suite.commands.repository import LOCAL, Device, Plugins, Results, Weights, repository_of
from subquad.suite.environment import with_extra
from subquad.suite.metrics import is_number

if TYPE_CHECKING:
    import torch

    from subquad.suite.contracts import Task
    from subquad.suite.harness import Decode, Encode
    from subquad.suite.model import Model

EXPERIMENT = "evaluate"
"""The experiment under which evaluations keep their rows."""


def evaluate(
    context: typer.Context,
    weights: Weights,
    tasks: Annotated[str, typer.Option("--tasks", help="Tasks of lm-evaluation-harness: boolq,fda,swde.")],
    folder: Annotated[
        Path | None, typer.Option("--include", help="Folder with YAML files of tasks of your own.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--shots", min=0, max=100, help="Examples in a prompt; default: the task's own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents of a task; default: all.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json of a checkpoint, or a copy of the run's; default: as in training."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Continuations read at a time.")] = 16,
    plugins: Plugins = None,
    device: Device = None,
    results: Results = LOCAL,
) -> None:
    """Run tasks of lm-evaluation-harness on a trained language model, and store the rows."""
    from subquad.suite import harness

    names = [name for name in tasks.split(",") if name]
    if not names:
        raise ValueError("--tasks: empty; name at least one task")
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--include {folder}: there is no such folder")
    version = harness.version()
    from subquad.suite.store.weights import find_weights, mark, model_settings
    from subquad.suite.training.weights import load_model, with_tokenizer

    repository = repository_of(context, plugins)
    path = find_weights(weights, [results, repository.reference], repository.unfetched)

    from subquad.suite.environment import pick_device
    from subquad.suite.identity import files_digest
    from subquad.suite.settings.resolver import Resolver
    from subquad.suite.store import storage
    from subquad.suite.store.target import probe, writable

    target = pick_device(device)
    task, model = load_model(path, Resolver(repository.tasks, repository.models), target)
    spec = task.spec
    if (spec.input, spec.readout) != ("tokens", "token"):
        raise ValueError(f"{path}: its task does not predict the next token, so its model continues nothing")
    task, note = with_tokenizer(task, path, tokenizer)
    if note:
        typer.echo(f"note: {note}", err=True)
    elif getattr(task, "tokenizer", None) is not None:
        # the same tokenizer, wherever it lies
        tokenizer = None
    encode, decode, end, start = _text(task, tokenizer)
    settings: dict[str, Any] = {
        "weights": mark(path),
        "tasks": names,
        "shots": num_fewshot,
        "limit": limit,
        "harness": version,
        "rules": harness.RULES,
        # the folder may hold files that a task reads when it scores an answer
        **({} if tokenizer is None else {"tokenizer": files_digest([tokenizer], tokenizer.parent)}),
        **({} if folder is None else {"include": files_digest(folder.rglob("*"), folder)}),
    }
    scale = "all" if limit is None else "limited"
    with writable("--results", results):
        # the answers may take hours, so a folder that cannot be written is an error now
        probe(results / EXPERIMENT / scale)
    answers = harness.Answers(model, encode, decode, spec.max_length, batch_size, target, end, start)
    scores, asked = harness.evaluate(answers, names, folder=folder, num_fewshot=num_fewshot, limit=limit)

    shared = _columns({**settings, "asked": asked}, scale, model_settings(path)[0], target)
    rows: list[dict[str, Any]] = []
    kept = {score.task for score in scores if num_fewshot is not None and score.shots not in (None, num_fewshot)}
    for task_name in sorted(kept):
        typer.echo(f"note: {task_name} sets its own number of examples, so --shots does not change it", err=True)
    for score in scores:
        print(f"{score.task:24s} {score.metric:24s} {score.value:10.4f}" + _error(score.error))
        for metric, value in ((score.metric, score.value), (f"{score.metric} (standard error)", score.error)):
            if value is not None:
                row = {"task": score.task, "slice": _slice(num_fewshot, score.shots), "metric": metric, "unit": ""}
                rows.append({**shared, **row, **_measured(metric, value)})
    rows.append({**shared, "task": "", "split": "", **_operations(model, spec.max_length)})
    place = storage.result_path(results, EXPERIMENT, scale, shared["run_id"])
    with writable("--results", results):
        storage.write(place, [*rows, {**shared, "metric": "run", "unit": "", "value": None}])
    print(f"{place}: {len(rows)} rows, lm-evaluation-harness {version}")


def _columns(settings: dict[str, Any], scale: str, model: str, device: torch.device) -> dict[str, Any]:
    """Returns the columns that all rows of an evaluation share, given its settings and the name of its model."""
    from subquad.suite.environment import provenance
    from subquad.suite.identity import identity

    return {
        "run_id": identity(settings),
        "experiment": EXPERIMENT,
        "scale": scale,
        "model": model,
        "split": "test",
        "slice": _slice(settings["shots"], settings["shots"]),
        "status": "ok",
        "error": "",
        "config": json.dumps(settings, sort_keys=True),
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **provenance(device),
    }


def _slice(asked: int | None, shots: int | None) -> str:
    """The slice of a score. asked: the examples in a prompt that were asked for; shots: those that a task then had."""
    return "own number of shots" if asked is None or shots is None else f"shots={shots}"


def _measured(metric: str, value: float) -> dict[str, Any]:
    """The columns of a score; one that is not finite, such as a perplexity, is no number that can be stored."""
    if is_number(value):
        return {"value": value}
    return {"value": None, "status": "n/a", "error": f"{metric} is {value:g}"}


def _operations(model: Model, length: int) -> dict[str, Any]:
    """The columns of the operations of a forward pass of `length` tokens, for each token."""
    import torch

    from subquad.suite.operations import OperationCounter, OperationsUnknown

    row: dict[str, Any] = {"metric": "inference_flops", "unit": "flop", "slice": f"length={length}"}
    try:
        tokens = torch.empty(1, length, dtype=torch.long, device="meta")
        return {**row, "value": OperationCounter(model).forward(tokens) / length}
    except OperationsUnknown as reason:
        return {**row, "value": None, "status": "n/a", "error": str(reason)}


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def _text(task: Task, tokenizer: Path | None) -> tuple[Encode, Decode, int | None, int | None]:
    """The functions from text to tokens and back, and the tokens of the end and the start of a text, where it has them.

    ValueError where the model has no embedding for some of the tokens.
    """
    from subquad.suite.harness import END_TOKENS, START_TOKENS
    from subquad.suite.store.documents import read_tokenizer

    file = tokenizer or getattr(task, "tokenizer", None)
    if file is None:
        if not task.has_text:
            raise ValueError("the task of these weights has no text; evaluate a model of text-file or wikitext")
        # a task without a tokenizer says so now and not at the first question
        task.encode("a")
        return task.encode, task.decode, None, None
    try:
        made = read_tokenizer(file)
    except ImportError:
        raise ValueError(f"--tokenizer needs tokenizers; install the extra: {with_extra('data')}.") from None
    vocabulary = made.get_vocab(with_added_tokens=True)
    largest, size = max(vocabulary.values()), task.spec.vocab_size
    if largest >= size:
        raise ValueError(
            f"{file}: has the token {largest}, but the model has embeddings of 0 to {size - 1} only; name "
            "the tokenizer with which it was trained"
        )
    end = next((vocabulary[name] for name in END_TOKENS if name in vocabulary), None)
    # `<s>` may also be a word of the text
    special = {token.content: number for number, token in made.get_added_tokens_decoder().items()}
    start = next((special[name] for name in START_TOKENS if name in special), None)
    if tokenizer is None:
        return task.encode, task.decode, end, start
    return lambda text: list(made.encode(text, add_special_tokens=False).ids), made.decode, end, start
