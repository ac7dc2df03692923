"""`qkv generate`: a text goes on."""

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.choices import DType
from qkv.cli.device_options import Device, Dtype, Int8, Place
from qkv.cli.model_argument import Model
from qkv.cli.profile_report import Profiled, Trace, check_trace
from qkv.errors import InputError, WeightsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from qkv.config import BeamConfig, SamplingConfig
    from qkv.cost import Estimate
    from qkv.tasks import Continuation, LanguageModel

DEFAULT_TEMPERATURE = 0.8
"""A little sharper than the model itself, which reads better."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How to go on, and how to show it; `check` says what cannot be before a model is loaded, which may take long."""

    max_new: int
    stop: list[str]
    chance: dict[str, Any]
    """Settings of sampling that were given."""
    beam: int | None
    n_best: int
    length_penalty: float
    stream: bool
    steps: bool
    logprobs: bool
    profile: bool
    trace: Path | None
    as_json: bool

    def check(self) -> None:
        from qkv.generation import StopStrings

        check_trace(self.trace)
        ways = {"--stream": self.stream, "--steps": self.steps, "--logprobs": self.logprobs}
        asked = [name for name, is_asked in ways.items() if is_asked]
        if self.is_profiled and (self.stream or self.steps or self.beam is not None):
            raise InputError("--profile times whole texts that are drawn: leave out --stream, --steps and --beam")
        if len(asked) > 1:
            raise InputError(f"{asked[0]} and {asked[1]} are two ways to print: choose one")
        if self.as_json and self.stream:
            raise InputError("--stream prints text as it comes, --json whole objects: choose one")
        self._check_beam([name for name in asked if name != "--logprobs"])
        _ = self.sampling, self.search
        StopStrings(self.stop)

    def _check_beam(self, ways: list[str]) -> None:
        if self.beam is None and self.n_best > 1:
            raise InputError(f"--n-best {self.n_best} belongs to --beam: without it there is one text a prompt")
        if self.beam is None:
            return
        if self.beam < 1:
            raise InputError(f"--beam {self.beam}: there must be at least 1 running guess")
        if self.n_best > self.beam:
            raise InputError(f"--n-best {self.n_best} is more than the guesses of --beam {self.beam}")
        flags = [f"--{name.replace('_', '-')}" for name in self.chance] + ["--stop"] * bool(self.stop) + ways
        if flags:
            raise InputError(f"--beam searches and leaves nothing to chance: leave out {', '.join(flags)}")

    @property
    def is_profiled(self) -> bool:
        return self.profile or self.trace is not None

    @property
    def sampling(self) -> "SamplingConfig":
        from qkv.config import SamplingConfig

        return SamplingConfig(**{"temperature": DEFAULT_TEMPERATURE, **self.chance})

    @property
    def search(self) -> "BeamConfig | None":
        from qkv.config import BeamConfig

        if self.beam is None:
            return None
        return BeamConfig(n_beams=self.beam, n_best=self.n_best, length_penalty=self.length_penalty)


def generate(
    model: Model,
    prompts: Annotated[list[str] | None, typer.Argument(help="None: one a line from stdin.")] = None,
    *,
    max_new: Annotated[int, typer.Option("--max-new", "-n", min=1, help="Most new tokens.")] = 200,
    temperature: Annotated[float | None, typer.Option(help="0: the likeliest; 1: as it is; else 0.8.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the fewest that reach p together.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Leave out less than this share of the likeliest.")] = None,
    typical_p: Annotated[float | None, typer.Option(help="As top-p, nearest to the expected surprise first.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: say less again.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this string; may be given again.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Where chance starts; 0 unless said.")] = None,
    beam: Annotated[int | None, typer.Option(metavar="N", help="No chance: search with N running guesses.")] = None,
    n_best: Annotated[int, typer.Option(help="With --beam: so many texts, best first, with their scores.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="With --beam: score is Σ log p ÷ length^this.")] = 1.0,
    int8: Int8 = False,
    device: Device = "auto",
    dtype: Dtype = DType.FLOAT32,
    stream: Annotated[bool, typer.Option("--stream", help="Print each piece as it comes.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Below each text, its tokens and log p.")] = False,
    steps: Annotated[bool, typer.Option("--steps", help="At each step the candidates, as they are revised.")] = False,
    profile: Profiled = False,
    trace: Trace = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, with ids and log p.")] = False,
) -> None:  # fmt: skip
    """Go on from a prompt; the prompt itself is printed too. From an empty one the model begins by itself.

    \b
    Examples:
      qkv generate stories "Once upon a time"
      qkv generate stories "The sea" --temperature 0.5 --max-new 50 --seed 7 --stream
      qkv generate stories "The cat" --steps --top-k 40 -n 5
      qkv generate stories "The cat" --beam 4 --n-best 3
      qkv generate stories "The cat" --temperature 0 --profile
      printf 'One day\\nIt was\\n' | qkv generate stories --json
    """
    chance = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    asked = Asked(
        max_new=max_new, stop=stop or [], chance={name: value for name, value in chance.items() if value is not None},
        beam=beam, n_best=n_best, length_penalty=length_penalty, stream=stream, steps=steps, logprobs=logprobs,
        profile=profile, trace=trace, as_json=as_json,
    )  # fmt: skip
    asked.check()
    from qkv.cli.text_inputs import given_texts
    from qkv.tasks import LanguageModel

    wanted = list(given_texts(prompts))
    if "" in wanted:
        _check_beginning(model)
    task = Place(int8=int8, device=device, dtype=dtype).load_as(LanguageModel, model)
    _tell_step(Path(model))
    _run(task, wanted, asked)


def _tell_step(run: Path) -> None:
    """Of a run the best checkpoint is loaded: where that is not the last, its user may have meant the other."""
    from qkv.cli.progress import say
    from qkv.training.run_folder import RunFolder, load_progress

    folder = RunFolder(run)
    if not (steps := folder.steps()):
        return
    last, best = steps[-1], None
    with suppress(WeightsError):  # a broken one is passed over when the model is loaded
        best = load_progress(folder.folder(last), last).best_step
    if best in steps[:-1]:
        say(f"{run}: step {best:,} of {last:,}, the best on the held-out text; the last: {folder.folder(last)}")


def _check_beginning(model: str) -> None:
    """An empty prompt is the token between two documents: who has read one alone has not seen what follows it.

    A run that began with another model's weights may know it from there.
    """
    from qkv.config import load_recipe
    from qkv.data import TokenStore

    store, recipe = Path(model) / "data" / "train", Path(model) / "recipe.toml"
    has_begun_elsewhere = recipe.is_file() and load_recipe(recipe).init_from is not None
    if not has_begun_elsewhere and store.is_dir() and TokenStore.open(store).n_documents == 1:
        raise InputError(f"{model}: was trained on 1 document and has seen none begin; give it the first words")


def _run(task: "LanguageModel", prompts: list[str], asked: Asked) -> None:
    if asked.search is not None:
        _search(task, prompts, asked, beam=asked.search)
    elif asked.stream:
        _stream(task, prompts, asked)
    elif asked.steps:
        from qkv.cli.generation_steps import show_steps

        show_steps(
            task, prompts, max_new=asked.max_new, stop=asked.stop, sampling=asked.sampling, as_json=asked.as_json
        )
    else:
        generate_batch = partial(
            task.generate_batch, prompts, max_new=asked.max_new, stop=asked.stop, sampling=asked.sampling
        )
        texts = _profiled(task, prompts, generate_batch, asked.trace) if asked.is_profiled else generate_batch()
        for prompt, text in zip(prompts, texts, strict=True):
            _print(task, prompt, text, asked)


def _profiled(
    task: "LanguageModel", prompts: list[str], generate_batch: "Callable[[], list[Continuation]]", trace: Path | None
) -> "list[Continuation]":
    from qkv.cli.profile_report import show_profile
    from qkv.training.profiler import profile_generation

    # Once before: weights are laid out, kernels chosen; and then it is known how much there is to write.
    expected = _expected(task, prompts, generate_batch())
    device = task.model.embedding.token.weight.device
    texts, profile = profile_generation(generate_batch, device, expected=expected, trace=trace)
    n_new = sum(len(text.ids) for text in texts)
    why = "what int8 costs is not predicted" if _is_int8(task) else "there is more than one batch"
    show_profile(profile, f"{n_new:,} new token{'s' * (n_new != 1)}, prompts {len(texts):,}", no_bound=why)
    return texts


def _expected(task: "LanguageModel", prompts: list[str], texts: "list[Continuation]") -> "Estimate | None":
    """None: of several batches, or in int8, no cost is known."""
    from qkv.cost import Mode, estimate
    from qkv.tasks.language_model import PROMPTS_PER_BATCH

    weight = task.model.embedding.token.weight
    if len(texts) > PROMPTS_PER_BATCH or _is_int8(task):
        return None
    return estimate(
        task.model.config, batch=len(texts), length=_mean(len(task.encode(prompt)) for prompt in prompts),
        mode=Mode.GENERATE, new=_mean(len(text.ids) for text in texts), dtype=str(weight.dtype).removeprefix("torch."),
        backend=weight.device.type,
    )  # fmt: skip


def _is_int8(task: "LanguageModel") -> bool:
    return task.model.unembedding.int8 is not None


def _mean(numbers: "Iterable[int]") -> int:
    from statistics import mean

    return max(1, round(mean(numbers)))


def _print(task: "LanguageModel", prompt: str, text: "Continuation", asked: Asked) -> None:
    from qkv.cli.progress import say
    from qkv.generation import FinishReason

    if asked.as_json:
        print(json.dumps({"prompt": prompt, **_as_dict(task, text)}, ensure_ascii=False))
        return
    print(prompt + text.text)
    if text.finish_reason is FinishReason.CONTEXT:
        say(f"ended there: the model's context of {task.model.config.context_length} tokens is full")
    if asked.logprobs:
        _print_log_probabilities(task, text)


def _print_log_probabilities(task: "LanguageModel", text: "Continuation") -> None:
    from qkv.cli.tokens import quoted_token_text

    for number, log_p in zip(text.ids, text.log_probabilities, strict=True):
        print(f"  {log_p:9.4f}  {quoted_token_text(task.tokenizer, number)}")


def _as_dict(task: "LanguageModel", text: "Continuation") -> dict[str, Any]:
    from qkv.cli.tokens import token_text

    score = {} if text.score is None else {"score": text.score}
    return {
        "text": text.text, "ids": text.ids, "tokens": [token_text(task.tokenizer, number) for number in text.ids],
        "log_probabilities": text.log_probabilities, "finish_reason": text.finish_reason, **score,
    }  # fmt: skip


def _stream(task: "LanguageModel", prompts: list[str], asked: Asked) -> None:
    for row, prompt in enumerate(prompts):
        print(prompt, end="", flush=True)
        own = asked.sampling.replace(seed=asked.sampling.seed + row)
        for piece in task.stream(prompt, max_new=asked.max_new, stop=asked.stop, sampling=own):
            print(piece, end="", flush=True)
        print()


def _search(task: "LanguageModel", prompts: list[str], asked: Asked, *, beam: "BeamConfig") -> None:
    for prompt, found in zip(prompts, task.beam_search(prompts, max_new=asked.max_new, beam=beam), strict=True):
        if asked.as_json:
            texts = [_as_dict(task, text) for text in found]
            print(json.dumps({"prompt": prompt, "found": texts}, ensure_ascii=False))
            continue
        for text in found:
            score = f"{text.score:.4f}\t" if beam.n_best > 1 else ""
            print(f"{score}{prompt}{text.text}")
            if asked.logprobs:
                _print_log_probabilities(task, text)
