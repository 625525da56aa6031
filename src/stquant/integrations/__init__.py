"""What trainers and trackers of other libraries get from ours, one file for each; nothing here is needed to train.

`scalars` has the numbers, `writers` says when they are written; a file named after a library imports it.
"""
