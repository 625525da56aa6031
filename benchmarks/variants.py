"""bf16 weights with residuals, SGD and Lion, each against its fp32 self on both workloads.

Writes results/variants.json. Run: python benchmarks/variants.py
"""

from pathlib import Path

from stquant.jobs.demo import MODELS, seed_spread
from stquant.jobs.parallel import Job, run_all
from stquant.report import record

SEED = 21
"""Not the demo's; one seed, so a gap has the noise of about one seed spread."""

TARGET = Path(__file__).parent / "results" / "variants.json"


def half(bits: int) -> dict[str, object]:
    """Options of a run with bf16 weights."""
    return {"optimizer": "2+1", "dtype": "bfloat16", "master_bits": bits}


ROWS: dict[str, tuple[dict[str, object], str | None]] = {
    "torch AdamW, fp32": ({"optimizer": "torch"}, None),
    "AdamW 2+1, bf16, 8-bit residual": (half(8), "torch AdamW, fp32"),
    "AdamW 2+1, bf16, 4-bit residual": (half(4), "torch AdamW, fp32"),
    "AdamW 2+1, bf16, stochastic": (half(0), "torch AdamW, fp32"),
    "SGD, fp32": ({"optimizer": "sgd:fp32"}, None),
    "SGD, dynamic2": ({"optimizer": "sgd:dynamic2"}, "SGD, fp32"),
    "SGD, mulaw4": ({"optimizer": "sgd:mulaw4"}, "SGD, fp32"),
    "Lion, fp32": ({"optimizer": "lion:fp32"}, None),
    "Lion, dynamic3-plain": ({"optimizer": "lion:dynamic3-plain"}, "Lion, fp32"),
    "Lion, mulaw4": ({"optimizer": "lion:mulaw4"}, "Lion, fp32"),
    "Lion, mulaw8": ({"optimizer": "lion:mulaw8"}, "Lion, fp32"),
}


def main() -> None:
    keys = [(model, name) for model in MODELS for name in ROWS]
    jobs = [Job(model=model, seed=SEED, **ROWS[name][0]) for model, name in keys]  # type: ignore[arg-type]
    results = run_all(jobs, lambda job, done, steps, _: done == steps and print(job, flush=True))
    loss = {key: result["loss"] for key, result in zip(keys, results, strict=True)}
    rows = []
    for (model, name), result in zip(keys, results, strict=True):
        yardstick = ROWS[name][1]
        gap = None if yardstick is None else loss[model, name] - loss[model, yardstick]
        kept = {key: result[key] for key in ("loss", "state_bytes", "true_bits", "parameters")}
        rows.append({"model": model, "run": name, "yardstick": yardstick, "gap": gap, **kept})
    spreads = {model: seed_spread(model) for model in MODELS}
    record.write(TARGET, {"seed": SEED, "seed_spread": spreads, "rows": rows})


if __name__ == "__main__":
    main()
