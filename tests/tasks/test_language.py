"""Language modelling: every token counts once, byte pairs, and perplexities that do not depend on the vocabulary."""

import bz2
import codecs
import gzip
import json
import lzma
import math

import numpy as np
import pytest
import torch

from subquad.suite.contracts import IGNORE
from subquad.suite.training.trainer import Trainer
from subquad.tasks.data.faults import DataError
from subquad.tasks.language import TextFile, WikiText, encode, train_bpe
from tests.drawn import only
from tests.runs import one_run

TEXT = " = Homer = \n \n The gamma ray is a ray , not a <unk> . \n" * 40


@pytest.fixture
def folder(tmp_path):
    for split, text in (("train", TEXT), ("valid", TEXT[:300]), ("test", TEXT[:401])):
        (tmp_path / f"wiki.{split}.tokens").write_text(text)
    return tmp_path


def test_every_byte_but_the_first_is_predicted_once(folder):
    segment = only(WikiText(data=folder, length=64), "test")
    text = np.frombuffer(TEXT[:401].encode(), dtype=np.uint8)
    assert segment.inputs.shape == (7, 64)
    assert segment.positions is None
    targets = segment.targets.reshape(-1).numpy()
    assert (targets[targets != IGNORE] == text[1:]).all()
    assert (targets != IGNORE).sum() == 400
    assert (segment.inputs.reshape(-1).numpy()[:400] == text[:400]).all()


def test_score_gives_bits_a_byte_and_nats_a_word(folder):
    task = WikiText(data=folder, length=64)
    segment = only(task, "test")
    metrics = task.score(torch.zeros(*segment.targets.shape, 256), segment.targets)
    value = {name: float(total / count) for name, (total, count) in metrics.items()}
    assert value["loss"] == pytest.approx(math.log(256))
    assert value["bits_per_byte"] == pytest.approx(8)
    spaces = TEXT[1:401].count(" ")
    assert value["nats_per_word"] == pytest.approx(400 * math.log(256) / spaces)
    assert task.exponentials == {"perplexity": "loss", "word_perplexity": "nats_per_word"}


def test_byte_pairs_lose_nothing_and_cost_the_same_bits(folder):
    tokenizers = pytest.importorskip("tokenizers")
    task = WikiText(data=folder, length=16, vocabulary="bpe", vocab_size=280)
    segment = only(task, "test")
    arrays = task.arrays()
    stream = arrays["test.stream"]
    assert int(arrays["sizes"][stream].sum()) == 401
    assert int(arrays["spaces"][stream].sum()) == TEXT[:401].count(" ")
    assert len(stream) < 401
    assert segment.inputs.max() < 280
    # a uniform guess over the bytes of a token costs 8 bits per byte, whatever the token is
    logits = torch.from_numpy(-np.array(arrays["sizes"]) * math.log(256.0)).float()
    guess = logits.expand(*segment.targets.shape, 280)
    kept = segment.targets != IGNORE
    total, count = task.score(guess, segment.targets)["bits_per_byte"]
    normaliser = torch.logsumexp(logits, 0) * kept.sum() / math.log(2)
    assert float(total - normaliser) / float(count) == pytest.approx(8, rel=1e-4)
    assert tokenizers is not None


CODE = "def f(a):\n    if a:\n        return a  # caf\u00e9\n\n\nThe end .\n" * 40
SPACES = [" " * count for count in (2, 4, 8)]


def _of_byte_pairs(library, spaces):
    model = train_bpe(CODE, 280)
    model.add_tokens(spaces)
    return model


def _of_sentencepiece(library, prefix):
    norm, mark = library.normalizers, "\u2581"
    letters = [
        *["<unk>", "<s>", "</s>"],
        *(f"<0x{byte:02X}>" for byte in range(256)),
        mark,
        *"adefnrtuT.#:()",
        mark * 2,
    ]
    merges = [(mark, mark)]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    model = library.Tokenizer(library.models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    model.normalizer = norm.Sequence([*([norm.Prepend(mark)] if prefix else []), norm.Replace(" ", mark)])
    return model


def _of_words(library):
    model = library.Tokenizer(library.models.WordLevel({"[UNK]": 0, "the": 1, "end": 2}, unk_token="[UNK]"))
    model.normalizer = library.normalizers.Lowercase()
    model.pre_tokenizer = library.pre_tokenizers.Whitespace()
    return model


def _of_unigrams(library):
    model = library.Tokenizer(library.models.Unigram([("<unk>", 0.0), ("\u2581", -1.0), ("a", -2.0)], 0, False))
    model.pre_tokenizer = library.pre_tokenizers.Metaspace()
    return model


@pytest.mark.parametrize(
    ("make", "spells"),
    [
        (lambda library: _of_byte_pairs(library, []), True),
        (lambda library: _of_byte_pairs(library, SPACES), True),
        (lambda library: _of_sentencepiece(library, prefix=False), True),
        (lambda library: _of_sentencepiece(library, prefix=True), False),
        (_of_words, False),
        (_of_unigrams, False),
    ],
    ids=["gpt-2", "gpt-neox", "gemma", "llama-2", "bert", "t5"],
)
def test_bytes_and_words_are_those_of_the_text_or_the_tokenizer_is_refused(tmp_path, make, spells):
    library = pytest.importorskip("tokenizers")
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(CODE)
    place = tmp_path / "tokenizer.json"
    model = make(library)
    model.save(str(place))
    # one row holds the text, so that no word is cut
    length = len(encode(model, CODE)) - 1
    task = TextFile(data=tmp_path, length=length, vocabulary="file", vocab_size=400, tokenizer=place)
    if not spells:
        with pytest.raises(
            DataError, match=r"tokenizer.json do not spell the train text: .*give a byte-level tokenizer"
        ):
            task.arrays()
        return
    arrays = task.arrays()
    stream = arrays["test.stream"]
    assert int(arrays["sizes"][stream].sum()) == len(CODE.encode())
    assert int(arrays["spaces"][stream].sum()) == CODE.count(" ")
    first = int(arrays["sizes"][stream[0]])
    targets = only(task, "test").targets
    metrics = task.score(torch.zeros(*targets.shape, 400), targets)
    assert int(metrics["bits_per_byte"][1]) == len(CODE.encode()) - first
    assert int(metrics["nats_per_word"][1]) == len(CODE.split())


def test_a_word_of_plain_text_ends_with_any_whitespace(tmp_path):
    text = "one two\nthree\t four\n\n  five\r\nsix seven\n"
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_bytes(text.encode())
    task = TextFile(data=tmp_path, length=len(text) - 1)
    targets = only(task, "test").targets
    total, count = task.score(torch.zeros(*targets.shape, 256), targets)["nats_per_word"]
    assert int(count) == len(text.split())
    assert float(total / count) == pytest.approx((len(text) - 1) * math.log(256) / 7)


def test_byte_pairs_are_trained_on_train_alone_and_the_same_each_time(folder, tmp_path):
    pytest.importorskip("tokenizers")
    task = WikiText(data=folder, vocabulary="bpe", vocab_size=270)
    first = task.read(folder)
    again = task.read(folder)
    assert all((first[name] == again[name]).all() for name in first)
    (folder / "wiki.test.tokens").write_text("zzzz zzzz zzzz zzzz")
    other = task.read(folder)
    assert (other["sizes"] == first["sizes"]).all()


def test_a_given_tokenizer_makes_the_tokens_and_is_known_by_its_content(folder, tmp_path_factory):
    pytest.importorskip("tokenizers")
    made = train_bpe(TEXT, 270)
    places = [tmp_path_factory.mktemp(name) / "tokenizer.json" for name in "ab"]
    for place in places:
        made.save(str(place))
    first, second = (
        WikiText(data=folder, length=16, vocabulary="file", vocab_size=300, tokenizer=place) for place in places
    )
    assert first.fingerprint() == second.fingerprint() != WikiText(data=folder, length=16).fingerprint()
    tokens = first.encode("The gamma ray")
    assert tokens == made.encode("The gamma ray").ids
    assert first.decode(tokens) == "The gamma ray" or len(tokens) < len("The gamma ray")
    stream = first.arrays()["test.stream"]
    assert stream.tolist() == encode(made, TEXT[:401]).tolist()
    assert int(first.arrays()["sizes"][stream].sum()) == 401
    assert "tokenizer" not in WikiText(data=folder).model_dump()


def test_a_prompt_is_cut_as_the_training_text_is_and_an_unfinished_letter_is_left_out(tmp_path):
    library = pytest.importorskip("tokenizers")
    made = train_bpe("one\n\ntwo\n\n" * 50, 270)
    made.decoder = library.decoders.ByteLevel()
    # as in the vocabulary of GPT-2, two line breaks are one token, which no line has
    made.add_tokens(["\n\n"])
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    task = TextFile(data=tmp_path, vocabulary="file", vocab_size=300, tokenizer=tmp_path / "tokenizer.json")
    text = "two\n\none"
    assert task.encode(text) == encode(made, text).tolist() != made.encode(text).ids
    assert task.decode(task.encode(text)) == text
    assert task.encode("") == []
    assert task.decode(task.encode("a<|endoftext|>b")) == "a<|endoftext|>b"
    letters = task.encode("\N{LATIN SMALL LETTER E WITH ACUTE}")
    assert [task.decode(letters[:count]) for count in (1, 2)] == ["", "\N{LATIN SMALL LETTER E WITH ACUTE}"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocabulary": "file"}, "belong together"),
        ({"tokenizer": "here.json"}, "belong together"),
        ({"vocabulary": "file", "tokenizer": "nowhere.json"}, "there is no such file"),
        ({"vocabulary": "file", "tokenizer": "wiki.test.tokens"}, "no tokenizer.json that can be read"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(options, words, folder):
    pytest.importorskip("tokenizers")
    if "tokenizer" in options:
        options = {**options, "tokenizer": folder / options["tokenizer"]}
    with pytest.raises(ValueError, match=words):
        _ = WikiText(data=folder, vocab_size=256, **options).fingerprint()


def test_words_are_counted_as_officially(folder):
    assert WikiText(data=folder, length=64).stand_in == f"{TEXT.count(' ')} words of train; wikitext-2 has 2088628"


def test_the_official_word_counts_of_the_real_text(shared, tmp_path):
    for split in ("valid", "test"):
        (tmp_path / f"{split}.txt").symlink_to(shared(f"wikitext2/{split}.txt"))
    # only validation and test text are among the real data
    (tmp_path / "train.txt").write_text(TEXT)
    arrays = WikiText(data=tmp_path).arrays()
    counts = {split: int(arrays["spaces"][arrays[f"{split}.stream"]].sum()) for split in ("valid", "test")}
    assert counts == {"valid": 217_646, "test": 245_569}


def test_parquet_files_of_the_hub_are_read(folder, tmp_path_factory):
    pytest.importorskip("datasets")
    import pandas as pd

    other = tmp_path_factory.mktemp("hub")
    for split, word in (("train", "train"), ("valid", "validation"), ("test", "test")):
        lines = (folder / f"wiki.{split}.tokens").read_text().splitlines(keepends=True)
        # the format of the hub
        lines = ["" if line == " \n" else line for line in lines]
        assert "" in lines
        pd.DataFrame({"text": lines}).to_parquet(other / f"{word}-00000-of-00001.parquet")
    one, two = WikiText(data=folder, length=64), WikiText(data=other, length=64)
    for split in ("train", "valid", "test"):
        assert torch.equal(only(one, split).inputs, only(two, split).inputs)
    (other / "test-00000-of-00001.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"test-00000-of-00001.parquet: cannot be read as parquet.*restore the file"):
        only(two, "test")


def test_any_text_file_is_cut_in_three(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    for data in (tmp_path, tmp_path / "book.txt"):
        task = TextFile(data=data, length=16)
        lengths = {split: int((only(task, split).targets != IGNORE).sum()) + 1 for split in ("train", "valid", "test")}
        assert sum(lengths.values()) == len(TEXT)
        assert lengths["train"] == round(0.9 * len(TEXT))
        assert task.stand_in == "the text book.txt"


def test_a_table_with_the_hubs_blank_lines_has_the_official_counts(shared, tmp_path):
    pytest.importorskip("datasets")
    import pandas as pd

    for split, word in (("train", "valid"), ("valid", "valid"), ("test", "test")):
        lines = shared(f"wikitext2/{word}.txt").read_text().splitlines(keepends=True)
        rows = ["" if not line.strip() else line for line in lines]
        pd.DataFrame({"text": rows}).to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    # the hub states these counts of rows and bytes for this split
    assert (len(rows), sum(len(row.encode()) for row in rows)) == (4358, 1_270_947 - 4 * 4358)
    arrays = WikiText(data=tmp_path).arrays()
    counts = {split: int(arrays["spaces"][arrays[f"{split}.stream"]].sum()) for split in ("valid", "test")}
    assert counts == {"valid": 217_646, "test": 245_569}


def test_a_table_of_texts_is_a_text_with_a_row_a_line(tmp_path):
    pytest.importorskip("datasets")
    import pandas as pd

    # in CSV, the line break, the quotation mark and the word NA must be kept
    lines = ['a "quoted", line', "two\nlines", "NA", "é"] * 40
    frame = pd.DataFrame({"number": range(len(lines)), "line": lines})
    frame.to_csv(tmp_path / "lines.csv", index=False)
    frame.to_parquet(tmp_path / "lines.parquet")
    frame.to_json(tmp_path / "lines.jsonl", orient="records", lines=True)
    expected = "".join(line + "\n" for line in lines).encode()
    for ending in ("csv", "parquet", "jsonl"):
        task = TextFile(data=tmp_path / f"lines.{ending}", column="line", length=32)
        arrays = task.arrays()
        assert b"".join(bytes(arrays[f"{split}.stream"]) for split in ("train", "valid", "test")) == expected, ending
    with pytest.raises(DataError, match=r"lines.csv: cannot be read as csv with text as columns"):
        TextFile(data=tmp_path / "lines.csv").fingerprint()
    with pytest.raises(DataError, match=r"lines.parquet: row 1 of number holds no text; name another column"):
        TextFile(data=tmp_path / "lines.parquet", column="number").fingerprint()


def test_a_folder_with_files_of_its_own_for_every_split_keeps_them(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(f"{split} {TEXT}")
    task = TextFile(data=tmp_path, length=16)
    for split in ("train", "valid", "test"):
        assert bytes(task.arrays()[f"{split}.stream"]).decode() == f"{split} {TEXT}"
    assert task.stand_in == "the text train.txt, valid.txt, test.txt"


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("book.txt.gz", gzip.compress),
        ("book.bz2", bz2.compress),
        ("book.txt.xz", lzma.compress),
        ("book.txt", lambda text: text.decode().encode("utf-16")),
        ("book.txt", lambda text: codecs.BOM_UTF32_BE + text.decode().encode("utf-32-be")),
    ],
)
def test_a_text_in_another_form_is_the_same_text(tmp_path, name, packed):
    text = "one caf\u00e9 two\n".encode() * 60
    (tmp_path / name).write_bytes(packed(text))
    arrays = TextFile(data=tmp_path / name, length=16).arrays()
    assert b"".join(bytes(arrays[f"{split}.stream"]) for split in ("train", "valid", "test")) == text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("book.zip", b"PK\x03\x04" + bytes(99), "a zip archive or a document of an office program"),
        ("book.txt.zst", b"\x28\xb5\x2f\xfd" + bytes(99), "packed by zstd"),
        ("book.pdf", b"%PDF-1.7" + bytes(99), "a PDF"),
        ("book", b"PAR1" + bytes(99), "needs the ending .parquet"),
        ("book.tar", bytes(257) + b"ustar" + bytes(99), "a tar archive; unpack it"),
        ("book.csv.gz", gzip.compress(b"text\nword\n" * 40), "a table or an archive that is packed; unpack it"),
        ("book.tar.gz", gzip.compress(bytes(600)), "a table or an archive that is packed; unpack it"),
        ("book.txt.gz", gzip.compress(b"word " * 999)[:-9], "damaged"),
        ("book.txt.gz", b"\x1f\x8a" + gzip.compress(b"word " * 999)[2:], "not packed, as its name says"),
        ("book.txt", codecs.BOM_UTF16_LE + b"a\0b", "damaged UTF-16"),
        ("book.txt.gz", gzip.compress(bz2.compress(b"word " * 999)), "packed twice; unpack it"),
        ("book.txt", "word ".encode("utf-16-le") * 99, "its byte 1 is 0: .*UTF-16 without a byte order mark"),
    ],
    # gzip writes the time, and every process must collect the same names
    ids=lambda value: "content" if isinstance(value, bytes) else None,
)
def test_what_is_no_text_is_refused_by_its_name(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: .*{words}"):
        TextFile(data=tmp_path / name, length=16).arrays()


def test_byte_pairs_of_a_text_in_latin_1_are_refused(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "book.txt").write_bytes("caf\u00e9 au lait\n".encode("latin-1") * 99)
    with pytest.raises(DataError, match=r"the train text is not UTF-8 \(89 characters are not\); convert it"):
        TextFile(data=tmp_path, length=16, vocabulary="bpe", vocab_size=260).arrays()


def test_a_tokenizer_at_which_its_library_panics_is_refused(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT * 99)
    place = tmp_path / "tokenizer.json"
    _of_byte_pairs(pytest.importorskip("tokenizers"), []).save(str(place))
    facts = json.loads(place.read_text())
    # half of the merge is shorter than the prefix that it should have
    facts["model"] |= {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "continuing_subword_prefix": "##"}
    place.write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"tokenizer.json: no tokenizer.json that can be read"):
        TextFile(data=tmp_path, vocabulary="file", vocab_size=400, tokenizer=place).given_tokenizer()


def test_hidden_documents_are_no_documents(tmp_path):
    for number in range(16):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    (tmp_path / "._3.txt").write_text("a resource fork")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "1-checkpoint.txt").write_text("document 1")
    assert TextFile(data=tmp_path, length=16).stand_in == f"16 documents of {tmp_path.name}"


def test_documents_in_linked_folders_are_documents(tmp_path):
    for kind in ("neg", "pos"):
        (tmp_path / "elsewhere" / kind).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "elsewhere" / kind / f"{number}.txt").write_text(f"{kind} {number}")
    (tmp_path / "set" / "neg").mkdir(parents=True)
    (tmp_path / "set" / "neg" / "0.txt").write_text("neg 0")
    (tmp_path / "set" / "more").symlink_to(tmp_path / "elsewhere")
    assert TextFile(data=tmp_path / "set", length=16).stand_in == "21 documents of set"
    (tmp_path / "elsewhere" / "pos" / "up").symlink_to(tmp_path / "elsewhere")
    # two folders that link to each other have no end either
    for name, other in ("one", "two"), ("two", "one"):
        (tmp_path / "pair" / name).mkdir(parents=True)
        (tmp_path / "pair" / name / "0.txt").write_text("text")
        (tmp_path / "pair" / name / "other").symlink_to(tmp_path / "pair" / other)
    with pytest.raises(DataError, match=r"one.other.other: links to a folder above it"):
        TextFile(data=tmp_path / "pair" / "one", length=16).fingerprint()
    with pytest.raises(DataError, match=r"pos.up: links to a folder above it"):
        TextFile(data=tmp_path / "set", length=16).fingerprint()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    """Else the arrays of one content would be kept in the cache under the hash of another."""
    book = tmp_path / "book.txt"
    book.write_text("one " * 999)
    read = TextFile.read

    def interrupted(self, folder):
        found = read(self, folder)
        with book.open("a") as file:
            file.write("two")
        return found

    monkeypatch.setattr(TextFile, "read", interrupted)
    with pytest.raises(DataError, match="a file changed while it was read"):
        TextFile(data=book, length=16).arrays()
    book.write_text("one " * 999)
    monkeypatch.undo()
    assert len(TextFile(data=book, length=16).arrays()["train.stream"]) == round(0.9 * 4 * 999)


def test_a_folder_of_documents_is_split_by_whole_documents_in_an_order_of_their_names(tmp_path):
    # in the folder of the film reviews, too, other files lie above the reviews
    (tmp_path / "imdbEr.txt").write_text("no document")
    for split in ("train", "test"):
        for kind in ("neg", "pos"):
            (tmp_path / split / kind).mkdir(parents=True)
            for number in range(10):
                (tmp_path / split / kind / f"{number}_7.txt").write_text(f"{split} {kind} {number}")
    task = TextFile(data=tmp_path, length=16)
    texts = {
        split: bytes(task.arrays()[f"{split}.stream"]).decode().splitlines() for split in ("train", "valid", "test")
    }
    assert [len(texts[split]) for split in ("train", "valid", "test")] == [36, 2, 2]
    assert len({text for part in texts.values() for text in part}) == 40
    assert {text.split()[0] for text in texts["train"][:10]} == {"train", "test"}
    assert task.stand_in == f"40 documents of {tmp_path.name}"


@pytest.mark.parametrize(("count", "sizes"), [(15, None), (16, [14, 1, 1]), (17, [15, 1, 1])])
def test_a_folder_of_few_documents_is_refused(tmp_path, count, sizes):
    for number in range(count):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    task = TextFile(data=tmp_path, length=8)
    if sizes is None:
        with pytest.raises(DataError, match=r"holds 15 documents, and 90, 5 and 5 % of .*; give 16 documents or more"):
            task.fingerprint()
        return
    streams = (bytes(task.arrays()[f"{split}.stream"]) for split in ("train", "valid", "test"))
    assert [stream.count(b"document") for stream in streams] == sizes


def test_faults_say_what_to_do(folder, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="data prepare wikitext --set corpus=wikitext-103`"):
        WikiText(corpus="wikitext-103").fingerprint()
    with pytest.raises(DataError, match="give --data FILE"):
        TextFile().fingerprint()
    with pytest.raises(ValueError, match=r"vocab_size=300 with vocabulary=bytes"):
        _ = WikiText(vocab_size=300).spec
    (folder / "wiki.valid.tokens").unlink()
    with pytest.raises(DataError, match="no valid text in"):
        WikiText(data=folder).fingerprint()
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"every vocabulary but bytes needs tokenizers .*install -e '\.\[data\]'"):
        TextFile(data=folder / "wiki.train.tokens", vocabulary="bpe", vocab_size=300).arrays()


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_text_shorter_than_a_row_is_refused_while_a_run_is_planned(folder, split):
    text = folder / f"wiki.{split}.tokens"
    text.write_text("x" * 64)
    words = (
        rf"the {split} text of .* has 64 tokens, and a row of 64 takes 65; .* more text, or set a length of at most 63"
    )
    with pytest.raises(DataError, match=words):
        WikiText(data=folder, length=64).fingerprint()
    WikiText(data=folder, length=63).fingerprint()
    text.write_text("")
    with pytest.raises(DataError, match=r"has 0 tokens, and a row of 63 takes 64; give more text\.$"):
        WikiText(data=folder, length=63).fingerprint()


def test_a_text_too_small_for_the_vocabulary_is_an_error(folder):
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match=r"byte pairs only, not vocab_size=5000; lower it"):
        only(WikiText(data=folder, vocabulary="bpe", vocab_size=5000), "train")
    with pytest.raises(ValueError, match=r"vocab_size=255 with vocabulary=bpe; .* give at least 256"):
        WikiText(data=folder, length=64, vocabulary="bpe", vocab_size=255).fingerprint()


def test_a_run_reports_perplexity_of_validation_and_test(folder):
    run = one_run(
        {"name": "wikitext", "data": str(folder), "length": 32},
        {"name": "linear-attention", "d_model": 16, "num_layers": 1, "num_heads": 1},
        {"steps": 30, "batch_size": 8, "lr": 0.01},
    )
    rows = Trainer(run, torch.device("cpu"))().rows
    final = {row["metric"]: row["value"] for row in rows if row["split"] == "test"}
    assert final["perplexity"] == pytest.approx(math.exp(final["loss"]))
    assert final["word_perplexity"] == pytest.approx(math.exp(final["nats_per_word"]))
    assert final["bits_per_byte"] == pytest.approx(final["loss"] / math.log(2))
    assert final["perplexity"] < 60, "nothing was learned of a text that repeats itself"
    assert {row["metric"] for row in rows if row["split"] == "valid"} >= {"perplexity", "bits_per_byte"}
