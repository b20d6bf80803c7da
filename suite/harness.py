"""Language models of the suite behind the interface of lm-evaluation-harness, so that its tasks can evaluate them.

The package is optional (extra `eval`) and imported here alone. A text is what the model's task or a tokenizer makes of
it, and nothing is added. Where the package's own models of the hub leave a choice, it is made as there: a context and
its continuation are encoded as one text, the token of the end of a text ends an answer, and a text without a context
follows the token of the start of a text or else that of its end. Where a vocabulary has neither, such as that of bytes,
it follows a line break. Those models lose tokens of a continuation that begins within a token, and refuse one that is
longer than what they read; here the first is encoded alone, and the second is read in several windows.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.suite.environment import with_extra
from subquad.suite.generate import Sampling, end_of_stop, generate
from subquad.suite.imports import content_of
from subquad.suite.model import Model
from subquad.suite.registry import nearest

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]

BEFORE = "\n"
"""Stands before a text that has no context, where the vocabulary has no token for the start or the end of a text."""
START_TOKENS = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>")
"""Names of the token for the start of a text in the vocabularies that people use, if it is not the one for its end."""
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Names of the token for the end of a text in the vocabularies that people use."""
RULES = 3
"""Raised whenever the same question of the same model may have another answer."""
PACKAGE = "lm_eval"
ASKED = ("doc_id", "doc", "target", "arguments")
"""Entries of a sample that do not depend on the model."""
PLACES = ("dataset_path", "dataset_name", "dataset_kwargs", "metadata")
"""Settings of a task that say where its files are, which is no part of an identity."""


class Score(NamedTuple):
    """One number of an evaluation."""

    task: str
    metric: str
    value: float
    error: float | None
    """Its standard error, where the harness gives one."""
    shots: int | None
    """Examples in its prompts; None for a group whose tasks differ in it."""


class Evaluation(NamedTuple):
    """The scores of a model, and a digest of all that it was asked."""

    scores: list[Score]
    asked: str
    """SHA-256 of the documents, prompts and right answers, the settings of the tasks, and the user's code in them."""


def version() -> str:
    """The version of the installed package. ValueError where there is none, or one that cannot be used."""
    try:
        import lm_eval.api.model
        import lm_eval.evaluator
        import lm_eval.tasks  # noqa: F401
    # older versions ask other packages for names that these no longer have
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"evaluate needs lm-evaluation-harness ({error}); install the extra: {with_extra('eval')}."
        ) from None
    return importlib.metadata.version(PACKAGE)


class Answers:
    """The harness's interface to a model: likelihoods of continuations and of texts, and continuations by a rule.

    length: longest sequence that the model reads; of a longer one, the end is kept.
    end: token of the end of a text, where the vocabulary has one. start: that of its start, where it is another one.
    """

    def __init__(
        self,
        model: Model,
        encode: Encode,
        decode: Decode,
        length: int,
        batch_size: int,
        device: torch.device,
        end: int | None = None,
        start: int | None = None,
    ) -> None:
        self.model, self.encode, self.decode = model, encode, decode
        self.length, self.batch_size, self.device, self.end = length, batch_size, device, end
        self._named = end if start is None else start
        self.start = encode(BEFORE)[-1] if self._named is None else self._named
        """The token before a text without a context."""

    def _together(self, context: str, text: str) -> tuple[list[int], int]:
        """The tokens of a text behind its context, and how many of them are those of the text.

        The spaces at the end of a context begin the text, because a token holds a space and the word behind it.
        """
        bare = context.rstrip() or context
        text = context[len(bare) :] + text
        before = self.encode(bare)
        if not before:
            tokens = self.encode(text)
            # a text that says itself where it begins
            whole = tokens if tokens[:1] == [self._named] else [self.start, *tokens]
            return whole, len(whole) - 1
        whole = self.encode(bare + text)
        if whole[: len(before)] != before:
            # a token over the border is no token of the text
            whole = before + self.encode(text)
        return whole, len(whole) - len(before)

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[float, bool]]:
        """Yields for each (context, text) the sum of log p of the text's tokens, and whether each is the likeliest."""
        return self._sums([self._together(context, text) for context, text in pairs])

    def wholes(self, texts: Sequence[str]) -> Iterator[float]:
        """Yields for each text the sum of log p of all its tokens, each behind as much text as the model reads."""
        tokens = map(self.encode, texts)
        return (total for total, _ in self._sums([([self.start, *part], len(part)) for part in tokens]))

    def _sums(self, texts: Sequence[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        """(sum of log p, all likeliest) of the last `count` tokens of every (tokens, count)."""
        rows = [row for tokens, count in texts for row in self._windows(tokens, count)]
        starts = range(0, len(rows), self.batch_size)
        scored = chain.from_iterable(self._scored(rows[start : start + self.batch_size]) for start in starts)
        for _, count in texts:
            parts = list(islice(scored, -(-count // self.length)))
            yield sum((total for total, _ in parts), 0.0), all(likeliest for _, likeliest in parts)

    def _windows(self, tokens: list[int], count: int) -> Iterator[tuple[list[int], int]]:
        """The windows that hold each of the last `count` tokens once behind others, as many as the model reads.

        They are those of `lm_eval.utils.get_rolling_token_windows` with a context of 1.
        """
        for done in range(len(tokens) - count, len(tokens), self.length):
            end = min(done + self.length, len(tokens))
            yield tokens[max(0, end - self.length - 1) : end], end - done

    @torch.no_grad()
    def _scored(self, rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        """`_sums` of windows, in which a token stands before the last `count`."""
        longest = max(len(tokens) for tokens, _ in rows)
        # later tokens do not change the probability of a token
        padded = torch.zeros(len(rows), longest, dtype=torch.long, device=self.device)
        for row, (tokens, _) in enumerate(rows):
            padded[row, : len(tokens)] = torch.tensor(tokens, device=self.device)
        logits = self.model(padded[:, :-1])
        for row, (tokens, count) in enumerate(rows):
            # in float32 those of a whole batch may take more memory than the model
            part = logits[row, len(tokens) - 1 - count : len(tokens) - 1].float().log_softmax(-1)
            wanted = torch.tensor(tokens[len(tokens) - count :], device=self.device)
            total = float(part.gather(-1, wanted[:, None]).sum())
            if math.isnan(total):
                # the largest of several such sums, by which an answer is chosen, would be the first NaN
                raise ValueError(f"evaluate: the model gives NaN for a text of {len(tokens)} tokens")
            yield total, bool((part.argmax(-1) == wanted).all())

    def continued(
        self, context: str, until: Sequence[str], max_new_tokens: int, sampling: Sampling, seed: int = 0
    ) -> str:
        """A continuation by a rule. It ends before the first of the texts `until`, or with the end of the text."""
        # a question keeps half of the positions also where more tokens are asked for than the others
        room = max(1, self.length - max_new_tokens, self.length // 2)
        prompt = torch.tensor([(self.encode(context) or [self.start])[-room:]], device=self.device)
        count = min(max_new_tokens, self.length - prompt.shape[1] + 1)
        made: list[int] = []

        def found(part: Tensor) -> bool:
            made.extend(part[0].tolist())
            return end_of_stop(self.decode(made), until) is not None

        generate(
            self.model,
            prompt,
            count,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop=() if self.end is None else (self.end,),
            seed=seed,
            callback=found,
        )
        if self.end in made:
            made = made[: made.index(self.end)]
        text = self.decode(made)
        ends = [text.find(word) for word in until if word and word in text]
        return text[: min(ends)] if ends else text


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "min_new_tokens": (0,),
    "use_cache": (True, False),
}
"""Settings of a task's answers that change nothing with these values."""
MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the most tokens of an answer; the first one that is given counts."""


def asked(options: Mapping[str, Any]) -> tuple[list[str], int, Sampling]:
    """The texts that end an answer, its most tokens, and the rule by which they are drawn, of a task's settings.

    Samples are drawn where the task asks for them, or gives a temperature and does not say. ValueError for a setting
    that cannot be followed.
    """
    options = dict(options)
    until = options.pop("until", None) or []
    given = [options.pop(name, None) for name in MOST_TOKENS]
    most = next((int(number) for number in given if number is not None), 256)
    drawn, temperature = options.pop("do_sample", None), options.pop("temperature", None)
    if drawn is None:
        drawn = bool(temperature)
    # transformers keeps 50 tokens where a task asks for samples and says nothing else
    top_k, top_p = options.pop("top_k", 50), options.pop("top_p", None)
    for name, value in options.items():
        if value is not None and value not in NEUTRAL.get(name, ()):
            raise ValueError(
                f"a task asks for answers with {name}={value!r}, which evaluate does not have; leave it out"
            )
    rule = Sampling(temperature=0.0)
    if drawn:
        rule = Sampling(1.0 if temperature is None else float(temperature), top_k or None, top_p)
    return [until] if isinstance(until, str) else list(until), most, rule


def evaluate(
    answers: Answers,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> Evaluation:
    """The scores of a model on tasks of the harness.

    folder: YAML files with tasks of one's own. num_fewshot: examples in a prompt; None: the task's own number.
    limit: number of documents of a task.
    """
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate

    class Adapter(LM):
        """The answers in the words of the harness."""

        asked = False
        """Whether the tasks have been read and their first questions made."""

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            self.asked = True
            return list(answers.continuations([request.args for request in requests]))

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            self.asked = True
            return list(answers.wholes([request.args[0] for request in requests]))

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            self.asked = True
            # a setting that cannot be followed is an error before hours of answers
            rules = [asked(request.args[1]) for request in requests]
            contexts = [request.args[0] for request in requests]
            # each has a seed of its own, because a task may ask the same question several times
            questions = enumerate(zip(contexts, rules, strict=True))
            return [answers.continued(context, *rule, seed=number) for number, (context, rule) in questions]

    before = set(sys.modules)
    manager, adapter = _manager(tasks, folder), Adapter()
    try:
        found = simple_evaluate(
            model=adapter,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=100,
            log_samples=True,
        )
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(f"--tasks {','.join(tasks)}: the data of a task are not here ({_short(error)})") from None
    except Exception as error:
        if adapter.asked or isinstance(error, ValueError):
            raise
        # whoever wrote a task may have misspelt a key, a split, a metric or a column
        reason = f"{type(error).__name__}: {_short(error)}"
        raise ValueError(f"--tasks {','.join(tasks)}: a task cannot be asked as it is written ({reason})") from None
    results, shots = found["results"], found["n-shot"]
    scores = [score for name, values in results.items() for score in _scores(name, values, shots.get(name))]
    return Evaluation(scores, _asked(found, content_of(sys.modules.keys() - before)))


def _asked(found: Mapping[str, Any], code: Sequence[str]) -> str:
    """`Evaluation.asked`. code: digests of the files of the user's code."""
    samples = {name: [[one[key] for key in ASKED] for one in asked] for name, asked in found["samples"].items()}
    configs = {
        name: {key: config[key] for key in config if key not in PLACES} for name, config in found["configs"].items()
    }
    text = json.dumps([samples, configs, sorted(code)], default=str, skipkeys=True)
    # the address of an object in memory says nothing about it
    return hashlib.sha256(re.sub(" at 0x[0-9a-f]+", "", text).encode()).hexdigest()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


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


def _scores(task: str, values: dict[str, Any], shots: int | None) -> Iterator[Score]:
    for key, value in values.items():
        metric, _, kind = key.partition(",")
        if metric.endswith("_stderr") or not isinstance(value, Real) or not kind:
            continue
        error = values.get(f"{metric}_stderr,{kind}")
        name = metric if kind == "none" else f"{metric} ({kind})"
        yield Score(task, name, float(value), float(error) if isinstance(error, Real) else None, shots)
