"""What an optimizer costs and what a run did: data first, text and pictures last.

Knows states and files, not optimizers, so that an optimizer can hand out its own ledger.
"""
