"""Fills the generated tables of README.md and docs/ from recorded measurements and the catalogue.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a number of the prose between
`<!-- value: RECORD PATH FORMAT -->` and `<!-- end -->`, for example `demo rows optimizer=nadam gap +.4f`.
Run: make tables; with --check nothing is written and the exit status says whether anything would change.
"""

import functools
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence import tables as evidence
from benchmarks.records import load, table

from stquant.codecs.format import RECIPE_FAMILIES
from stquant.policy.policies import Recipe
from stquant.report.formats import describe

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: ([^>]+) -->)[^<]*(<!-- end -->)")


RECIPES = {family.value for family in RECIPE_FAMILIES}


def formats(signed: bool) -> str:
    """Every format of our own of a kind of state."""
    rows = [
        [
            f"`{row['name']}`",
            str(row["number"]),
            str(row["bits"]),
            f"{row['true_bits']:g}",
            str(row["levels"]),
            row["rounding"],
            *([row["prepay"]] if signed else []),
            f"{row['rms_error']:.2g}",
            *([] if signed else ["" if row["value_bias"] is None else f"{row['value_bias']:.1%}"]),
        ]
        for row in describe()
        if (row["state"] == "signed") == signed and row["family"] not in RECIPES
    ]
    extra = ["prepay", "RMS error"] if signed else ["RMS error", "value bias"]
    return table(["format", "number", "bits", "with scale", "levels", "rounding", *extra], rows)


def recipes() -> str:
    """Every format of a published recipe."""
    rows = [
        [
            f"`{row['name']}`",
            row["state"],
            row["family"],
            *(str(row[key]) for key in ("number", "bits", "block")),
            f"{row['true_bits']:g}",
            str(row["levels"]),
            row["rounding"],
            f"{row['rms_error']:.2g}",
        ]
        for row in describe()
        if row["family"] in RECIPES
    ]
    head = ["format", "state", "family", "number", "bits", "block", "with scale", "levels", "rounding", "RMS error"]
    return table(head, rows)


def recipe_policies() -> str:
    """What the recipes' policies combine."""
    rows = []
    for name in Recipe.NAMES:
        signed, squares = Recipe(name).formats_of({"exp_avg": True, "exp_avg_sq": False}).values()
        bits = signed.bits_per_element + squares.bits_per_element
        rows.append([f'`"{name}"`', f"`{signed.name}`", f"`{squares.name}`", str(signed.block), f"{bits / 8:g}"])
    return table(["policy", "`exp_avg`", "`exp_avg_sq`", "block", "bytes per parameter"], rows)


def bytes_per_parameter() -> str:
    """Live bytes of GPT-2 124M."""
    rows = [
        [
            row["optimizer"],
            *(f"{row[kind]:.2f}" for kind in ("weights", "residuals", "states", "total")),
            f"{row['true_bits']:.2f}",
        ]
        for row in load("bytes_per_parameter")["rows"]
    ]
    return table(["bytes per parameter", "weights", "residual", "states", "sum", "bits per state element"], rows)


def step_memory() -> str:
    """What steps of GPT-2 124M hold at most."""
    rows = []
    for row in load("step_memory")["rows"]:
        kept, count = row["live_bytes"], row["parameters"]
        parts = [kept["weights"], kept["residuals"], kept["states"], sum(kept.values()), row["peak_gradient_bytes"]]
        parts += [row["peak_total_bytes"], row["backward_allocates_at_most_bytes"]]
        rows.append([row["run"], *(f"{part / count:.2f}" for part in parts)])
    kinds = ["weights", "residual", "states", "sum", "peak of gradients", "peak of all four", "backward allocates"]
    return table(["bytes per parameter", *kinds], rows)


def checkpoint_size() -> str:
    """Files of GPT-2 124M against those of fp32 AdamW."""
    files = load("step_memory")["checkpoints"]
    full = files[0]["bytes"]
    rows = [
        [
            f"{file['run']}, {file['form']} form",
            f"{file['bytes']:,}",
            f"{file['bytes'] / full:.1%}",
            f"{file['optimizer_bytes'] / files[0]['optimizer_bytes']:.1%}",
            "yes" if file["loads_bit_for_bit"] else "no",
        ]
        for file in files
    ]
    head = ["weights and optimizer", "bytes", "of fp32", "optimizer alone", "loads bit for bit"]
    return table(head, rows)


def compressed_files() -> str:
    """Files of torch.distributed.checkpoint against the live states that they hold."""
    rows = [
        [
            row["optimizer"],
            f"{row['live_bytes']:,}",
            *(f"{row[kind] / row['live_bytes']:.2f}" for kind in ("plain_bytes", "zstd_bytes")),
        ]
        for row in load("compressed_files")["rows"]
    ]
    return table(["states", "live bytes", "file / live", "file with zstd / live"], rows)


def demo() -> str:
    """The side-by-side comparison."""
    rows = [
        [
            f"{row['model']}, {row['optimizer']}",
            f"{row['loss']:.4f}",
            f"{row['gap']:+.4f}",
            f"{row['spread']:.4f}",
            f"{row['true_bits']:.2f}",
            f"{row['state_bytes']:,}",
        ]
        for row in load("demo")["rows"]
    ]
    return table(["run", "held-out loss", "gap to torch AdamW", "seed spread", "true bits", "state bytes"], rows)


def calibration_selections(question: str) -> str:
    """The factors that were selected, and their certificate."""
    answer = load("calibration")["questions"][question]
    rows = []
    for model, found in answer["selections"].items():
        powers = ", ".join(f"`{n}` {p:+.2f}" for n, p in zip(found["names"], found["exponents"], strict=True))
        certificate = found["certificate"]
        numbers = [certificate["r2"], certificate["best_r2"], found["cross_validated"], found["by_chance"]]
        numbers += [certificate["gamma"], certificate["bound"]]
        other = answer["transfers"].get(model)
        rows.append([f"{model}: {powers}", *map(_two, numbers), "" if other is None else _two(other)])
    head = ["probes of, and powers of the factors", "R²", "best R²", "held-out R²", "by chance", "gamma", "bound"]
    return table([*head, "R² of the others' choice"], rows)


def calibration_rules() -> str:
    """Simple rules as they are: R² and rank correlation, for each model."""
    questions = load("calibration")["questions"]
    models = [name for name in questions["tensors"]["selections"] if name != "all"]
    rows = [
        [
            f"{rule}: among {question}",
            *(f"{_two(s['r2'])} / {_two(s['rank_correlation'])}" for s in pick(scores, models)),
        ]
        for question, answer in questions.items()
        for rule, scores in answer["rules"].items()
    ]
    return table(["rule", *models], rows)


def calibration_weights() -> str:
    """What a power of a factor as weight of the step's squared error brings."""
    questions = load("calibration")["questions"]
    models = [name for name in questions["tensors"]["selections"] if name != "all"]
    rows = [
        [
            f"`{factor}`{without}, among {question}",
            *(f"{s['power']:+.2f}: {' / '.join(_two(s[k]) for k in R2_OF_WEIGHTS)}" for s in pick(scores, models)),
        ]
        for question, answer in questions.items()
        for key, without in (("weights", ""), ("weights_without_rare_rows", " without rare rows"))
        for factor, scores in answer[key].items()
    ]
    return table(["weight", *models], rows)


R2_OF_WEIGHTS = ("r2", "r2_weighted", "r2_of_others")


def pick(scores: dict[str, Any], models: Sequence[str]) -> list[dict[str, Any]]:
    """Return the scores of these models, in order."""
    return [scores[model] for model in models]


def calibration_formats() -> str:
    """What each format did."""
    rows = [
        [
            f"{row['model']}, `{row['format']}`",
            f"{row['damage']:.1e}",
            f"{row['change']:+.1e}",
            _two(row["per_step_error"]),
        ]
        for row in load("calibration")["formats"]
    ]
    return table(["probes of", "damage", "change of the mean loss", "damage per error of the step"], rows)


def calibration_size() -> str:
    """How much was probed."""
    found = load("calibration")
    settings = found["settings"]
    rows = [
        ["probes", str(len(found["probes"]))],
        ["of them without effect", str(found["without_effect"])],
        *([f"{model}: tensors, forks", _forks(found["probes"], model)] for model in settings["models"]),
        ["steps from fork to measurement", str(settings["length"])],
        ["held-out examples, about", str(settings["examples"])],
        ["seed", str(settings["seed"])],
    ]
    return table(["calibration", ""], rows)


def _forks(probes: Sequence[dict[str, Any]], model: str) -> str:
    part = [probe for probe in probes if probe["model"] == model]
    forks = sorted({probe["fork"] for probe in part})
    return f"{len({probe['tensor'] for probe in part})}, steps {' and '.join(map(str, forks))}"


def _two(number: float) -> str:
    return f"{number:.2f}"


def variants() -> str:
    """16-bit weights, SGD and Lion beside their yardsticks."""
    rows = [
        [
            f"{row['model']}, {row['run']}",
            row["yardstick"] or "",
            f"{row['loss']:.4f}",
            "" if row["gap"] is None else f"{row['gap']:+.4f}",
            f"{row['spread'] / 2:.4f}",
            str(row["seeds"]),
            f"{row['true_bits']:.2f}",
        ]
        for row in load("variants")["rows"]
    ]
    head = ["run", "yardstick", "held-out loss", "gap", "half a seed spread", "seeds", "true bits with residual"]
    return table(head, rows)


def triton_kernels() -> str:
    """What the machine code of the triton kernels costs."""
    rows = [
        [
            f"{row['kernel']}, {row['architecture']}",
            *(str(row[key]) for key in ("registers", "spills")),
            *(f"{row[key][0]} ({row[key][1]})" for key in ("loads", "stores")),
            str(row["instructions"]),
        ]
        for row in load("triton_compile")["rows"]
    ]
    return table(["AdamW kernel", "registers", "spills", "loads (128-bit)", "stores (128-bit)", "instructions"], rows)


def triton_compiled() -> str:
    """How many triton kernels were compiled, and how many of them had something wrong."""
    found = load("triton_compile")
    rows = [
        [
            architecture,
            *(f"{pairs[key]:,}" for key in ("compiled", "complaints")),
            *(f"{sample[key]:,}" for key in ("compiled", "of", "complaints")),
            str(max(part["most_registers"] for part in (pairs, sample))),
        ]
        for architecture, pairs, sample in ((name, pairs, found["all"][name]) for name, pairs in found["pairs"].items())
    ]
    head = ["architecture", "covering array", "complaints", "full product", "out of", "complaints", "most registers"]
    return table(head, rows)


def cpu_step() -> str:
    """Time of a step on the CPU, one table for each machine; what could not be measured stands with a dash."""
    return "\n".join(_cpu_step(machine) for machine in load("cpu_step")["machines"])


def _cpu_step(machine: dict[str, Any]) -> str:
    parts = [part for part in machine["tables"] if part["contenders"] != "sizes"]
    columns = {(part["model"], part["threads"]): {} for part in parts}
    rows: dict[tuple[str, str], dict[Any, str]] = {}
    for part in parts:
        column = (part["model"], part["threads"])
        kind = "" if part["contenders"] == "ours" else "beside other packages, "
        for row in part["rows"]:
            own, base = rows.setdefault((kind, row["name"]), {}), row["name"] == "torch fused"
            own[column] = f"{row['ns_per_element']:.2f} ns" if base else f"{row['ratio']:.2f}"
    head = ["ratio to torch fused", *(f"{model}, {threads} thread{'s'[: threads > 1]}" for model, threads in columns)]
    body = [[kind + name, *(own.get(column, "-") for column in columns)] for (kind, name), own in rows.items()]
    conditions = machine["conditions"]
    sets = ", ".join(conditions.get("instruction_sets", []))
    caption = f"**{conditions['processor']}**, {sets + ', ' if sets else ''}torch {conditions['torch']}:"
    return f"{caption}\n\n{table(head, body)}"


def cpu_sizes() -> str:
    """Time of a step on one parameter by its size, for the machines where that was measured."""
    tables = []
    for machine in load("cpu_step")["machines"]:
        parts = [part for part in machine["tables"] if part["contenders"] == "sizes"]
        if not parts:
            continue
        rows = [
            [part["model"], f"{part['rows'][0]['ns_per_element']:.2f} ns"]
            + [f"{row['ns_per_element']:.2f} ns, {row['ratio']:.2f}" for row in part["rows"][1:]]
            for part in parts
        ]
        ratios = [[row["ratio"] for row in part["rows"][1:]] for part in parts]
        rows.append(["median ratio", "", *(f"{statistics.median(column):.2f}" for column in zip(*ratios, strict=True))])
        caption = f"**{machine['conditions']['processor']}**, {machine['conditions']['instruction_sets'][0]}, 1 thread:"
        head = ["one parameter", *(row["name"] for row in parts[0]["rows"])]
        tables.append(f"{caption}\n\n{table(head, rows)}")
    return "\n".join(tables)


def adaptive() -> str:
    """What decisions cost."""
    rows = [
        [
            f"{row['model']}, every {row['every']} steps",
            f"{row['decision_ms']:.0f}",
            f"{row['median_step_ms']:.0f}",
            f"{row['share_at_every']:.2%}",
            f"{row['share_of_run']:.2%} of {row['steps']} steps",
            f"{row['share_between']:.2%}",
        ]
        for row in load("adaptive")["decisions"]
    ]
    head = ["training", "decision, ms", "training step, ms", "share later on", "share of a run", "steps between"]
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "formats-signed": lambda: formats(signed=True),
    "formats-non-negative": lambda: formats(signed=False),
    "formats-recipes": recipes,
    "recipe-policies": recipe_policies,
    "bytes-per-parameter": bytes_per_parameter,
    "step-memory": step_memory,
    "checkpoint-size": checkpoint_size,
    "compressed-files": compressed_files,
    "demo": demo,
    "adaptive": adaptive,
    "cpu-step": cpu_step,
    "cpu-sizes": cpu_sizes,
    "calibration-size": calibration_size,
    "calibration-all": lambda: calibration_selections("states and formats"),
    "calibration-tensors": lambda: calibration_selections("tensors"),
    "calibration-rules": calibration_rules,
    "calibration-weights": calibration_weights,
    "calibration-formats": calibration_formats,
    "variants": variants,
    **{f"evidence-{name}": functools.partial(evidence.gaps, "quality", name) for name in ("gpt2", "vit", "clip")},
    **{
        f"evidence-{name}": functools.partial(evidence.gaps, name)
        for name in ("choice", "start", "stress", "long", "sizes", "largest", "finetune")
    },
    "evidence-beaten": evidence.beaten,
    "evidence-tuning": evidence.tuning,
    "evidence-cost": evidence.cost,
    "evidence-plan": evidence.plan,
    "triton-compiled": triton_compiled,
    "triton-kernels": triton_kernels,
}


def value(query: str) -> str:
    """Return one number of a record as text.

    Args:
        query: Name of the record, keys that lead to the number, and its format, separated by
            blanks, with underscores for blanks within; "key=value,key=value" picks the one such
            entry of a list.
    """
    name, *path, form = query.split()
    found: Any = load(name)
    for part in path:
        if "=" in part:
            wanted = [pair.split("=") for pair in re.split(r",(?=\w+=)", part)]
            (found,) = [e for e in found if all(str(e[key]).replace(" ", "_") == text for key, text in wanted)]
        else:
            found = found[part]
    return f"{found:{form}}".replace("%", " %")


def fill(text: str) -> str:
    """Return a document with its tables and its numbers made anew."""
    text = BLOCK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)
    return VALUE.sub(lambda match: match[1] + value(match[2]) + match[3], text)


def main() -> None:
    stale = []
    for path in [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        if (new := fill(text)) != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(new)
    print(f"changed: {', '.join(stale) or 'nothing'}")
    sys.exit(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    main()
