"""Language models of the suite behind the interface of lm-evaluation-harness, so that its tasks can be asked of them.

The package is optional (extra `eval`) and imported here alone. A text is what the model's task or a tokenizer makes of
it; nothing is added, and a text that is asked for without a context follows a line break.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from suite.generate import generate
from suite.model import Model
from suite.registry import nearest

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]

BEFORE = "\n"
"""Stands before a text that has no context."""
PACKAGE = "lm_eval"


class Score(NamedTuple):
    """One number of an evaluation."""

    task: str
    metric: str
    value: float
    error: float | None
    """Its standard error, where the harness gives one."""


def harness() -> Any:
    """The package. ValueError where it is not installed."""
    try:
        import lm_eval
    except ImportError as error:
        raise ValueError(
            f"evaluate needs lm-evaluation-harness ({error}); install the extra: pip install -e '.[eval]'."
        ) from None
    return lm_eval


def version() -> str:
    """The version of the installed package."""
    harness()
    return importlib.metadata.version(PACKAGE)


class Answers:
    """The harness's interface to a model: likelihoods of continuations and of texts, and greedy continuations.

    length: longest sequence that the model reads; of a longer one, the end is kept.
    """

    def __init__(
        self, model: Model, encode: Encode, decode: Decode, length: int, batch_size: int, device: torch.device
    ) -> None:
        self.model, self.encode, self.decode = model, encode, decode
        self.length, self.batch_size, self.device = length, batch_size, device

    def continuation(self, context: str, text: str) -> tuple[float, bool]:
        """Sum of log p of the tokens of `text` behind `context`, and whether each is the likeliest one."""
        return next(self.continuations([(context, text)]))

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[float, bool]]:
        """`continuation` for many pairs, in their order."""
        rows = []
        for context, text in pairs:
            answer = self.encode(text)
            before = self.encode(context or BEFORE)
            rows.append(((before + answer)[-(self.length + 1) :], len(answer)))
        for start in range(0, len(rows), self.batch_size):
            yield from self._scored(rows[start : start + self.batch_size])

    @torch.no_grad()
    def _scored(self, rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        """(sum of log p, all likeliest) of the last `count` tokens of every (tokens, count)."""
        longest = max(len(tokens) for tokens, _ in rows)
        # later tokens do not change the probability of a token
        padded = torch.zeros(len(rows), longest, dtype=torch.long, device=self.device)
        for row, (tokens, _) in enumerate(rows):
            padded[row, : len(tokens)] = torch.tensor(tokens, device=self.device)
        log_p = self.model(padded[:, :-1]).float().log_softmax(-1)
        for row, (tokens, count) in enumerate(rows):
            # a text longer than the model reads keeps the tokens that have a context
            count = min(count, len(tokens) - 1)
            part = log_p[row, len(tokens) - 1 - count : len(tokens) - 1]
            wanted = torch.tensor(tokens[len(tokens) - count :], device=self.device)
            chosen = part.gather(-1, wanted[:, None])
            yield float(chosen.sum()), bool((part.argmax(-1) == wanted).all())

    def whole(self, text: str) -> float:
        """Sum of log p of all tokens of a text, each with as much context as the model reads."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        tokens, first = self.encode(text), self.encode(BEFORE)[-1]
        windows = map(make_disjoint_window, get_rolling_token_windows(tokens, first, self.length, 1))
        rows = [(context + answer, len(answer)) for context, answer in windows]
        parts = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        return sum(total for part in parts for total, _ in self._scored(part))

    def greedy(self, context: str, until: Sequence[str], max_new_tokens: int) -> str:
        """The likeliest continuation up to the first of the texts `until`."""
        # a question keeps half of the positions also where more tokens are asked for than the others
        room = max(1, self.length - max_new_tokens, self.length // 2)
        prompt = torch.tensor([self.encode(context or BEFORE)[-room:]], device=self.device)
        count = min(max_new_tokens, self.length - prompt.shape[1] + 1)
        made: Tensor = generate(self.model, prompt, count, temperature=0.0)
        text = self.decode(made[0].tolist())
        ends = [text.find(word) for word in until if word and word in text]
        return text[: min(ends)] if ends else text


def evaluate(
    answers: Answers,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> list[Score]:
    """The scores of a model on tasks of the harness.

    folder: YAML files with tasks of one's own. num_fewshot: examples in a prompt; None: the task's own number.
    limit: number of documents of a task.
    """
    harness()
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate

    class Adapter(LM):
        """The answers in the words of the harness."""

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return list(answers.continuations([request.args for request in requests]))

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return [answers.whole(request.args[0]) for request in requests]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            made = []
            for context, options in (request.args for request in requests):
                until = options.get("until") or []
                until = [until] if isinstance(until, str) else until
                made.append(answers.greedy(context, until, int(options.get("max_gen_toks", 256))))
            return made

    manager = _manager(tasks, folder)
    try:
        found = simple_evaluate(
            model=Adapter(),
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=100,
            log_samples=False,
        )
    except (ConnectionError, FileNotFoundError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"--tasks {','.join(tasks)}: the data of a task are not here ({reason})") from None
    return [score for name, values in found["results"].items() for score in _scores(name, values)]


def _manager(tasks: Sequence[str], folder: Path | None) -> Any:
    """Returns a manager of all these tasks. It tries the folder first, because finding the harness's takes seconds."""
    from lm_eval.tasks import TaskManager

    own = None if folder is None else str(folder)
    manager = TaskManager(include_path=own, include_defaults=own is None)
    if own is not None and not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=own)
    for name in tasks:
        if name not in manager.all_tasks:
            raise ValueError(f"--tasks: no task {name!r}{nearest(name, manager.all_tasks)} in lm-evaluation-harness")
    return manager


def _scores(task: str, values: dict[str, Any]) -> Iterator[Score]:
    for key, value in values.items():
        metric, _, kind = key.partition(",")
        if metric.endswith("_stderr") or not isinstance(value, (int, float)) or not kind:
            continue
        error = values.get(f"{metric}_stderr,{kind}")
        name = metric if kind == "none" else f"{metric} ({kind})"
        yield Score(task, name, float(value), float(error) if isinstance(error, (int, float)) else None)
