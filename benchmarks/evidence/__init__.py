"""Side by side: every contender on every workload, registered before it is run.

`plan` says what is run and what would count as a result, `workloads` and `contenders` are the two
registries, `cells` runs one after the other and can be stopped at any time, `summary` turns runs
into gaps with their uncertainty. Run: python -m benchmarks.evidence
"""
