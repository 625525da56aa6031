"""What trainers of other libraries get from ours, one file for each; nothing here is needed to train."""
