"""DNA: rows are cut out of genomes as in the two papers, and faults name the file and what to do."""

import functools
import gzip
import math
import sys

import numpy as np
import pytest
import torch

from subquad.suite.contracts import IGNORE
from subquad.suite.training.trainer import Trainer
from subquad.tasks.data import obtain
from subquad.tasks.data.faults import DataError
from subquad.tasks.data.stored import leakage
from subquad.tasks.dna import BASES, UNKNOWN, covered, index
from subquad.tasks.hg38 import HG38
from subquad.tasks.species import Species, chromosome
from tests.runs import one_run

pyfaidx = pytest.importorskip("pyfaidx")


def dna(seed, length):
    return "".join(np.random.default_rng(seed).choice(list("ACGT"), length))


def write_fasta(path, records, width=60, end="\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for header, text in records.items():
        parts += [f">{header}{end}", *(text[i : i + width] + end for i in range(0, len(text), width))]
    path.write_bytes("".join(parts).encode())


CHR1 = dna(1, 1000)
CHR2 = dna(2, 400)[:100] + "N" * 20 + dna(3, 180).lower() + dna(4, 100)
LINES = (
    ("chr1", 100, 164, "train"),
    ("chr1", 300, 364, "train"),
    ("chr2", 0, 64, "train"),
    ("chr1", 500, 564, "valid"),
    ("chr1", 600, 664, "valid"),
    ("chr2", 90, 154, "test"),
)


@pytest.fixture
def folder(tmp_path):
    write_fasta(tmp_path / "genome.fa", {"chr1 the first": CHR1, "chr2": CHR2})
    (tmp_path / "some.bed").write_text("".join("\t".join(map(str, line)) + "\n" for line in LINES))
    return tmp_path


def text(row):
    return "".join(BASES[i] for i in row.tolist())


def rows(task, split):
    if split == "train":
        count = task.counts()["train"]
        return {text(row) for row in task.block(0, 0, count).inputs}
    (segment,) = task.segments(split, 0)
    return [text(row) for row in segment.inputs]


def test_hyenadna_takes_the_beginning_of_an_interval_once(folder):
    task = HG38(data=folder, rule="hyenadna", length=16)
    assert rows(task, "train") == {CHR1[100:116], CHR1[300:316], CHR2[:16]}
    assert rows(task, "valid") == [CHR1[500:516], CHR1[600:616]]
    assert task.counts() == {"train": 3, "valid": 2, "test": 1}


def test_hyenadna_extends_a_short_interval_to_both_sides(folder):
    task = HG38(data=folder, rule="hyenadna", length=101)
    # the row has 37 more bases, 18 to the left and 19 to the right; chr2 begins at 0, so there is N before it
    assert rows(task, "train") == {CHR1[82:183], CHR1[282:383], "N" * 18 + CHR2[:83].upper()}


def test_mamba_takes_all_of_an_interval_in_pieces_that_do_not_overlap(folder):
    task = HG38(data=folder, rule="mamba", length=16)
    expected = {CHR1[s : s + 16] for first in (100, 300) for s in range(first, first + 64, 16)}
    assert rows(task, "train") == expected | {CHR2[s : s + 16] for s in range(0, 64, 16)}
    assert task.counts() == {"train": 12, "valid": 8, "test": 4}


def test_mamba_takes_two_rows_of_an_interval_shorter_than_a_row(folder):
    task = HG38(data=folder, rule="mamba", length=128)
    around = {CHR1[s : s + 128] for s in (100, 36, 300, 236)}
    assert rows(task, "train") == around | {CHR2[:128].upper(), "N" * 64 + CHR2[:64]}


def test_targets_are_the_next_bases_but_never_n(folder):
    (segment,) = HG38(data=folder, length=64).segments("test", 0)
    codes = np.array([BASES.index(letter) for letter in CHR2[90:154].upper()])
    assert segment.inputs[0].tolist() == codes.tolist()
    expected = np.append(np.where(codes[1:] == UNKNOWN, IGNORE, codes[1:]), IGNORE)
    assert segment.targets[0].tolist() == expected.tolist()
    assert (expected == IGNORE).sum() == 21
    assert segment.inputs.dtype == torch.uint8
    assert segment.targets.dtype == torch.int8


def test_soft_masked_bases_are_bases_or_no_targets(folder):
    (upper,) = HG38(data=folder, length=64).segments("test", 0)
    (ignored,) = HG38(data=folder, length=64, soft_masked="ignore").segments("test", 0)
    assert torch.equal(upper.inputs, ignored.inputs)
    lower = torch.tensor([letter.islower() for letter in CHR2[91:154]])
    assert lower.sum() == 34
    assert (ignored.targets[0, :-1][lower] == IGNORE).all()
    assert torch.equal(ignored.targets[0, :-1][~lower], upper.targets[0, :-1][~lower])


def test_score_gives_bits_a_base(folder):
    task = HG38(data=folder, length=64)
    (segment,) = task.segments("valid", 0)
    # logits of a model that gives four bases the same probability, and N none
    logits = torch.tensor([0.0, 0, 0, 0, -100]).expand(*segment.targets.shape, 5)
    total, count = task.score(logits, segment.targets)["bits_per_base"]
    assert float(total / count) == pytest.approx(2, abs=1e-6)
    assert count == 2 * 63
    assert task.exponentials == {"perplexity": "loss"}


def test_an_epoch_of_the_stream_is_every_row_once_whatever_the_size_of_the_blocks(folder):
    task = HG38(data=folder, length=16)
    whole = task.block(0, 0, 36).inputs
    for epoch in range(3):
        assert {text(row) for row in whole[12 * epoch : 12 * epoch + 12]} == rows(task, "train")
    assert not torch.equal(whole[:12], whole[12:24])
    parts = torch.cat([task.block(0, index, 5).inputs for index in range(7)])
    assert torch.equal(parts, whole[:35])
    assert not torch.equal(task.block(1, 0, 36).inputs, whole)


def test_policy_paper_validates_on_test(folder):
    assert rows(HG38(data=folder, split_policy="paper"), "valid") == rows(HG38(data=folder), "test")


def test_valid_and_test_may_use_few_of_their_intervals(folder):
    task = HG38(data=folder, length=16, eval_intervals=1, rule="hyenadna")
    assert task.counts() == {"train": 3, "valid": 1, "test": 1}


def test_any_fasta_and_bed_may_be_named_and_be_packed(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "packed.fasta.gz").write_bytes(gzip.compress((folder / "genome.fa").read_bytes()))
    task = HG38(fasta=other / "packed.fasta.gz", bed=folder / "some.bed", length=16)
    assert rows(task, "train") == rows(HG38(data=folder, length=16), "train")
    assert task.stand_in == "3 intervals of packed.fasta.gz; the papers train on 34021 of hg38"
    with pytest.raises(DataError, match="fasta and bed belong together"):
        HG38(fasta=folder / "genome.fa").fingerprint()
    with pytest.raises(DataError, match=r"nothing.fa: there is no such file"):
        HG38(fasta=folder / "nothing.fa", bed=folder / "some.bed").fingerprint()


@pytest.mark.parametrize(("width", "end"), [(7, "\n"), (60, "\r\n"), (10_000, "\n")])
def test_random_access_agrees_with_pyfaidx_for_any_line(folder, width, end):
    write_fasta(folder / "genome.fa", {"chr1": CHR1, "chr2": CHR2}, width, end)
    oracle = pyfaidx.Fasta(str(folder / "genome.fa"), indexname=str(folder / "other.fai"), sequence_always_upper=True)
    task = HG38(data=folder, length=37)
    starts = np.random.default_rng(0).integers(0, 360, 200)
    records = np.arange(200) % 2
    cut = task.stretches(records, starts, 37) & 7
    for record, start, row in zip(records, starts, cut, strict=True):
        assert text(row) == str(oracle[int(record)][int(start) : int(start) + 37])


@pytest.mark.parametrize("before", ["", "\n", "; a comment\n"])
def test_records_have_their_names_behind_blank_lines(folder, before):
    genome = folder / "genome.fa"
    genome.write_text(before + genome.read_text().replace(">chr2", "\n>chr2"))
    found = index(genome, genome)
    assert [found[key].tolist() for key in ("name", "about")] == [["chr1", "chr2"], ["chr1 the first", "chr2"]]


def test_a_genome_is_never_loaded_whole(folder):
    import tracemalloc

    line = dna(5, 10_000) + "\n"
    with (folder / "genome.fa").open("w") as file:
        file.write(">chr1\n" + line * 3000 + ">chr2\n" + CHR2 + "\n")
    task = HG38(data=folder, length=1024, rule="hyenadna")
    task.fingerprint()
    tracemalloc.start()
    task.block(0, 0, 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000 < (folder / "genome.fa").stat().st_size / 10


def test_prepared_genomes_are_found_without_a_folder(folder, tmp_path):
    (tmp_path / "download").mkdir()
    packed = tmp_path / "download" / "hg38.ml.fa.gz"
    packed.write_bytes(gzip.compress((folder / "genome.fa").read_bytes()))
    obtain("hg38", [packed, folder / "some.bed"])
    assert rows(HG38(length=16), "train") == rows(HG38(data=folder, length=16), "train")


def test_an_index_is_read_once(folder, monkeypatch):
    HG38(data=folder).fingerprint()
    # no index can be made without the library
    monkeypatch.setitem(sys.modules, "pyfaidx", None)
    assert rows(HG38(data=folder, length=16, rule="hyenadna"), "valid") == [CHR1[500:516], CHR1[600:616]]


def test_shared_bases_of_splits_are_counted(folder):
    with (folder / "some.bed").open("a") as file:
        file.write("chr1\t150\t170\tvalid\nchr1\t160\t180\tvalid\n")
    # rows of 32 bases leave the added intervals, and are those of bases 138 to 191
    for length, shared in ((2, 14), (32, 26)):
        found = leakage(HG38(data=folder, length=length))
        assert found == {"bases of train & valid": shared, "bases of train & test": 0, "bases of valid & test": 0}
    assert covered(np.array([0, 0, 1]), np.array([0, 2, 0]), np.array([10, 4, 3])) == 13


def spoil_bed(line):
    return lambda folder: (folder / "some.bed").write_text("chr1\t1\t65\ttrain\n" + line + "\n")


def spoil_fasta(old, new):
    return lambda folder: (folder / "genome.fa").write_bytes((folder / "genome.fa").read_bytes().replace(old, new, 1))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            spoil_bed("chr1\t980\t1044\ttest"),
            r"some.bed: line 2: chr1:980-1044 ends past chr1 of genome.fa \(1,000 bases",
        ),
        (spoil_bed("1\t0\t64\ttest"), r"line 2: genome.fa has no record 1 \(it has chr1, chr2"),
        (spoil_bed("chr1\t64\t64\ttest"), r"line 2: the interval 64 to 64 is empty"),
        (spoil_bed("chr1\t0\t64"), r"line 2 is .*needs chromosome, start, end and a split \(train, valid, test\)"),
        (spoil_bed("chr1\t0\t64\tfold3"), r"line 2 is .*needs chromosome"),
        (lambda folder: (folder / "some.bed").write_text("# none\n"), r"some.bed: holds no intervals"),
        (spoil_fasta(b"A", b"*"), r"genome.fa: record chr1 holds '\*' \(byte \d+\), which is no base"),
        (spoil_fasta(b"T", b"U"), r"genome.fa: record chr1 holds 'U'"),
        (spoil_fasta(b"\n", b"\nACGT\n"), r"genome.fa: no FASTA file that can be indexed .*[Ll]ine"),
        (
            spoil_fasta(b">chr2", CHR1[:50].encode() + b"\n>chr2"),
            r"genome.fa: no FASTA file that can be indexed .*[Ll]ine",
        ),
        (
            spoil_fasta(b"\n>chr2", CHR1[:50].encode() + b"\n>chr2"),
            r"genome.fa: the lines of record chr1 differ in length",
        ),
        (spoil_fasta(b">chr2", b">chr1 the first"), r"genome.fa: no FASTA file that can be indexed .*Duplicate"),
        (spoil_fasta(b">chr2", b">chr1"), r"line 1: genome.fa has two records chr1; give each a name"),
        (spoil_fasta(b">", b""), r"genome.fa: no FASTA file that can be indexed"),
        (
            lambda folder: (folder / "genome.fa").write_text(f">chr1\n{CHR1}\n\n\n"),
            r"genome.fa: no FASTA file that can be indexed \(several blank lines",
        ),
        (lambda folder: (folder / "b.fa").symlink_to("gone"), r"holds 2 FASTA and 1 BED files"),
        (lambda folder: (folder / "genome.fa").write_bytes(b""), r"genome.fa: no FASTA file that can be indexed"),
        (lambda folder: write_fasta(folder / "b.fa", {"x": "ACGT"}), r"holds 2 FASTA and 1 BED files"),
        (lambda folder: (folder / "some.bed").unlink(), r"does not hold one FASTA and one BED file"),
    ],
)
def test_faults_are_met_before_a_run_and_say_where(folder, spoil, message):
    spoil(folder)
    with pytest.raises(DataError, match=message) as fault:
        HG38(data=folder).fingerprint()
    assert "\n" not in str(fault.value)


def test_a_damaged_packed_genome_is_named(folder):
    (folder / "genome.fa.gz").write_bytes(gzip.compress((folder / "genome.fa").read_bytes())[:-30])
    (folder / "genome.fa").unlink()
    with pytest.raises(DataError, match=r"genome.fa.gz: damaged"):
        HG38(data=folder).fingerprint()


def test_a_packed_genome_may_have_its_ending_in_capitals(folder):
    plain = rows(HG38(data=folder, length=16), "test")
    (folder / "GENOME.FA.GZ").write_bytes(gzip.compress((folder / "genome.fa").read_bytes()))
    (folder / "genome.fa").unlink()
    assert rows(HG38(data=folder, length=16), "test") == plain


def test_ambiguous_letters_are_read_as_n(folder):
    write_fasta(folder / "genome.fa", {"chr1": "RYKMSWBDHV" + CHR1[10:], "chr2": CHR2})
    (folder / "some.bed").write_text("chr1\t0\t16\ttest\nchr1\t0\t16\tvalid\nchr1\t0\t16\ttrain\n")
    assert rows(HG38(data=folder, length=16), "test") == ["N" * 10 + CHR1[10:16]]


def test_a_split_without_intervals_is_an_error(folder):
    (folder / "some.bed").write_text("chr1\t0\t16\ttrain\n")
    with pytest.raises(DataError, match="no valid intervals"):
        HG38(data=folder, length=16).fingerprint()


def test_without_pyfaidx_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyfaidx", None)
    with pytest.raises(DataError, match=r"install -e '\.\[dna\]'"):
        HG38(data=folder).fingerprint()
    with pytest.raises(DataError, match="data prepare hg38"):
        HG38().fingerprint()


def test_a_run_reports_bits_and_perplexity_a_base(folder):
    write_fasta(folder / "genome.fa", {"chr1": "AACGT" * 200, "chr2": "AACGT" * 80})
    run = one_run(
        {"name": "hg38", "data": str(folder), "length": 32},
        {"name": "linear-attention", "d_model": 16, "num_layers": 1, "num_heads": 1},
        {"epochs": 10, "epoch_steps": 15, "batch_size": 8, "lr": 0.03},
    )
    final = {row["metric"]: row["value"] for row in Trainer(run, torch.device("cpu"))().rows if row["split"] == "test"}
    assert final["bits_per_base"] == pytest.approx(final["loss"] / math.log(2))
    assert final["perplexity"] == pytest.approx(math.exp(final["loss"]))
    assert final["bits_per_base"] < 1.9, "nothing was learned of a genome that repeats itself"


# species


def genome(seed, names, length=300):
    return {name: dna(100 * seed + i, length) for i, name in enumerate(names)}


KINDS = ("human", "lemur", "mouse", "pig", "hippo")
NAMES = [f"chr{i}" for i in (*range(1, 17), "X", "M")]


@pytest.fixture
def zoo(tmp_path):
    for seed, kind in enumerate(KINDS):
        write_fasta(tmp_path / kind / "all.fa", genome(seed, NAMES))
    return tmp_path


def origin(row, names, kinds=KINDS, length=300):
    """The species and the record that a row was cut from."""
    sought = text(row)
    found = [
        (kind, name)
        for seed, kind in enumerate(kinds)
        for name, content in whole(seed, tuple(names), length)
        if sought in content
    ]
    assert len(found) == 1
    return found[0]


@functools.cache
def whole(seed, names, length):
    return tuple(genome(seed, names, length).items())


def test_rows_come_from_their_species_and_from_the_chromosomes_of_their_split(zoo):
    task = Species(data=zoo, length=40, num_eval=100)
    splits = {"train": task.block(0, 0, 300)} | {name: next(task.segments(name, 0)) for name in ("valid", "test")}
    expected = {
        "valid": {"chr1", "chr3", "chr12", "chr13"},
        "test": {"chr5", "chr7", "chr9", "chr10", "chr11"},
        "train": {"chr2", "chr4", "chr6", "chr8", "chr14", "chr15", "chr16", "chrX"},
    }
    for split, segment in splits.items():
        found = [origin(row, NAMES) for row in segment.inputs]
        assert [KINDS.index(kind) for kind, _ in found] == segment.targets.tolist()
        assert {name for _, name in found} == expected[split]
        assert segment.positions is None
        counts = np.bincount(segment.targets.numpy(), minlength=5)
        assert counts.min() > 0.1 * len(found), "species are drawn uniformly"
    assert leakage(task) == {f"bases of {pair}": 0 for pair in ("train & valid", "train & test", "valid & test")}


def test_the_stream_does_not_depend_on_the_size_of_the_blocks(zoo):
    task = Species(data=zoo, length=40)
    whole = task.block(0, 0, 600)
    parts = [task.block(0, index, 200) for index in range(3)]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert torch.equal(task.block(0, 80, 7).inputs, whole.inputs[560:567])
    assert not torch.equal(task.block(1, 0, 600).targets, whole.targets)


def test_places_reach_both_ends_of_a_chromosome(zoo):
    segment = Species(data=zoo, length=299).block(0, 0, 100)
    content = genome(0, NAMES)
    ends = {
        text(row) == text_of[:299] for row in segment.inputs for text_of in content.values() if text(row) in text_of
    }
    assert ends == {True, False}


def test_few_records_may_be_cut_by_position(tmp_path):
    kinds = ("human", "chimp")
    for seed, kind in enumerate(kinds):
        (tmp_path / "ENm001").mkdir(exist_ok=True)
        write_fasta(tmp_path / "ENm001" / f"{kind}.ENm001.fa", genome(seed, ["region"], 1000))
    with pytest.raises(DataError, match=r"human has no train chromosome of 50 bases or more.*split_by: position"):
        Species(data=tmp_path, species=kinds, length=50).fingerprint()
    task = Species(data=tmp_path, species=kinds, length=50, split_by="position", num_eval=50)
    task.fingerprint()
    for split, (low, high) in {"train": (0, 800), "valid": (800, 900), "test": (900, 1000)}.items():
        segment = task.block(0, 0, 50) if split == "train" else next(task.segments(split, 0))
        for row, target in zip(segment.inputs, segment.targets, strict=True):
            start = genome(int(target), ["region"], 1000)["region"].find(text(row))
            assert low <= start <= high - 50
    assert task.stand_in == "1000 bases of human, not a whole genome"
    with pytest.raises(DataError, match=r"human has no valid position of 101 bases"):
        Species(data=tmp_path, species=kinds, length=101, split_by="position").fingerprint()


@pytest.mark.parametrize(
    ("name", "about", "stem", "expected"),
    [
        ("chr2A", "chr2A", "x", "2A"),
        ("X", "X", "x", "X"),
        ("CM1.1", "CM1.1 Lemur catta isolate mLemCat1 chromosome 12, whole genome shotgun sequence", "x", "12"),
        ("OW9.1", "OW9.1 Mus musculus genome assembly, chromosome: 3", "x", "3"),
        ("JA1.1", "JA1.1 Lemur catta isolate mLemCat1 chromosome 12 unlocalized scaffold_3", "x", ""),
        ("CM9", "CM9 anything", "chr7", "7"),
        ("chr1_random", "chr1_random", "all", ""),
        ("chrM", "chrM", "all", ""),
        ("chrUn_1", "chrUn_1", "all", ""),
    ],
)
def test_chromosomes_are_told_by_name_header_or_file(name, about, stem, expected):
    assert chromosome(name, about, stem) == expected


def test_one_file_a_chromosome_is_hyenadnas_layout(tmp_path):
    for seed, kind in enumerate(KINDS[:2]):
        for i in (1, 2, 5):
            write_fasta(tmp_path / kind / f"chr{i}.fna", {f"NC_{i}.1 something": genome(seed, NAMES)[f"chr{i}"]})
    task = Species(data=tmp_path, species=KINDS[:2], length=40, num_eval=20)
    assert {origin(row, NAMES)[1] for row in next(task.segments("test", 0)).inputs} == {"chr5"}


def test_a_species_without_a_file_is_an_error(zoo):
    (zoo / "pig" / "all.fa").unlink()
    with pytest.raises(DataError, match=r"no FASTA file of pig in .*pig or as pig\.\*\.fa.*leave pig out"):
        Species(data=zoo).fingerprint()
    for options, named in (
        ({}, "group=five-species"),
        ({"group": "great-apes"}, "group=great-apes"),
        ({"species": ("human", "gorilla")}, r"species=\[human,gorilla\]"),
    ):
        # without its options, the command prepares five other genomes
        with pytest.raises(DataError, match=rf"species-human is not in the cache; call .*species --set '{named}'`"):
            Species(**options).fingerprint()
    with pytest.raises(DataError, match=r"no source is known for 'dog'"):
        Species(species=("human", "dog")).fingerprint()
    with pytest.raises(ValueError, match="two or more different"):
        _ = Species(species=("human",)).spec


def test_great_apes_are_five_classes_with_a_source_each():
    task = Species(group="great-apes")
    assert task.spec.num_classes == 5
    assert task.sources == tuple(f"species-{k}" for k in ("human", "chimpanzee", "gorilla", "orangutan", "bonobo"))


def test_prepared_species_are_found_without_a_folder(zoo):
    for kind in KINDS:
        packed = zoo / f"{kind}.fna.gz"
        packed.write_bytes(gzip.compress((zoo / kind / "all.fa").read_bytes()))
        obtain(f"species-{kind}", [packed])
    assert torch.equal(Species(length=40).block(0, 0, 50).inputs, Species(data=zoo, length=40).block(0, 0, 50).inputs)


def test_the_real_encode_regions_of_five_species_load(shared):
    kinds = ("human", "mouse", "dog", "cow", "rabbit")
    task = Species(data=shared("dna/encode_may2005/ENm002"), species=kinds, length=4096, split_by="position")
    segment = task.block(0, 0, 64)
    assert segment.inputs.shape == (64, 4096)
    shares = torch.stack([(segment.inputs == i).float().mean() for i in range(5)])
    assert (shares[:4] > 0.15).all()
    assert set(segment.targets.tolist()) == {0, 1, 2, 3, 4}
    assert task.stand_in == "1000000 bases of human, not a whole genome"


@pytest.mark.parametrize(("rule", "steps"), [("mamba", [6, 6, 6]), ("hyenadna", [2, 4, 6])])
def test_epochs_of_a_warm_up_in_length_are_those_of_the_sources(folder, rule, steps):
    """With a fixed number of tokens per batch, an epoch of Mamba has the same number of steps at every length, while an
    epoch of HyenaDNA has more steps at greater lengths."""
    run = one_run(
        {"name": "hg38", "data": str(folder), "length": 32, "rule": rule},
        {"name": "attention", "d_model": 4, "num_heads": 1, "num_layers": 1},
        {
            "epochs": 2,
            "batch_size": 2 if rule == "mamba" else 1,
            "length_warmup": [{"length": 8, "epochs": 2}, {"length": 16, "epochs": 2}],
        },
    )
    trainer = Trainer(run, torch.device("cpu"))
    lengths, step = [], trainer._train_step
    trainer._train_step = lambda batch: (lengths.append(batch.inputs.shape[1]), step(batch))
    trainer()
    # 3 intervals of 64 bases are 3 batches of 64 bases per epoch, or 3 rows at each length with 4, 2 and 1 per batch
    assert [lengths.count(length) for length in (8, 16, 32)] == steps
