"""The work on states: encode, decode, recode, measure, and whole optimizer steps.

`ops` is the contract of every operation, `reference` the readable truth in plain torch, `backend`
the table of who serves what. Kernels never allocate state and never see a parameter group; they
know nothing but `codecs`.
"""
