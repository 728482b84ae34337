"""From a config to a training method with everything it needs: its loss, and the reference it compares with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.checkpoint.safetensors_files import inspect_model_folder
from swiftlite.config.losses import weighs_by_probability
from swiftlite.config.methods import SAMPLING, is_held, learns_again, switches_adapters_off
from swiftlite.data.prepare import LoadTokenizer, PreparedData, cache_root
from swiftlite.models.load import model_folder
from swiftlite.models.tuners import adapters_off
from swiftlite.objectives.preference import Preference
from swiftlite.objectives.reward import RewardModel
from swiftlite.objectives.unpaired import Unpaired
from swiftlite.training.methods import (
    Distilled,
    Judged,
    Method,
    Paired,
    Reinforced,
    Rewarded,
    Supervised,
    mismatched_of,
    preference_of,
)
from swiftlite.training.reference import LiveReference, Precompute, Reference, reference_key
from swiftlite.training.rollouts.evaluator import AnswerEvaluator
from swiftlite.training.rollouts.policy_batches import PolicyBatches
from swiftlite.training.teacher import Teacher

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig
    from swiftlite.data.order import BatchPlan, Pack
    from swiftlite.reporting.run import Reporter
    from swiftlite.training.evaluation import Evaluator
    from swiftlite.training.rollouts.worker import RolloutWorker
    from swiftlite.training.setup import Trainee


@dataclass(frozen=True, kw_only=True)
class MethodParts:
    """What a method, and what evaluates, is made of.

    trainee_starts: its weights are those before the first step; build_start: builds another model with these;
    build_teacher: builds the model that is learnt from, None where nothing is learnt; build_worker: what has prompts
    answered; tell_evaluated: as of `AnswerEvaluator`; same: of the world, what the first process says.
    """

    config: RunConfig
    prepared: PreparedData
    trainee: Trainee
    trainee_starts: bool = False
    build_start: Callable[[], Trainee]
    load_tokenizer: LoadTokenizer
    reporter: Reporter
    same: Callable[[str, str], str]
    build_teacher: Callable[[], Trainee] | None = None
    build_worker: Callable[[], RolloutWorker]
    tell_evaluated: Callable[[dict[str, Any]], None] | None = None


def needs_reference(loss: Preference | Unpaired | RewardModel | None) -> bool:
    """Whether a loss compares with the model as it was before the first step."""
    return isinstance(loss, Unpaired) or (isinstance(loss, Preference) and loss.needs_reference)


def count_more_forwards(config: RunConfig) -> int:
    """Forward passes without gradient over the tokens of a step, beside its own: of a reference that is there while
    training, of both models over prompts with other rows' answers, of the model before updates that it changes in."""
    loss = preference_of(config)
    live = needs_reference(loss) and (config.reference == "model" or switches_adapters_off(config))
    live = live or is_held(config)
    mismatched = isinstance(loss, Unpaired) and loss.needs_mismatched
    return live + mismatched * (1 + live) + learns_again(config)


def build_method(parts: MethodParts) -> Method:
    """The method of the config, with the reference that it needs."""
    config, trainee, loss = parts.config, parts.trainee, preference_of(parts.config)
    if config.method in SAMPLING:
        return _reinforced(parts)
    scorers = trainee.divided.scorers
    if config.teacher is not None:
        return Distilled(scorers, Teacher(_teacher(parts), config, trainee.base))
    if loss is None:
        return Supervised(scorers, dynamic=weighs_by_probability(config))
    if isinstance(loss, RewardModel):
        return Rewarded(loss, starts_at_zero=trainee.has_new_head)
    if isinstance(loss, Preference):
        return Paired(loss, _reference(parts, None) if needs_reference(loss) else None)
    mismatched = mismatched_of(config, parts.load_tokenizer().bos_token_id) if loss.needs_mismatched else None
    reference = _reference(parts, mismatched)
    return Judged(loss, reference, trainee.divided, mismatched)


def _reinforced(parts: MethodParts) -> Reinforced:
    config, worker, reference = parts.config, parts.build_worker(), None
    _temper(parts.trainee, config)
    if config.teacher is not None:
        teacher = _teacher(parts)
        _temper(teacher, config)
        reference = LiveReference(teacher.divided)
    elif is_held(config):
        reference = _live_reference(parts)
    sampler = LiveReference(parts.trainee.divided) if learns_again(config) else None
    policy_batches = PolicyBatches(config, worker, parts.reporter.answers, parts.prepared.train.others)
    return Reinforced(policy_batches, reference, sampler, config)


def build_evaluations(parts: MethodParts, method: Method) -> list[tuple[BatchPlan, Evaluator]]:
    """What an evaluation in a run goes through, in order; it is compared with others by the last of them."""
    prepared = parts.prepared
    if prepared.eval is None:
        return []
    if parts.config.method in SAMPLING:
        return [(prepared.eval, build_answer_evaluator(parts))]
    found: list[tuple[BatchPlan, Evaluator]] = [(prepared.eval, method)]
    return found if prepared.questions is None else [*found, (prepared.questions, build_answer_evaluator(parts))]


def build_answer_evaluator(parts: MethodParts) -> AnswerEvaluator:
    """Who judges a model by its answers."""
    return AnswerEvaluator(parts.config, parts.build_worker(), parts.tell_evaluated)


def _teacher(parts: MethodParts) -> Trainee:
    with parts.reporter.phase("loading the teacher"):
        return parts.build_teacher()


def _reference(parts: MethodParts, mismatched: Callable[..., list[Pack]] | None) -> Reference:
    config = parts.config
    wanted = config.reference == "model" or (config.reference is None and _copy_costs_little(parts))
    if switches_adapters_off(config) or wanted:
        return _live_reference(parts)
    return _precomputed(parts, mismatched)


def _live_reference(parts: MethodParts) -> LiveReference:
    config, trainee = parts.config, parts.trainee
    if switches_adapters_off(config):
        models = [part.model for part in trainee.divided.parts]
        return LiveReference(trainee.divided, lambda: adapters_off(models))
    with parts.reporter.phase("loading the reference"):
        second = parts.build_start()
    if config.method in SAMPLING:
        _temper(second, config)
    return LiveReference(second.divided)


def _temper(trainee: Trainee, config: RunConfig) -> None:
    """Let a model score answers by the probabilities that they are drawn with."""
    for scorer in trainee.divided.scorers:
        scorer.temper(config.temperature)


def _copy_costs_little(parts: MethodParts) -> bool:
    """Whether a second model needs no time that a pass beforehand would spare, and little memory. The first step comes
    at once then, and what goes wrong in it is seen before all answers have been scored."""
    prepared = parts.prepared
    trainee = parts.trainee
    return trainee.choice.bears_copy(trainee.free) and prepared.eval is None and not prepared.train.repeats


def _precomputed(parts: MethodParts, mismatched: Callable[..., list[Pack]] | None) -> Reference:
    prepared, leads = parts.prepared, parts.trainee.mesh.rank == 0
    key = parts.same("reference", _key(parts) if leads else "")  # which reads all weights: no collective
    pass_over = Precompute(cache_root(parts.config) / "reference" / key, parts.trainee.divided.share, mismatched)
    table = pass_over.known()
    plans = {"train": prepared.train} | ({"eval": prepared.eval} if prepared.eval is not None else {})
    if pass_over.missing(table, plans):
        start = parts.trainee if parts.trainee_starts else parts.build_start()
        with parts.reporter.phase("scoring the answers under the reference") as update:
            pass_over.run(table, plans, start.divided, update)
    return table


def _key(parts: MethodParts) -> str:
    config = parts.config
    folder = model_folder(config.model, revision=config.revision)
    files = sorted({folder / entry.file for entry in inspect_model_folder(folder).values()}) + [folder / "config.json"]
    if config.adapter is not None:
        adapter = Path(config.adapter).expanduser()
        files += sorted(file for file in adapter.iterdir() if file.name.startswith("adapter_"))
    facts = {
        "data": parts.prepared.fingerprint,
        "method": config.method,
        "config": config.config_overrides,
        "precision": [parts.trainee.precision.words, config.quantization],
        "rounding": [] if config.qat == "none" else [config.qat, str(parts.trainee.files.dtype)],
        "kernels": [parts.trainee.kernels, config.compile],
        "device": parts.trainee.mesh.device.type,
        "tokens": [config.new_tokens, config.seed],
        "versions": [version("torch"), version("transformers")],
    }
    return reference_key(files, facts)
