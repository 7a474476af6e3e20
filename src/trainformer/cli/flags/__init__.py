"""Options of the command line that are the fields of a task, an adapter and the trainer.

`source` reads classes without importing them, `catalogue` knows what there is, `hints` says what can be typed for a
type, `owners` collects the options of the classes that were chosen, `routing` brings each option to the one that owns
it, and `command` is what `train` and `check` have in common.
"""
