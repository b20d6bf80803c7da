"""Table of contents: every registered task, the place of its definition, and a description in one line."""

from subquad.suite.registry import Entry, Registry

TASKS = Registry(
    "task",
    {
        "induction-heads": Entry(
            "subquad.tasks.induction_heads:InductionHeads", "the token after a trigger, H3 Table 2"
        ),
        "associative-recall": Entry(
            "subquad.tasks.associative_recall:AssociativeRecall", "the value of one queried key, H3 Tables 2 and 12"
        ),
        "mqar": Entry("subquad.tasks.mqar:MQAR", "multi-query associative recall, Zoology Figure 2 and Based Figure 2"),
        "selective-copying": Entry(
            "subquad.tasks.selective_copying:SelectiveCopying", "copy the data tokens among noise, Mamba Table 1"
        ),
        "induction-heads-extrapolation": Entry(
            "subquad.tasks.induction_heads_extrapolation:InductionHeadsExtrapolation",
            "induction heads trained at 256 and tested up to 2^20, Mamba Table 2",
        ),
        "word-problem": Entry(
            "subquad.tasks.word_problem:WordProblem",
            "the running product in a group: parity, Zm, S3, A5, S5 (Merrill et al. 2024)",
        ),
        "modular-arithmetic": Entry(
            "subquad.tasks.modular_arithmetic:ModularArithmetic",
            "the value of an expression modulo m, with brackets or without (Grazzi et al. 2024)",
        ),
        "in-context-recall": Entry(
            "subquad.tasks.in_context_recall:InContextRecall",
            "values of keys that were shown before, with noise or none, MAD",
        ),
        "fuzzy-in-context-recall": Entry(
            "subquad.tasks.in_context_recall:FuzzyInContextRecall", "the same, keys and values of several tokens, MAD"
        ),
        "compression": Entry(
            "subquad.tasks.compression:Compression", "the whole row out of its last hidden state, MAD"
        ),
        "memorization": Entry("subquad.tasks.memorization:Memorization", "facts that hold in every row, MAD"),
        "copying": Entry("subquad.tasks.copying:Copying", "copy strings longer than in training (Jelassi et al. 2024)"),
        "needle": Entry(
            "subquad.tasks.needle:Needle", "a number named once in a generated text (RULER, Hsieh et al. 2024)"
        ),
        "brain-activity": Entry(
            "subquad.tasks.brain_activity:BrainActivity",
            "the next level of simulated brain networks, or a mental state, H3 F.8",
        ),
        "seizures": Entry("subquad.tasks.seizures:Seizures", "seizures in simulated EEG, H3 Table 18"),
        "speech-commands": Entry(
            "subquad.tasks.speech_commands:SpeechCommands",
            "ten or 35 spoken words from the waveform or MFCC, DSS Table 2",
        ),
        "youtubemix": Entry(
            "subquad.tasks.audio:YouTubeMix", "the next sample of solo piano, mu-law at 8 bits, Mamba Figure 7"
        ),
        "recordings": Entry("subquad.tasks.audio:Recordings", "the next sample of any folder of recordings"),
        "sc09": Entry(
            "subquad.tasks.sc09:SC09", "the next sample of spoken digits, and generated clips, Mamba Table 4"
        ),
        "hg38": Entry("subquad.tasks.hg38:HG38", "the next base of the human genome, Mamba Figure 5"),
        "species": Entry(
            "subquad.tasks.species:Species", "the species that a stretch of DNA comes from, Mamba Figure 6"
        ),
        "lra-listops": Entry("subquad.tasks.lra.listops:LRAListOps", "the value of a nested expression, LRA ListOps"),
        "lra-text": Entry("subquad.tasks.lra.text:LRAText", "sentiment of a film review, byte by byte, LRA Text"),
        "lra-retrieval": Entry(
            "subquad.tasks.lra.retrieval:LRARetrieval", "does one paper cite the other, LRA Retrieval"
        ),
        "lra-image": Entry("subquad.tasks.lra.image:LRAImage", "grey CIFAR-10, pixel by pixel, LRA Image"),
        "lra-pathfinder": Entry(
            "subquad.tasks.lra.pathfinder:LRAPathfinder", "are two dots joined, 32 x 32, LRA Pathfinder"
        ),
        "lra-pathx": Entry("subquad.tasks.lra.pathfinder:LRAPathX", "are two dots joined, 128 x 128, LRA Path-X"),
        "image-folder": Entry(
            "subquad.tasks.image_folder:ImageFolder", "the class of the pictures of any folder, pixel by pixel"
        ),
        "wikitext": Entry("subquad.tasks.language:WikiText", "the next byte or token of Wikipedia articles"),
        "text-file": Entry("subquad.tasks.language:TextFile", "the next byte or token of any text or table of texts"),
        "text-recall": Entry(
            "subquad.tasks.text_recall:TextRecall", "the same, with words that the context has shown apart"
        ),
    },
)
