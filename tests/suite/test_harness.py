"""The requests of `evaluate` to a model: how texts become tokens, where answers end, by which rule they are drawn.

The rules are those of the models of the hub in lm-evaluation-harness, which need not be installed here.
"""

import sys
from itertools import pairwise

import pytest
import torch

from subquad.suite.commands.evaluate import _text
from subquad.suite.generate import Sampling, end_of_stop
from subquad.suite.harness import Answers, asked, version
from subquad.tasks.language import TextFile, train_bpe

CPU = torch.device("cpu")
WORDS = ["<|endoftext|>", *"abcdefgh \n", " a", " ab", "cd", "ef"]
END = 0


def encode(text):
    """The longest token first, as byte pairs do: a space belongs to the word behind it."""
    tokens = []
    while text:
        word = max((word for word in WORDS[1:] if text.startswith(word)), key=len)
        tokens.append(WORDS.index(word))
        text = text[len(word) :]
    return tokens


def decode(tokens):
    return "".join(WORDS[token] for token in tokens)


class Cycle:
    """A model that finds the next token of a repeated text the likeliest, and has seen what it was asked."""

    def __init__(self, text):
        self.tokens, self.asked = text, []

    def __call__(self, inputs):
        self.asked.append(inputs.clone())
        return self._logits(inputs)

    def _logits(self, tokens):
        following = dict(zip(self.tokens, self.tokens[1:], strict=False))
        wanted = torch.tensor([[following.get(int(token), 1) for token in row] for row in tokens.view(len(tokens), -1)])
        return torch.nn.functional.one_hot(wanted, len(WORDS)).float().view(*tokens.shape, -1) * 9

    def init_state(self, batch_size, capacity=None):
        return (torch.zeros(batch_size),)

    def restart(self, state):
        pass

    def prefill(self, inputs, lengths=None, *, state=None, capacity=None):
        self.asked.append(inputs.clone())
        return self._logits(inputs[:, -1]), state

    def step(self, inputs_t, state):
        self.asked.append(inputs_t[:, None].clone())
        return self._logits(inputs_t), state


def answers(model, end=END):
    return Answers(model, encode, decode, 32, 4, CPU, end)


def continuation(made, context, text):
    return next(made.continuations([(context, text)]))


def test_a_sum_that_is_no_number_ends_an_evaluation():
    model = Cycle([])
    model._logits = lambda tokens: torch.full((*tokens.shape, len(WORDS)), torch.nan)
    with pytest.raises(ValueError, match="the model gives NaN for a text of 2 tokens"):
        continuation(answers(model), "c", " ab")


@pytest.mark.parametrize(("context", "text"), [("c", " ab"), ("c ", "ab"), ("c  ", "ab"), ("c\n", "ab")])
def test_a_context_and_its_continuation_are_encoded_as_one_text(context, text):
    model = Cycle([])
    continuation(answers(model), context, text)
    whole = encode(context + text)
    assert model.asked[0].tolist() == [whole[:-1]]


def test_a_text_that_joins_the_last_token_of_its_context_is_encoded_alone():
    model = Cycle([WORDS.index("c"), WORDS.index("d")])
    assert continuation(answers(model), "c", "d")[1]
    assert model.asked[0].tolist() == [encode("c")]


def test_a_text_that_begins_within_a_token_keeps_all_of_its_tokens():
    model = Cycle([])
    continuation(answers(model), "c", "def")
    # cd and ef are the tokens of the whole, and the second of them is not all of the text
    assert model.asked[0].tolist() == [encode("c") + encode("def")[:-1]]


class Bigrams:
    """A model whose next token depends on the last one and on the position, and which reads 4 tokens at most."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.log_p = torch.randn(4, len(WORDS), len(WORDS), generator=generator).log_softmax(-1)

    def __call__(self, inputs):
        assert inputs.shape[1] <= 4
        return torch.stack([self.log_p[t, inputs[:, t]] for t in range(inputs.shape[1])], dim=1)


@pytest.mark.parametrize(("context", "size"), [(1, 4), (3, 4), (1, 9), (3, 9), (6, 5), (6, 2)])
def test_a_text_longer_than_the_model_reads_has_the_sum_of_all_its_tokens(context, size):
    tokens = encode("abcabdabeabfa")[: context + size]
    text = decode(tokens)
    split = len(decode(tokens[:context]))
    model, wanted = Bigrams(), 0.0
    for start in range(context, len(tokens), 4):
        window = tokens[max(0, min(start + 4, len(tokens)) - 5) : start + 4]
        skipped = len(window) - len(tokens[start : start + 4])
        pairs = list(pairwise(window))
        wanted += sum(float(model.log_p[t, a, b]) for t, (a, b) in enumerate(pairs) if t + 1 >= skipped)
    made = Answers(model, encode, decode, 4, 3, CPU, END)
    (alone,) = made.continuations([(text[:split], text[split:])])
    assert alone[0] == pytest.approx(wanted, rel=1e-5)
    # the windows of each text are those of this text alone
    among = list(made.continuations([("a", "b"), (text[:split], text[split:]), ("a", "bcdabc")]))
    assert among[1][0] == pytest.approx(wanted, rel=1e-5)


def test_a_context_that_ends_in_a_space_scores_as_the_space_within_the_continuation():
    model = Cycle([WORDS.index("c"), WORDS.index(" ab")])
    assert continuation(answers(model), "c ", "ab") == continuation(answers(model), "c", " ab")
    assert continuation(answers(model), "c ", "ab")[1]


def test_a_context_of_spaces_is_a_context():
    model = Cycle([])
    continuation(answers(model), " ", "cd")
    assert model.asked[0].tolist() == [encode(" ")]


@pytest.mark.parametrize(("end", "before"), [(END, [END]), (None, [WORDS.index("\n")])])
def test_a_text_without_a_context_follows_the_end_of_a_text_or_a_line_break(end, before):
    model = Cycle([])
    continuation(answers(model, end), "", " ab")
    answers(model, end).continued("", [], 2, Sampling(0.0))
    assert model.asked[0].tolist() == [before]
    assert model.asked[1].tolist() == [before]


def test_a_line_break_that_begins_a_text_is_a_token_of_it():
    model = Cycle([])
    continuation(answers(model, None), "", "\ncd")
    assert model.asked[0].tolist() == [encode("\n\n")]
    wanted = -2 * float(torch.nn.functional.one_hot(torch.tensor(1), len(WORDS)).float().mul(9).logsumexp(-1))
    assert continuation(answers(model, None), "", "\ncd")[0] == pytest.approx(wanted)
    assert continuation(answers(model, None), "", "\n")[0] == pytest.approx(wanted / 2)


def test_a_text_follows_the_token_of_the_start_and_ends_with_that_of_the_end():
    first, last = WORDS.index("h"), END
    model = Cycle([first, WORDS.index("c"), last])
    made = Answers(model, encode, decode, 32, 4, CPU, last, first)
    assert next(made.wholes(["c"])) == continuation(made, "", "c")[0] == continuation(made, "", "hc")[0]
    assert model.asked[0].tolist() == model.asked[1].tolist() == model.asked[2].tolist() == [[first]]
    assert made.continued("", [], 9, Sampling(0.0)) == "c"


def test_the_end_of_the_text_ends_an_answer():
    loop = [WORDS.index("c"), WORDS.index("d"), END, WORDS.index("e"), WORDS.index("f")]
    assert answers(Cycle(loop)).continued("c", [], 9, Sampling(0.0)) == "d"
    assert answers(Cycle(loop), end=None).continued("c", [], 4, Sampling(0.0)) == "d<|endoftext|>ef"


def test_a_stop_is_found_over_the_borders_of_tokens():
    loop = [WORDS.index(word) for word in ("a", "b", "cd", "ef", "g", "h")]
    assert answers(Cycle(loop)).continued("a", ["de"], 5, Sampling(0.0)) == "bc"
    assert end_of_stop("bcdefg", ["x", "de", "fg"]) == 4
    assert end_of_stop("bcdefg", ["x"]) is None


def test_samples_are_drawn_where_a_task_asks_for_them():
    assert asked({}) == ([], 256, Sampling(0.0))
    assert asked({"until": "x", "temperature": 0.7, "max_gen_toks": 9}) == (["x"], 9, Sampling(0.7, 50))
    assert asked({"do_sample": False, "temperature": 0.7, "max_tokens": 7, "max_new_tokens": 5}) == (
        [],
        5,
        Sampling(0.0),
    )
    assert asked({"temperature": 0.0, "max_completion_tokens": 7}) == ([], 7, Sampling(0.0))
    drawn = asked({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "until": ["x"]})
    assert drawn == (["x"], 256, Sampling(0.7, 50, 0.9))
    assert asked({"do_sample": False, "num_beams": 1})[2] == Sampling(0.0)
    with pytest.raises(ValueError, match="answers with num_beams=4, which evaluate does not have; leave it out"):
        asked({"num_beams": 4})


def test_samples_differ_from_the_likeliest_answer():
    torch.manual_seed(0)
    flat = Cycle([])
    flat._logits = lambda tokens: torch.zeros(*tokens.shape, len(WORDS))
    assert len(set(answers(flat, None).continued("a", [], 20, Sampling(1.0)))) > 3


def test_the_token_of_the_start_of_a_text_is_one_that_was_added_to_the_vocabulary(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    task = TextFile(data=tmp_path, vocabulary="bpe", vocab_size=300)
    made = train_bpe("a <s> b <s> c\n" * 50, 262)
    # whoever trains on text with such a word has it as a token
    vocabulary = {**made.get_vocab(), "<s>": made.get_vocab_size()}
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    plain.add_special_tokens(["</s>"])
    plain.save(str(tmp_path / "tokenizer.json"))
    assert _text(task, tmp_path / "tokenizer.json")[2:] == (len(vocabulary), None)
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    assert _text(task, tmp_path / "tokenizer.json")[2:] == (made.token_to_id("</s>"), made.token_to_id("<s>"))


def test_a_package_that_is_too_old_is_refused_in_one_line(monkeypatch):
    # an older one has no such module
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ValueError, match=r"evaluate needs lm-evaluation-harness \(.*\); install the extra: .*eval"):
        version()
