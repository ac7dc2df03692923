"""The `qkv generate` command."""

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.choices import BackendName, InferenceDType
from qkv.cli.options import (
    BackendOption,
    DeviceOption,
    DeviceOptions,
    DtypeOption,
    Int8Option,
    ModelArgument,
    iter_input_texts,
)
from qkv.cli.output import ProfileOption, TraceOption, check_trace_path, print_backend, print_profile, print_status
from qkv.cli.process import silence_profiler
from qkv.errors import InputError, WeightsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from qkv.config import BeamConfig, SamplingConfig
    from qkv.cost import Estimate
    from qkv.tasks import Continuation, LanguageModel

DEFAULT_TEMPERATURE = 0.8
"""Default sampling temperature, which is slightly below 1 to make the text more coherent."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The options of `qkv generate`.

    Call `check` before loading the model because loading can take a long time.
    """

    max_new_tokens: int
    stop: list[str]
    sampling_settings: dict[str, Any]
    """Sampling options that were given on the command line, without defaults."""
    beam: int | None
    n_best: int
    length_penalty: float
    int8: bool
    stream: bool
    steps: bool
    logprobs: bool
    profile: bool
    trace: Path | None
    as_json: bool

    def check(self) -> None:
        """Raise `InputError` if a value is invalid or if options cannot be combined."""
        from qkv.generation import StopStringFilter

        if self.trace is not None:
            check_trace_path(self.trace)
        output_flags = {"--stream": self.stream, "--show-steps": self.steps, "--logprobs": self.logprobs}
        used_flags = [flag for flag, is_used in output_flags.items() if is_used]
        if self.is_profiled and (self.stream or self.steps or self.beam is not None):
            raise InputError("--profile and --trace cannot be combined with --stream, --show-steps or --beam")
        if len(used_flags) > 1:
            raise InputError(f"{used_flags[0]} and {used_flags[1]} cannot be combined")
        if self.as_json and self.stream:
            raise InputError("--stream and --json cannot be combined")
        self._check_beam([flag for flag in used_flags if flag != "--logprobs"])
        _ = self.sampling_config, self.beam_config  # validates the values
        StopStringFilter(self.stop)

    def _check_beam(self, output_flags: list[str]) -> None:
        if self.beam is None and self.n_best > 1:
            raise InputError(f"--n-best {self.n_best} requires --beam")
        if self.beam is None:
            return
        if self.beam < 1:
            raise InputError(f"--beam {self.beam}: must be at least 1")
        if self.n_best > self.beam:
            raise InputError(f"--n-best {self.n_best}: must not exceed --beam {self.beam}")
        sampling_flags = [f"--{name.replace('_', '-')}" for name in self.sampling_settings]
        flags = sampling_flags + ["--stop"] * bool(self.stop) + output_flags
        if flags:
            raise InputError(f"--beam replaces sampling and cannot be combined with {', '.join(flags)}")

    @property
    def is_profiled(self) -> bool:
        return self.profile or self.trace is not None

    @property
    def sampling_config(self) -> "SamplingConfig":
        from qkv.config import SamplingConfig

        return SamplingConfig(**{"temperature": DEFAULT_TEMPERATURE, **self.sampling_settings})

    @property
    def beam_config(self) -> "BeamConfig | None":
        from qkv.config import BeamConfig

        if self.beam is None:
            return None
        return BeamConfig(n_beams=self.beam, n_best=self.n_best, length_penalty=self.length_penalty)


def generate(
    model: ModelArgument,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts to continue. By default, prompts are read from standard input, one per line."),
    ] = None,
    *,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Maximum number of new tokens to generate.")
    ] = 200,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature (default: 0.8). At 0, the most likely token is always chosen."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample only from the N most likely tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Nucleus sampling: sample only from the smallest set of most likely tokens with a total probability "
            "of at least X."
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Exclude tokens whose probability is less than X times the probability of the most likely token."
        ),
    ] = None,
    typical_p: Annotated[
        float | None,
        typer.Option(
            help="Locally typical sampling: sample only from the tokens whose surprisal is closest to the entropy of "
            "the distribution, keeping just enough tokens for a total probability of at least X."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Penalty for tokens that already occur in the text. Values above 1 discourage repetition."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="Stop when this string is generated. The string is not printed. Can be given multiple times."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed (default: 0).")] = None,
    beam: Annotated[
        int | None, typer.Option(metavar="N", help="Use beam search with N beams instead of sampling.")
    ] = None,
    n_best: Annotated[
        int,
        typer.Option(
            help="Print the N best texts for each prompt. If N is above 1, --beam is required and the scores are "
            "printed too."
        ),
    ] = 1,
    length_penalty: Annotated[
        float,
        typer.Option(help="Length penalty for beam search: the log probability of a text is divided by length^X."),
    ] = 1.0,
    int8: Int8Option = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = InferenceDType.FLOAT32,
    backend: BackendOption = BackendName.AUTO,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it is generated.")] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="After each text, print the log probability of every generated token.")
    ] = False,
    steps: Annotated[
        bool,
        typer.Option(
            "--show-steps",
            help="For each step, print the most likely tokens and their probabilities before and after applying the "
            "sampling options.",
        ),
    ] = False,
    profile: ProfileOption = False,
    trace: TraceOption = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object per prompt, including token ids and log probabilities."),
    ] = False,
) -> None:
    """Generate text from a prompt.

    Prints the prompt followed by the generated text. If the prompt is empty (""), the model generates
    text from scratch.

    \b
    Examples:
      qkv generate stories "Once upon a time"
      qkv generate stories "The sea" --temperature 0.5 --max-new-tokens 50 --seed 7 --stream
      qkv generate stories "The cat" --show-steps --top-k 40 -n 5
      qkv generate stories "The cat" --beam 4 --n-best 3
      qkv generate stories "The cat" --temperature 0 --profile
      printf 'One day\\nIt was\\n' | qkv generate stories --json
    """
    sampling_settings = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    options = GenerateOptions(
        max_new_tokens=max_new_tokens,
        stop=stop or [],
        sampling_settings={name: value for name, value in sampling_settings.items() if value is not None},
        beam=beam,
        n_best=n_best,
        length_penalty=length_penalty,
        int8=int8,
        stream=stream,
        steps=steps,
        logprobs=logprobs,
        profile=profile,
        trace=trace,
        as_json=as_json,
    )
    options.check()
    from qkv.tasks import LanguageModel

    prompt_texts = list(iter_input_texts(prompts))
    if "" in prompt_texts:
        _reject_model_trained_on_single_document(model)
    task = DeviceOptions(int8=int8, device=device, dtype=dtype, backend=backend).load_task_as_and_print_remarks(
        LanguageModel, model
    )
    _report_earlier_best_checkpoint(Path(model))
    _generate_and_print(task, prompt_texts, options)


def _report_earlier_best_checkpoint(run: Path) -> None:
    """Print which checkpoint of the run was loaded, unless the best checkpoint is also the last one."""
    if not (run / "checkpoints").is_dir():
        return
    from qkv.training.checkpoint import RunFolder, load_progress

    folder = RunFolder(run)
    if not (steps := folder.checkpoint_steps()):
        return
    last, best = steps[-1], None
    with suppress(WeightsError):  # loading the model also skips damaged checkpoints
        best = load_progress(folder.checkpoint_folder(last), last).best_step
    if best in steps[:-1]:
        print_status(
            f"{run}: using the best checkpoint (step {best:,} of {last:,}); the last checkpoint is "
            f"{folder.checkpoint_folder(last)}"
        )


def _reject_model_trained_on_single_document(model: str) -> None:
    """Raise `InputError` for an empty prompt if the model was trained on a single document.

    An empty prompt is encoded as the token that separates documents. A model trained on a single document has never
    seen what follows this token, unless training started from another model's weights.
    """
    from qkv.config import load_recipe
    from qkv.data import TokenStore

    store, recipe = Path(model) / "data" / "train", Path(model) / "recipe.toml"
    is_initialized_from_model = recipe.is_file() and load_recipe(recipe).init_from is not None
    if not is_initialized_from_model and store.is_dir() and TokenStore.open(store).n_documents == 1:
        raise InputError(
            f"{model}: an empty prompt is not supported because the model was trained on only 1 document and has not "
            "learned how documents begin"
        )


def _generate_and_print(task: "LanguageModel", prompts: list[str], options: GenerateOptions) -> None:
    if options.beam_config is not None:
        _beam_search_and_print(task, prompts, options, beam=options.beam_config)
    elif options.stream:
        _print_stream(task, prompts, options)
    elif options.steps:
        from qkv.cli.generation_steps import print_generation_steps

        print_generation_steps(
            task,
            prompts,
            max_new_tokens=options.max_new_tokens,
            stop=options.stop,
            sampling=options.sampling_config,
            as_json=options.as_json,
        )
    else:
        generate_batch = partial(
            task.generate_batch,
            prompts,
            max_new=options.max_new_tokens,
            stop=options.stop,
            sampling=options.sampling_config,
        )
        if options.is_profiled:
            continuations = _warm_up_and_print_generation_profile(task, prompts, generate_batch, options)
        else:
            continuations = generate_batch()
        for prompt, continuation in zip(prompts, continuations, strict=True):
            _print_continuation(task, prompt, continuation, options)


def _warm_up_and_print_generation_profile(
    task: "LanguageModel",
    prompts: list[str],
    generate_batch: "Callable[[], list[Continuation]]",
    options: GenerateOptions,
) -> "list[Continuation]":
    """Generate text under the profiler and print the profile."""
    from qkv.engines import explain_backends
    from qkv.training.profiler import time_then_profile_generation

    # The first call packs the weights and selects kernels. The lengths of its results determine the expected cost.
    continuations = generate_batch()
    expected = None if options.int8 else _estimate_single_batch_generation_cost(task, prompts, continuations)
    device = task.model.embedding.token.weight.device
    silence_profiler()
    continuations, profile = time_then_profile_generation(
        generate_batch, device, expected=expected, trace=options.trace
    )
    n_new = sum(len(continuation.ids) for continuation in continuations)
    reason = "the cost of int8 is not estimated" if options.int8 else "the prompts do not fit into one batch"
    workload = f"{n_new:,} new token{'s' * (n_new != 1)}, {len(prompts):,} prompt{'s' * (len(prompts) != 1)}"
    print_profile(profile, workload, no_bound_reason=reason)
    print_backend(*explain_backends(task.model, task.backend))
    return continuations


def _estimate_single_batch_generation_cost(
    task: "LanguageModel", prompts: list[str], continuations: "list[Continuation]"
) -> "Estimate | None":
    """Estimate the cost of generating one batch, or return None for several batches, which are not modeled."""
    from qkv.cost import Mode, estimate
    from qkv.tasks.language_model import PROMPTS_PER_BATCH

    weight = task.model.embedding.token.weight
    if len(continuations) > PROMPTS_PER_BATCH:
        return None
    return estimate(
        task.model.config,
        batch_size=len(continuations),
        seq_len=_rounded_mean(len(task.tokenize(prompt)) for prompt in prompts),
        mode=Mode.GENERATE,
        n_new_tokens=_rounded_mean(len(continuation.ids) for continuation in continuations),
        dtype=str(weight.dtype).removeprefix("torch."),
        device_type=weight.device.type,
    )


def _rounded_mean(numbers: "Iterable[int]") -> int:
    from statistics import mean

    return max(1, round(mean(numbers)))


def _print_continuation(
    task: "LanguageModel", prompt: str, continuation: "Continuation", options: GenerateOptions
) -> None:
    from qkv.generation import FinishReason

    if options.as_json:
        print(json.dumps({"prompt": prompt, **_continuation_to_dict(task, continuation)}, ensure_ascii=False))
        return
    print(prompt + continuation.text)
    if continuation.finish_reason is FinishReason.CONTEXT:
        print_status(f"generation stopped at the model's context length of {task.model.config.context_length} tokens")
    if options.logprobs:
        _print_log_probabilities(task, continuation)


def _print_log_probabilities(task: "LanguageModel", continuation: "Continuation") -> None:
    from qkv.text.token_display import quoted_token_text

    for token_id, log_probability in zip(continuation.ids, continuation.log_probabilities, strict=True):
        print(f"  {log_probability:9.4f}  {quoted_token_text(task.tokenizer, token_id)}")


def _continuation_to_dict(task: "LanguageModel", continuation: "Continuation") -> dict[str, Any]:
    from qkv.text.token_display import token_text_or_vocabulary_name

    score = {} if continuation.score is None else {"score": continuation.score}
    return {
        "text": continuation.text,
        "ids": continuation.ids,
        "tokens": [token_text_or_vocabulary_name(task.tokenizer, token_id) for token_id in continuation.ids],
        "log_probabilities": continuation.log_probabilities,
        "finish_reason": continuation.finish_reason,
        **score,
    }


def _print_stream(task: "LanguageModel", prompts: list[str], options: GenerateOptions) -> None:
    for row, prompt in enumerate(prompts):
        print(prompt, end="", flush=True)
        # This is the seed that the prompt would have in a batch.
        sampling = options.sampling_config.replace(seed=options.sampling_config.seed + row)
        for text in task.stream(prompt, max_new=options.max_new_tokens, stop=options.stop, sampling=sampling):
            print(text, end="", flush=True)
        print()


def _beam_search_and_print(
    task: "LanguageModel", prompts: list[str], options: GenerateOptions, *, beam: "BeamConfig"
) -> None:
    results = task.beam_search(prompts, max_new=options.max_new_tokens, beam=beam)
    for prompt, hypotheses in zip(prompts, results, strict=True):
        if options.as_json:
            texts = [_continuation_to_dict(task, hypothesis) for hypothesis in hypotheses]
            print(json.dumps({"prompt": prompt, "hypotheses": texts}, ensure_ascii=False))
            continue
        for hypothesis in hypotheses:
            score = f"{hypothesis.score:.4f}\t" if beam.n_best > 1 else ""
            print(f"{score}{prompt}{hypothesis.text}")
            if options.logprobs:
                _print_log_probabilities(task, hypothesis)
