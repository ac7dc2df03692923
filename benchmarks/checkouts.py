"""Compare the speed of this checkout with that of another one, for example of an earlier commit, in the same run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from benchmarks import beam, cpu_targets, decode, gpu_decoding, gpu_encoding, gpu_training, machine, training_speed
from benchmarks.engine import Engine
from benchmarks.engines.beam_workload import Workload as BeamWorkload
from benchmarks.engines.decode_workload import Workload as DecodeWorkload
from benchmarks.engines.encode_workload import Workload as EncodeWorkload
from benchmarks.engines.gpu_encode_workload import Workload as GPUEncodeWorkload
from benchmarks.engines.next_token_workload import Workload as TrainWorkload
from benchmarks.results import Report
from benchmarks.runner import CEILINGS, BenchmarkOptions, Comparison, ComparisonPlan, compare

MAX_SLOWDOWN = 1.03


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload, the engine of qkv that runs it, and peers that are timed in the same rounds."""

    description: str
    engine: Engine
    plan: ComparisonPlan
    peers: Sequence[Engine] = ()


def checkouts(options: BenchmarkOptions) -> Report:
    """Time both checkouts in turn. `--baseline` is the folder of the other checkout, and `--only` selects workloads."""
    if options.baseline is None or not (options.baseline / "src" / "qkv").is_dir():
        raise SystemExit(f"checkouts requires --baseline DIR with a checkout of qkv, got {options.baseline}")
    load, rows, notes, versions = machine.load_average(), list[list[str]](), list[str](), dict[str, str]()
    on_gpu = options.device == "cuda"
    for case in _gpu_cases(options) if on_gpu else _cpu_cases(options):
        if options.only not in case.description:
            continue
        options.log(case.description)
        baseline = replace(case.engine, name="baseline", root=options.baseline.resolve())
        engines = [baseline, replace(case.engine, name="qkv"), *case.peers]
        ceilings = gpu_training.CEILINGS if on_gpu else CEILINGS
        result = compare(engines, case.plan, ceilings=ceilings, repeats=options.repeats, log=options.log)
        versions |= result.versions
        notes += [f"{case.description}: {note}" for note in result.absence_notes]
        if {"baseline", "qkv"} <= result.best.keys():
            rows.append(_row(case, result))
    return Report(
        name="checkouts",
        description=(
            f"This checkout and the baseline, in alternation; best of {options.repeats} rounds. The spread is the "
            "median time of the baseline's rounds divided by its best time. A workload is slower if it takes more than "
            f"{MAX_SLOWDOWN - 1:.0%} longer than the baseline."
        ),
        columns=["workload", "baseline ms", "ms", "time ratio", "CPU time ratio", "median ratio", "spread", "result",
                 "peers"],
        rows=rows,
        notes=notes,
        versions=versions,
        load=load,
    )  # fmt: skip


def _row(case: Case, result: Comparison) -> list[str]:
    before, after = result.best["baseline"], result.best["qkv"]
    rounds = result.rounds["baseline"], result.rounds["qkv"]
    ratio = after.wall / before.wall
    peers = [
        f"{result.best[peer.name].wall / after.wall:.2f} × {peer.name}"
        for peer in case.peers
        if peer.name in result.best
    ]
    return [
        case.description,
        *(f"{1000 * best.wall / case.plan.time_steps:.4g}" for best in (before, after)),
        f"{ratio:.3f}",
        f"{after.cpu / before.cpu:.3f}",
        f"{median(rounds[1]) / median(rounds[0]):.3f}",
        f"{median(rounds[0]) / before.wall:.3f}",
        "slower" if ratio > MAX_SLOWDOWN else "same" if ratio > 1 / MAX_SLOWDOWN else "faster",
        ", ".join(peers) or "–",
    ]


def _cpu_cases(options: BenchmarkOptions) -> Iterator[Case]:
    threads = options.threads or machine.available_cores()

    def plan(workload: object, *, tolerance: float = 0.0, steps: int = 1) -> ComparisonPlan:
        return ComparisonPlan(
            workload=asdict(workload),  # pyright: ignore[reportArgumentType] - every workload is a dataclass
            check_steps=1,
            time_steps=steps,
            tolerance=tolerance,
            threads=threads,
        )

    for batch in (1, 16):
        workload = DecodeWorkload(**decode.GPT2, batch=batch, threads=threads)
        yield Case(description=f"decode 124M, {batch} text(s)", engine=decode.OURS, plan=plan(workload))
        yield Case(
            description=f"decode 124M, {batch} text(s), int8", engine=decode.INT8_ENGINES[0], plan=plan(workload)
        )
    small = DecodeWorkload(**decode.SMALL, batch=1, threads=threads)
    yield Case(description="decode 12 layers of width 64", engine=decode.OURS, plan=plan(small))
    beam_workload = BeamWorkload(**beam.SHAPE, batch=1, threads=threads)
    yield Case(description="translate, beam 5, 64 tokens", engine=beam.engines(options)[0], plan=plan(beam_workload))
    ours = {engine.name: engine for engine in training_speed.engines(options.peers)}
    large, small_model = (TrainWorkload(**s, threads=threads) for s in (training_speed.GPT2, training_speed.SMALL))
    yield Case(description="train 124M, 2 × 128", engine=ours["qkv"], plan=plan(large, tolerance=1e-4))
    small_plan = plan(small_model, tolerance=1e-4, steps=20)
    yield Case(description="train nanoGPT's small model", engine=ours["qkv"], plan=small_plan)
    yield Case(description="train nanoGPT's small model, compiled", engine=ours["qkv, compiled"], plan=small_plan)
    for description, (n, shortest, longest, batch, n_calls) in {
        "encode, 16 texts of 64": (16, 64, 64, 16, 4),
        "encode, 1 text of 32": (1, 32, 32, 1, 40),
        "encode, 64 texts of 1 to 96": (64, 1, 96, 32, 1),
    }.items():
        texts = EncodeWorkload(
            n_texts=n, shortest=shortest, longest=longest, batch=batch, n_calls=n_calls, threads=threads
        )
        yield Case(description=description, engine=cpu_targets.ENCODERS[0], plan=plan(texts, tolerance=1e-4))


def _gpu_cases(options: BenchmarkOptions) -> Iterator[Case]:
    threads, peers = machine.available_cores(), None if options.peers is None else str(options.peers)
    gptfast = Engine(name="gpt-fast", module="benchmarks.engines.gpu_decode_gptfast", options={"peers": peers})
    llama, large, gpt2 = gpu_decoding.LLAMA, gpu_decoding.LARGE, gpu_decoding.GPT2
    for description, workload, others in (
        ("decode Llama-like 124M, 1 text", llama, [gptfast]),
        ("decode Llama-like 124M, 64 texts", replace(llama, batch=64), [gptfast]),
        ("decode Llama-like 1.3B, 1 text", large, []),
        ("decode GPT-2 124M, 1 text", gpt2, []),
    ):
        plan = ComparisonPlan(workload=asdict(workload), check_steps=1, time_steps=1, tolerance=0.0, threads=4)
        yield Case(description=description, engine=gpu_decoding.OURS, plan=plan, peers=others if options.peers else [])
    for description, shape in gpu_encoding.WORKLOADS.items():
        encode = GPUEncodeWorkload(**gpu_encoding.SHAPE, **shape, device="cuda")
        plan = ComparisonPlan(
            workload=asdict(encode),
            check_steps=1,
            time_steps=gpu_encoding.STEPS,
            tolerance=gpu_encoding.TOLERANCE,
            threads=threads,
        )
        yield Case(description=f"encode BERT-base, {description}", engine=gpu_encoding.engines([64])[0], plan=plan)
    train = TrainWorkload(**gpu_training.SHAPE, threads=threads, device="cuda")
    plan = ComparisonPlan(
        workload=asdict(train),
        check_steps=3,
        time_steps=gpu_training.STEPS,
        tolerance=gpu_training.TOLERANCE,
        threads=threads,
    )
    ours = Engine(name="qkv", module="benchmarks.engines.train_qkv", options={"compile": True}, is_ours=True)
    nanogpt = Engine(
        name="nanoGPT",
        module="benchmarks.engines.train_nanogpt",
        options={"peers": peers, "fused": True, "compiled": True},
    )
    yield Case(
        description="train GPT-2 124M, 32 × 1024", engine=ours, plan=plan, peers=[nanogpt] if options.peers else []
    )
