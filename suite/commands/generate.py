"""`generate`: continues prompts with a trained model."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.suite.commands.repository import Device, Plugins, StoredResults, Weights, repository_of
from subquad.suite.options import located

if TYPE_CHECKING:
    from torch import Tensor

    from subquad.suite.contracts import Task
    from subquad.suite.harness import Decode, Encode


def generate(
    context: typer.Context,
    weights: Weights,
    prompts: Annotated[
        list[str], typer.Option("--prompt", help="Text, or token ids where the task has no text; repeatable.")
    ],
    ids: Annotated[bool, typer.Option("--ids", help="Prompts and output are token ids.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Divisor of the logits; 0 is greedy.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens with this sum.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text (or ids) to stop behind; repeatable.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampled tokens.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Copy of the run's tokenizer.json; default: the file it was trained with.")
    ] = None,
    plugins: Plugins = None,
    device: Device = None,
    results: StoredResults = None,
) -> None:
    """Continue prompts with a trained model. With a single prompt, tokens are printed as they come."""
    from subquad.suite.generate import Sampling
    from subquad.suite.generate import generate as continue_prompts
    from subquad.suite.store.weights import find_weights
    from subquad.suite.training.weights import load_model, with_tokenizer

    Sampling(temperature, top_k, top_p)
    repository = repository_of(context, plugins)
    path = find_weights(weights, repository.roots(results), repository.unfetched)

    import torch

    from subquad.suite.environment import pick_device
    from subquad.suite.settings.resolver import Resolver

    target = pick_device(device)
    task, model = load_model(path, Resolver(repository.tasks, repository.models), target)
    spec = task.spec
    if (spec.input, spec.readout) != ("tokens", "token") or spec.num_classes > spec.vocab_size:
        raise ValueError(f"{path}: its task does not predict the next token, so its model continues nothing")
    if tokenizer is not None and (ids or getattr(task, "tokenizer", None) is None):
        raise ValueError(f"--tokenizer {tokenizer}: these weights have none, or --ids needs none; leave it out")
    if not ids:
        task, note = with_tokenizer(task, path, tokenizer)
        if note:
            typer.echo(f"note: {note}", err=True)
    encode, decode = _text(task, ids)
    rows = [_tokens("--prompt", prompt, encode, spec.vocab_size) for prompt in prompts]
    stops = {text: _tokens("--stop", text, encode, spec.vocab_size) for text in stop or ()}
    until = _until(decode, stops)
    longest = max(map(len, rows))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=target)
    lengths = torch.tensor([len(row) for row in rows], device=target)

    # a model that has no more positions says so before anything is printed
    _require_positions(model, longest, max_new_tokens)

    alone = len(rows) == 1
    if alone:
        print(prompts[0], end="" if decode is not _numbers else " ", flush=True)
    rest: list[list[int]] = [[] for _ in rows]

    def collect(part: Tensor) -> bool:
        before = until(rest[0])[0] if alone else ""
        for row, tokens in zip(rest, part.tolist(), strict=True):
            row += tokens
        found = [until(row) for row in rest]
        if alone:
            print(found[0][0][len(before) :], end="", flush=True)
        return all(stopped for _, stopped in found)

    continue_prompts(
        model,
        padded,
        max_new_tokens,
        lengths=None if alone or lengths.min() == longest else lengths,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        callback=collect,
        every=4,
    )
    if alone:
        print()
        return
    for prompt, row in zip(prompts, rest, strict=True):
        print(prompt + (" " if decode is _numbers else "") + until(row)[0])


def _require_positions(model: Any, prompt: int, new: int) -> None:
    """Raises ValueError where a model has no positions for so many new tokens behind a prompt, with the most it has."""

    def fault(count: int) -> str:
        try:
            model.init_state(1, prompt + count - 1)
        except ValueError as error:
            return str(error)
        return ""

    if said := fault(new):
        if most := bisect.bisect_left(range(1, new), True, key=lambda count: bool(fault(count))):
            raise ValueError(
                f"--max-new-tokens {new}: the model has no positions for so many behind a prompt of {prompt}; give at "
                f"most {most}"
            )
        raise ValueError(f"{said} The prompt has {prompt} tokens.")


def _until(decode: Decode, stops: dict[str, list[int]]) -> Callable[[list[int]], tuple[str, bool]]:
    """Returns a function from new tokens to their text, up to the end of the first stop, and whether there is one.

    stops: text of each stop and its tokens. Ids are compared with ids, and text with text.
    """
    from subquad.suite.generate import end_of_stop

    def text_until(tokens: list[int]) -> tuple[str, bool]:
        text = decode(tokens)
        # a text that was encoded and decoded may have other letters, such as capitals
        end = end_of_stop(text, [*stops, *map(decode, stops.values())])
        return text[:end], end is not None

    def ids_until(tokens: list[int]) -> tuple[str, bool]:
        ends = [_end_of(tokens, stop) for stop in stops.values()]
        end = min((end for end in ends if end), default=None)
        return decode(tokens[:end]), end is not None

    return ids_until if decode is _numbers else text_until


def _end_of(tokens: Sequence[int], part: Collection[int]) -> int:
    """Returns the end of the first occurrence of this part among the tokens; 0 without one."""
    size = len(part)
    found = (end for end in range(size, len(tokens) + 1) if tokens[end - size : end] == part)
    return next(found, 0)


def _text(task: Task, ids: bool) -> tuple[Encode, Decode]:
    """The functions from text to tokens and back."""
    if ids or not task.has_text:
        return _parse_numbers, _numbers
    return task.encode, task.decode


def _parse_numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(
            "expected token ids, such as '3 17 4', because --ids asks for them or the task has no text"
        ) from None


def _numbers(tokens: list[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def _tokens(option: str, text: str, encode: Encode, vocab_size: int) -> list[int]:
    tokens = located(f"{option} {text!r}", lambda: encode(text))
    if not tokens:
        raise ValueError(f"{option}: empty; give at least one token")
    wrong = [token for token in tokens if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"{option} {text!r}: token {wrong[0]} is not in the vocabulary of 0 to {vocab_size - 1}")
    return tokens
