"""One packed state, and one residual: the buffers that an optimizer keeps alive.

`packed` holds optimizer states, `master` the bits of a weight that bf16 cannot hold. Both own
plain local tensors; neither knows what a state means or who chose its format.
"""
