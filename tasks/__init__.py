"""Table of contents: every registered task, the place of its definition, and a description in one line."""

from subquad.suite.registry import Registry, entries

_PLACES = {
    "induction-heads": ("induction_heads:InductionHeads", "the token after a trigger, H3 Table 2"),
    "associative-recall": ("associative_recall:AssociativeRecall", "the value of one queried key, H3 Tables 2 and 12"),
    "mqar": ("mqar:MQAR", "multi-query associative recall, Zoology Figure 2 and Based Figure 2"),
    "selective-copying": ("selective_copying:SelectiveCopying", "copy the data tokens among noise, Mamba Table 1"),
    "induction-heads-extrapolation": (
        "induction_heads_extrapolation:InductionHeadsExtrapolation",
        "induction heads trained at 256 and tested up to 2^20, Mamba Table 2",
    ),
    "word-problem": (
        "word_problem:WordProblem",
        "the running product in a group: parity, Zm, S3, A5, S5 (Merrill et al. 2024)",
    ),
    "modular-arithmetic": (
        "modular_arithmetic:ModularArithmetic",
        "the value of an expression modulo m, with brackets or without (Grazzi et al. 2024)",
    ),
    "in-context-recall": (
        "in_context_recall:InContextRecall",
        "values of keys that were shown before, with noise or none, MAD",
    ),
    "fuzzy-in-context-recall": (
        "in_context_recall:FuzzyInContextRecall",
        "the same, keys and values of several tokens, MAD",
    ),
    "compression": ("compression:Compression", "the whole row out of its last hidden state, MAD"),
    "memorization": ("memorization:Memorization", "facts that hold in every row, MAD"),
    "copying": ("copying:Copying", "copy strings longer than in training (Jelassi et al. 2024)"),
    "needle": ("needle:Needle", "a number named once in a generated text (RULER, Hsieh et al. 2024)"),
    "brain-activity": (
        "brain_activity:BrainActivity",
        "the next level of simulated brain networks, or a mental state, H3 F.8",
    ),
    "seizures": ("seizures:Seizures", "seizures in simulated EEG, H3 Table 18"),
    "speech-commands": (
        "speech_commands:SpeechCommands",
        "ten or 35 spoken words from the waveform or MFCC, DSS Table 2",
    ),
    "youtubemix": ("audio:YouTubeMix", "the next sample of solo piano, mu-law at 8 bits, Mamba Figure 7"),
    "recordings": ("audio:Recordings", "the next sample of any folder of recordings"),
    "sc09": ("sc09:SC09", "the next sample of spoken digits, and generated clips, Mamba Table 4"),
    "hg38": ("hg38:HG38", "the next base of the human genome, Mamba Figure 5"),
    "species": ("species:Species", "the species that a stretch of DNA comes from, Mamba Figure 6"),
    "lra-listops": ("lra.listops:LRAListOps", "the value of a nested expression, LRA ListOps"),
    "lra-text": ("lra.text:LRAText", "sentiment of a film review, byte by byte, LRA Text"),
    "lra-retrieval": ("lra.retrieval:LRARetrieval", "does one paper cite the other, LRA Retrieval"),
    "lra-image": ("lra.image:LRAImage", "grey CIFAR-10, pixel by pixel, LRA Image"),
    "lra-pathfinder": ("lra.pathfinder:LRAPathfinder", "are two dots joined, 32 x 32, LRA Pathfinder"),
    "lra-pathx": ("lra.pathfinder:LRAPathX", "are two dots joined, 128 x 128, LRA Path-X"),
    "image-folder": ("image_folder:ImageFolder", "the class of the pictures of any folder, pixel by pixel"),
    "wikitext": ("language:WikiText", "the next byte or token of Wikipedia articles"),
    "text-file": ("language:TextFile", "the next byte or token of any text or table of texts"),
    "text-recall": ("text_recall:TextRecall", "the same, with words that the context has shown apart"),
}

TASKS = Registry("task", entries("subquad.tasks", _PLACES))
