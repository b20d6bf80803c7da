"""Table of contents: every registered task, where it is and what it is."""

from suite.registry import Entry, Registry

TASKS = Registry(
    "task",
    {
        "induction-heads": Entry("tasks.induction_heads:InductionHeads", "the token after a trigger, H3 Table 2"),
        "associative-recall": Entry(
            "tasks.associative_recall:AssociativeRecall", "the value of one queried key, H3 Tables 2 and 12"
        ),
        "mqar": Entry("tasks.mqar:MQAR", "multi-query associative recall, Zoology Figure 2 and Based Figure 2"),
        "selective-copying": Entry(
            "tasks.selective_copying:SelectiveCopying", "copy the data tokens among noise, Mamba Table 1"
        ),
        "induction-heads-extrapolation": Entry(
            "tasks.induction_heads_extrapolation:InductionHeadsExtrapolation",
            "induction heads trained at 256 and tested up to 2^20, Mamba Table 2",
        ),
        "speech-commands": Entry(
            "tasks.speech_commands:SpeechCommands", "ten spoken words from the raw 16 kHz waveform, DSS Table 2"
        ),
    },
)
