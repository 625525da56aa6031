"""`stquant`: the table of commands."""

from __future__ import annotations

import typer

from stquant.cli import calibrate, convert, demo, doctor, formats, inspect, plan, report, train

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Optimizers whose states take few bits.")
app.command("train")(train.train)
app.command("demo")(demo.demo)
app.command("calibrate")(calibrate.calibrate)
app.command("plan")(plan.plan)
app.command("inspect")(inspect.inspect)
app.command("convert")(convert.convert)
app.command("report")(report.report)
app.command("formats")(formats.formats)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run the command line."""
    app()
