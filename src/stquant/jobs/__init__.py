"""The ready example job: real models on real data that every machine has.

Uses the library as any user would. `data` and `workloads` say what is trained, `contenders` with
which optimizers, `training` is the loop, `demo` the side-by-side comparison.
"""
