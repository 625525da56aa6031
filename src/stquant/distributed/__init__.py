"""Parameters that are spread over ranks.

`tensors` finds the part of a parameter that a rank holds and shows local results as torch's
distributed tensors; `agreement` combines statistics over the ranks that share a parameter, so that
all of them decide alike.
"""
