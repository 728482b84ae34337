"""`swiftlite eval` in one of its processes: check, data, model, then one pass over each data set.

Everything is as in a training run of the same settings, in any layout, so that the loss of a checkpoint is the one that
its run has logged; but nothing is trained, and nothing is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swiftlite.checkpoint.folder import list_checkpoints
from swiftlite.checkpoint.state import STATE, read_trainer_state
from swiftlite.config.losses import losses_of
from swiftlite.config.methods import SAMPLING, asked_at_once, examines
from swiftlite.config.notes import unused_on_cpu
from swiftlite.config.recipe import load_recipe
from swiftlite.config.validate import build_config
from swiftlite.data.audit import losses_in_words
from swiftlite.data.evaluation_prompts import with_questions
from swiftlite.data.prepare import Asked, LoadTokenizer, PreparedData, prepare_data
from swiftlite.errors import UserError
from swiftlite.models.dtypes import source_dtype
from swiftlite.models.load import check_model_path
from swiftlite.models.tokenizer import tokenizer_loader
from swiftlite.parallel.mesh import Mesh
from swiftlite.parallel.world import World
from swiftlite.reporting.display import open_display
from swiftlite.reporting.run import QuietReporter, Reporter
from swiftlite.serving.origin import run_of
from swiftlite.training.evaluation import Evaluation, Evaluator, evaluate_rows
from swiftlite.training.guards.agreement import check_same_rows
from swiftlite.training.guards.failures import memory_errors, other_memory_errors
from swiftlite.training.guards.stopping import stop_requests
from swiftlite.training.methods import preference_of
from swiftlite.training.progress import saved_progress
from swiftlite.training.rollouts.reward_models import notes_on_reward_models
from swiftlite.training.rollouts.rewards import Reward, check_columns, load_rewards
from swiftlite.training.rollouts.tools import check_tools
from swiftlite.training.rollouts.worker import build_worker
from swiftlite.training.setup import Trainee, build_trainee, check_model, precision_of, vocabulary_of
from swiftlite.training.setup_method import MethodParts, build_answer_evaluator, build_method, needs_reference
from swiftlite.training.sources import find_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from swiftlite.config.layout import Layout
    from swiftlite.config.schema import RunConfig


@dataclass(frozen=True)
class Evaluated:
    """data: the name of the rows; counts: of rows and tokens; loss: the mean over trained tokens, pairs or answers;
    None where answers are rewarded."""

    data: str
    counts: dict[str, int]
    loss: float | None
    metrics: dict[str, float | None]


ALL = "all"  # of the data sets
RUNNING = "bco_pair"  # carries a mean from step to step
COUNTED_PROMPTS = ("rows", "tokens")
COUNTED = ("rows", "pairs", "desirable", "undesirable", "tokens", "trained_tokens")
Tell = Callable[[list[Evaluated]], None]
Stops = Callable[[], int | None]


def run_evaluation(
    config: RunConfig,
    world: World,
    layout: Layout,
    *,
    tell: Tell,
    tell_answers: Callable[[dict[str, Any]], None] | None = None,
    quiet: bool = False,
    began: float | None = None,
) -> None:
    """Evaluate the weights in `config.resume`, which began as `config.model`, or that model itself.

    The rows are those of `config.dataset`, each set by itself, or the part of them that `config.eval_fraction` holds
    out. tell: gets what was found, on rank 0: of each data set, and of all if there are several; tell_answers: gets the
    answers to each prompt, of models that functions judge by them; quiet: stdout is for something else, also than what
    those functions print; began: as all work of `launch` gets it, not needed here.

    Raises UserError for what the user can mend, RunError for what fails.
    """
    reporter = open_display(sys.stderr if quiet else None) if world.rank == 0 else QuietReporter()
    checkpoint = None if config.resume == "never" else _checkpoint_of(Path(config.resume))
    own = _held_out_by(config, config.resume)
    start, config = config.model_copy(update={"resume": "never"}), _of_the_weights(config)
    load = tokenizer_loader(config)
    with other_memory_errors(learns=False), redirect_stdout(sys.stderr if quiet else sys.stdout), ExitStack() as stack:
        with reporter.phase("checking the model"):
            model_config = check_model(config, layout, world.device, None)
            config = _as_in_files(config, model_config, world.device)
            if needs_reference(preference_of(config)):
                _check_reference(start, config)
            rewards = _judged(config, model_config, load)
        for note in _notes(start, config, model_config, checkpoint, rewards, world.device):
            reporter.message(f"note: {note}")
        data = _read_rows(config, own, load, vocabulary_of(config, model_config), reporter)
        asked = _asked_of(config, data)
        check_columns(rewards, asked, tools=config.tools)
        with reporter.phase("loading the model"):
            check_same_rows(world, " ".join(prepared.fingerprint for prepared in data))
            world.meet("data")
            trainee = _load(config, model_config, load, world, layout)
            stopped = stack.enter_context(_stops(trainee.mesh))
            world.meet("ready")  # to end before the same step
        for note in trainee.notes:
            reporter.message(f"note: {note}")

        build_start = cache(partial(_load_start, start, trainee, load, world, layout))
        worker = cache(partial(build_worker, config, model_config, trainee, load, world, rewards, asked.columns, stack))
        told = tell_answers if world.rank == 0 else None

        def build(number: int, prepared: PreparedData) -> Evaluator:
            parts = MethodParts(
                config=start, prepared=prepared, trainee=trainee, build_start=build_start, load_tokenizer=load,
                reporter=reporter, same=world.within(f"set {number}").same, build_worker=worker, tell_evaluated=told,
            )  # fmt: skip
            return _evaluator(parts, checkpoint)

        found = list(_evaluate(config, data, trainee, build, reporter, stopped))
    if world.rank == 0:
        tell(found)


def _asked_of(config: RunConfig, data: Sequence[PreparedData]) -> Asked:
    """What the rows have for the functions that reward answers."""
    columns = sorted({name for prepared in data for name in prepared.columns})
    answered = any(part.answered for prepared in data for part in prepared.asked)
    return Asked(f"--dataset {' '.join(config.dataset)}", tuple(columns), answered)


def _evaluator(parts: MethodParts, checkpoint: Path | None) -> Evaluator:
    """What judges a model by a data set. checkpoint: as of `_carried`."""
    if parts.config.method in SAMPLING:
        return build_answer_evaluator(parts)
    method = build_method(parts)
    method.state = _carried(checkpoint, method.state)
    return method


def _judged(config: RunConfig, model_config: PretrainedConfig, load: LoadTokenizer) -> list[Reward]:
    """What rewards answers, where there are any. Raises UserError where that, or tools, cannot be had."""
    if config.method not in SAMPLING:
        return []
    check_tools(config, model_config, load)
    return load_rewards(config.reward)


def _read_rows(
    config: RunConfig, own: RunConfig | None, load: LoadTokenizer, vocabulary: int | None, reporter: Reporter
) -> list[PreparedData]:
    """What is evaluated, a data set each. own: of `_held_out_by`; vocabulary: how many tokens the model knows."""
    with reporter.phase("preparing data") as update:
        if own is None:
            data = [_as_training(prepare_data(one, load, update, vocabulary)) for one in _each_set(config)]
        else:
            learnt = prepare_data(own, load, update, vocabulary)
            prepared = with_questions(config, learnt, load, update, vocabulary)
            told = {"rows": prepared.audit["questions"]["rows"]}
            data = [_as_training(replace(prepared, eval=prepared.questions, audit=told))]
    for losses in filter(None, (losses_in_words(prepared.audit) for prepared in data)):
        reporter.message(f"note: {losses}")
    return data


def _held_out_by(config: RunConfig, weights: str) -> RunConfig | None:
    """The settings by which the weights' run held out the rows that are prompts now; None where there is no such run,
    or it had them as prompts itself. Another method leaves other rows out, and so holds others out."""
    run = run_of(Path(weights)) if weights != "never" and config.eval_fraction else None
    if run is None or config.method not in SAMPLING:
        return None
    own = build_config(load_recipe(str(run / "config.yaml")).given())
    here = ("model", "tokenizer", "chat_template", "dataset", "eval_fraction", "cache_dir", "workers", "reward")
    own = own.model_copy(update={name: getattr(config, name) for name in here} | {"eval_dataset": []})
    return own if own.method not in SAMPLING and examines(own) else None


def _load(
    config: RunConfig, model_config: PretrainedConfig, load: LoadTokenizer, world: World, layout: Layout
) -> Trainee:
    """The model, none of which is trained. Raises UserError where it lacks what it is to be judged by."""
    trainee = build_trainee(config, model_config, None, load, world, layout, evaluates=True)
    trainee.check(config)
    if trainee.has_new_head:
        fix = "name a reward model, such as the result of `swiftlite rm`"
        raise UserError("the model has no score head", where=config.model, fix=fix)
    return trainee


def _load_start(config: RunConfig, trainee: Trainee, load: LoadTokenizer, world: World, layout: Layout) -> Trainee:
    """What the model began as, beside it."""
    model_config = check_model(config, layout, world.device, None)
    beside = world.within("start"), layout, trainee.choice
    return build_trainee(config, model_config, None, load, *beside, evaluates=True)


def _of_the_weights(config: RunConfig) -> RunConfig:
    """The config of the model as it is now. An adapter keeps its base; whole weights are a model of their own."""
    settled: dict[str, Any] = {
        "resume": "never",
        "activation_checkpointing": "none",
        "from_scratch": False,
        "config_overrides": {},
    }
    if config.tuner == "lora":
        adapter = config.adapter if config.resume == "never" else config.resume
        settled |= {"adapter": adapter, "new_tokens": config.new_tokens if config.resume == "never" else []}
        if adapter is None and config.quantization == "none":  # which none but adapters can be put on
            settled["tuner"] = "full"
    elif config.resume != "never":
        settled |= {"model": config.resume, "new_tokens": []}
    return config.model_copy(update=settled)


def _checkpoint_of(weights: Path) -> Path | None:
    """The checkpoint that has what a method carries from step to step: the weights' own, or of a result the last."""
    candidates = [weights, *list_checkpoints(weights.parent)[:1]]
    return next((folder for folder in candidates if (folder / STATE).is_file()), None)


def _carried(checkpoint: Path | None, fresh: dict[str, Any]) -> dict[str, Any]:
    """What the method has carried from step to step, unless the checkpoint is another method's."""
    state = None if checkpoint is None else read_trainer_state(checkpoint)
    same = state is not None and state["progress"].get("method", {}).keys() == fresh.keys()
    return saved_progress(state, checkpoint, fresh).method if same else fresh


def _as_in_files(config: RunConfig, model_config: PretrainedConfig, device: torch.device) -> RunConfig:
    """Weights that are not trained need no masters: they stay in bf16 where files have that, and products."""
    in_bf16 = precision_of(config, model_config, device).dtype == torch.bfloat16
    alike = in_bf16 and source_dtype(model_config) == torch.bfloat16 and config.tuner != "lora"
    return config.model_copy(update={"pure_bf16": alike or config.pure_bf16})


def _notes(
    start: RunConfig,
    config: RunConfig,
    model_config: PretrainedConfig,
    checkpoint: Path | None,
    rewards: Sequence[Reward],
    device: torch.device,
) -> Iterator[str]:
    """On what has no effect on this device, on what of a run its files do not hold, so that it has logged another
    loss, and on answers that have no reward."""
    yield from notes_on_reward_models(rewards, config.max_length)
    if device.type == "cpu":
        yield from unused_on_cpu(config)
    of_files = source_dtype(model_config)
    if config.model != start.model and of_files != torch.float32 and not start.pure_bf16:
        kind = str(of_files).removeprefix("torch.")
        yield f"the files hold the trained weights in {kind}, the run had them in fp32: its loss was another one"
    losses = losses_of("dpo", config.loss) if config.method == "dpo" else []
    if checkpoint is None and RUNNING in dict(losses):
        yield f"{RUNNING} takes the mean reward before as 0: the run's checkpoints have it, which are not beside this"


def _check_reference(start: RunConfig, config: RunConfig) -> None:
    """Raises UserError where the model would be compared with itself, or with what is gone."""
    if (start.model, start.adapter) == (config.model, config.adapter):
        raise UserError(
            f"{config.method} compares a model with what it began as, and nothing says what that was",
            where=config.model,
            fix="name the run (--model OUT) without --recipe: its config.yaml says it; or an adapter: its base is it",
        )
    try:
        check_model_path(start.model)
        find_weights(start, None)
    except UserError as error:
        raise UserError(
            f"{config.method} compares a model with what it began as, which is not where it was: {error.what}",
            where=error.where,
            fix="write where it is now into the run's config.yaml, as its model or adapter",
        ) from error


def _each_set(config: RunConfig) -> Iterator[RunConfig]:
    """A config for each data set of which the rows are evaluated, then one for all if their losses do not add up; only
    one for all where a part of the rows is held out."""
    if config.eval_fraction:
        yield config.model_copy(update={"streaming": False})
        return
    once = {
        "eval_dataset": [],
        "shuffle": False,
        "epochs": 1.0,
        "max_steps": None,
        "streaming": False,
        "deduplicate": False,
    }
    if config.method in SAMPLING:
        once["global_batch_size"] = asked_at_once(config)
    for name in config.dataset:
        yield config.model_copy(update={**once, "dataset": [name]})
    if len(config.dataset) > 1 and _of_other_rows(config):
        yield config.model_copy(update=once)


def _of_other_rows(config: RunConfig) -> bool:
    """Whether the loss of a row depends on which others share its step, so that losses of sets do not add up."""
    return config.method == "kto" and preference_of(config).needs_mismatched


def _as_training(prepared: PreparedData) -> PreparedData:
    """With the rows to evaluate in the place of those to train on. Their steps are not those of a run, and nor are a
    reference's values for their mismatched answers."""
    if prepared.eval is None:
        return replace(prepared, fingerprint=f"eval {prepared.fingerprint}")
    return replace(prepared, train=prepared.eval, eval=None, fingerprint=f"eval {prepared.fingerprint}")


@contextmanager
def _stops(mesh: Mesh) -> Iterator[Stops]:
    """Yields what gives the signal that any of several processes has had, or None: all end before the same step, or
    one would wait for another for good. A process on its own ends at once."""
    if mesh.stored is None:
        yield lambda: None
        return
    with stop_requests(None, 0.0) as requested:

        def agreed() -> int | None:
            number = torch.tensor(float(requested() or 0), device=mesh.device)
            return int(mesh.largest(number).item()) or None

        yield agreed


def _evaluate(
    config: RunConfig,
    data: list[PreparedData],
    trainee: Trainee,
    build: Callable[[int, PreparedData], Evaluator],
    reporter: Reporter,
    stopped: Stops,
) -> Iterator[Evaluated]:
    """Each data set, and all together where there are several."""
    errors, whole, counts = partial(memory_errors, config=config, sound=False, learns=False), Evaluation(), []
    for number, prepared in enumerate(data):
        evaluator, plan = build(number, prepared), prepared.train
        names = config.dataset if len(data) > 1 else [" ".join(config.dataset)]
        name = names[number] if number < len(names) else ALL
        with reporter.phase(f"evaluating {name}", plan.total_steps) as update:

            def going_on(done: int, update: Callable[..., None] = update) -> bool:
                update(done)
                if signalled := stopped():
                    raise SystemExit(128 + signalled)
                return True

            found = evaluate_rows(plan, evaluator, trainee.divided, errors, going_on, "train")
        described, whole = plan.describe(), whole + found
        told = COUNTED_PROMPTS if config.method in SAMPLING else COUNTED
        counts.append({key: described[key] for key in told if key in described})
        yield _evaluated(name, counts[-1], evaluator.results(found))
    if 1 < len(data) == len(config.dataset):
        summed = {key: sum(each[key] for each in counts) for key in counts[0]}
        yield _evaluated(ALL, summed, evaluator.results(whole))


def _evaluated(name: str, counts: dict[str, int], results: dict[str, float | None]) -> Evaluated:
    return Evaluated(name, counts, results.pop("loss", None), results)
