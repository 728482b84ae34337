"""A whole training run, in the order in which it happens: check, data, model, loop, result."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.checkpoint.claim import Claim
from swiftlite.checkpoint.export import create_model_files
from swiftlite.checkpoint.folder import discard, list_checkpoints, point_at, retain, step_folder
from swiftlite.checkpoint.saver import Saver
from swiftlite.checkpoint.shared import in_turn, nothing, to_write, write_together
from swiftlite.checkpoint.space import Space, check_space
from swiftlite.checkpoint.state import (
    load_resume_state,
    plan_resume_file,
    read_trainer_state,
    resume_tensors,
    write_trainer_state,
)
from swiftlite.checkpoint.tensor_writer import FilePlan
from swiftlite.config.changes import OF_THE_FILES, OF_THE_ROWS, changed_settings
from swiftlite.config.methods import answers, keeps_second
from swiftlite.config.notes import unused_on_cpu
from swiftlite.data.audit import imbalance_warning, losses_in_words
from swiftlite.data.evaluation_prompts import prepare_run
from swiftlite.data.tokens.stops import stop_tokens
from swiftlite.ending import raise_seen_signal
from swiftlite.errors import RunError, UserError
from swiftlite.heap import give_back
from swiftlite.models.tokenizer import tokenizer_loader
from swiftlite.parallel.world import World
from swiftlite.reporting.run import QuietReporter, Reporter, RunReporter
from swiftlite.streams import outlive_readers
from swiftlite.training.best import best_model, forget_lost_best, forget_other_losses
from swiftlite.training.guards.agreement import check_same_rows
from swiftlite.training.guards.failures import StepFailed, other_memory_errors
from swiftlite.training.guards.fits import check_result
from swiftlite.training.guards.stopping import Stopped, stop_requests
from swiftlite.training.guards.watchdog import watchdog
from swiftlite.training.interval import Interval
from swiftlite.training.learner import Parts
from swiftlite.training.loop import Loop
from swiftlite.training.methods import preference_of
from swiftlite.training.optimizer import build_optimizer
from swiftlite.training.output import OutputFolder
from swiftlite.training.profiler import RECORDED, WARM, StepProfiler
from swiftlite.training.progress import Progress, saved_progress
from swiftlite.training.publish import open_repository, publish
from swiftlite.training.resume import find_resume, run_settings, without_gone_adapter
from swiftlite.training.rollouts.engine import check_engines
from swiftlite.training.rollouts.reward_models import notes_on_reward_models
from swiftlite.training.rollouts.rewards import Reward, check_columns, load_rewards
from swiftlite.training.rollouts.tools import check_tools
from swiftlite.training.rollouts.worker import build_worker
from swiftlite.training.setup import build_trainee, check_model, vocabulary_of
from swiftlite.training.setup_method import MethodParts, build_evaluations, build_method, needs_reference
from swiftlite.training.sources import find_weights
from swiftlite.training.teacher import build_teacher, check_teacher

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from swiftlite.config.layout import Layout
    from swiftlite.config.schema import RunConfig
    from swiftlite.data.prepare import LoadTokenizer
    from swiftlite.training.needs import Beside

SECONDS_TO_FINISH = 60  # of a checkpoint that is being written when the run fails


def run_training(
    config: RunConfig, world: World, layout: Layout, reporter: Reporter | None = None, *, began: float | None = None
) -> None:
    """Train as the config says and leave the output folder of the contract behind; every process of the world calls it.

    reporter: who is told what happens; by default rank 0 tells the user, and the others nobody. began: by
    time.monotonic, from when `--stop-after` counts; by default from now.

    Raises UserError for what the user can mend (before anything is written), RunError for what fails while running,
    SystemExit with 128 + signal after a signal, once a checkpoint is saved.
    """
    outlive_readers()
    began, output = time.monotonic() if began is None else began, Path(config.output_dir)
    reporter = reporter or (RunReporter(config, output) if world.rank == 0 else QuietReporter())
    with reporter, closing(Claim(output)) as claim, ExitStack() as ending, other_memory_errors():
        resume = find_resume(config, output, claim, world, reporter.message)
        reading = without_gone_adapter(config, resume, reporter.message)
        load = tokenizer_loader(reading, reporter.message)
        with reporter.phase("checking the model"):
            model_config, beside, rewards = _checked(config, world, layout, load, resume)
        for note in unused_on_cpu(config) if world.device.type == "cpu" else []:
            reporter.message(f"note: {note}")
        with reporter.phase("preparing data") as update:
            prepared = prepare_run(reading, load, update, vocabulary_of(config, model_config))
            check_columns(rewards, *prepared.asked, tools=config.tools)
        for text in _told_of_data(config, prepared.audit, rewards):
            reporter.message(text)
        repository = open_repository(config) if config.push_to_hub and world.rank == 0 else None
        with reporter.phase("loading the model"):
            check_same_rows(world, prepared.fingerprint + prepared.questions_fingerprint)
            world.meet("data")
            trainee = build_trainee(config, model_config, resume, load, world, layout, beside=beside)
            trainee.check(config)
            if world.rank == 0:
                load()  # for checkpoints; by the first of them the model's folder may be gone
        for note in trainee.notes:
            reporter.message(f"note: {note}")
        start = partial(build_trainee, config, model_config, None, load, world.within("start"), layout, trainee.choice)
        teacher = partial(build_teacher, config, trainee, load, world, layout, reporter.message)
        worker = partial(build_worker, config, model_config, trainee, load, world, rewards, prepared.columns, ending)
        parts = MethodParts(
            config=config, prepared=prepared, trainee=trainee, trainee_starts=resume is None, build_start=start,
            load_tokenizer=load, reporter=reporter, same=world.same, build_teacher=teacher, build_worker=cache(worker),
        )  # fmt: skip
        session = Session(claim, parts)
        session.restore(resume)
        try:
            session.train(began)
        except Stopped as stopped:
            reporter.message(f"stopped {stopped.words}; go on with --resume auto --output-dir {output}")
            raise SystemExit(stopped.exit_code) from None
        if repository is not None:
            reporter.message(f"uploaded to {publish(output / 'model', repository, config)}")
        if config.push_to_hub:
            world.meet("upload")  # else the others would end what joins them while this one works


def _checked(
    config: RunConfig, world: World, layout: Layout, load: LoadTokenizer, resume: Path | None
) -> tuple[PretrainedConfig, Beside | None, list[Reward]]:
    """(the model's config, its teacher's outline if it has one, what rewards answers), before rows are read. Raises
    UserError where the model or what is beside it does not fit."""
    model_config = check_model(config, layout, world.device, resume)
    check_result(config, model_config)
    if needs_reference(preference_of(config)) or keeps_second(config):
        find_weights(config, None)  # the start of a run that goes on has to be there still
    beside = check_teacher(config, layout, world.device, load) if config.teacher else None
    rewards = load_rewards(config.reward, config.method) if answers(config) else []
    check_engines(config)
    check_tools(config, model_config, load)
    return model_config, beside, rewards


def _told_of_data(config: RunConfig, audit: dict[str, Any], rewards: Sequence[Reward]) -> Iterator[str]:
    """What is known of rows and rewards before the model loads and whoever starts the run should know."""
    yield from (f"note: {text}" for text in notes_on_reward_models(rewards, config.max_length))
    if losses := losses_in_words(audit):
        yield f"note: {losses}"
    if config.placeholders and not audit["rows"].get("placeholders_filled") and not config.streaming:
        yield "warning: no row holds one of --placeholders"
    if warning := imbalance_warning(audit, config.desirable_weight, config.undesirable_weight):
        yield f"warning: {warning}"


class Session:
    """One run's parts between loading and the end, and what is written of them."""

    def __init__(self, claim: Claim, parts: MethodParts) -> None:
        config, prepared, trainee, reporter = parts.config, parts.prepared, parts.trainee, parts.reporter
        self._folder = OutputFolder(config, claim, prepared, reporter)
        self._config, self._output, self._prepared = config, self._folder.path, prepared
        self._load_tokenizer, self._reporter, self._trainee = parts.load_tokenizer, reporter, trainee
        self._method = build_method(parts)
        self._evaluations = build_evaluations(parts, self._method)
        self._mesh = trainee.mesh
        self._optimizer = build_optimizer(trainee.trained(), config, trainee.mesh, trainee.matrices)
        self._progress = Progress()
        self._best: tuple[int | None, float | None] = None, None  # step and loss of the best checkpoint that is there
        self._losses_told = losses_in_words(prepared.audit)  # of a stream, of what has been read of it
        self._other_result = False  # than the settings of the run had asked for before it was resumed
        self._saved: Path | None = None  # the checkpoint that holds the present weights, or the last one written
        on_gpu = trainee.mesh.device.type == "cuda"
        background = config.async_save == "on" or (config.async_save == "auto" and on_gpu)
        self._saver = Saver(trainee.mesh, background=background)

    @property
    def _leads(self) -> bool:
        return self._mesh.rank == 0

    def restore(self, checkpoint: Path | None) -> None:
        """Take optimizer, masters and counters from a checkpoint. Raises UserError where the run is another one."""
        if checkpoint is None:
            return
        state = read_trainer_state(checkpoint)
        if state["data"] != self._prepared.fingerprint:
            settings = changed_settings(run_settings(checkpoint), self._config)
            changed = ", ".join(words for name, words in settings.items() if name in OF_THE_ROWS)
            raise UserError(
                "the data set or the way it is packed has changed since the checkpoint"
                + (f": {changed}" if changed else ", through no setting: the rows, tokenizer or swiftlite are others"),
                where=str(checkpoint),
                fix="resume with the same data and data flags, or start a new run from its model with --model",
            )
        trainee = self._trainee
        load_resume_state(checkpoint, trainee.trained_shapes, trainee.trained(), self._optimizer, trainee.matrices)
        self._progress = progress = saved_progress(state, checkpoint, self._method.state)
        self._prepared.train.recount(progress.step)
        self._saved = checkpoint
        self._method.state = progress.method
        settings = changed_settings(run_settings(checkpoint), self._config)
        files = OF_THE_FILES if self._config.result == "last" else ()  # those of the best one are copied
        self._other_result = any(name in settings for name in ("result", *files))
        forget_other_losses(progress, self._config, settings, self._reporter.message)
        forget_lost_best(progress, self._config, self._is_there, self._reporter.message)
        self._best = progress.best_step, progress.best_step_loss

    def _is_there(self, step: int) -> bool:
        return self._mesh.any(step_folder(self._output, step).is_dir())

    def train(self, began: float) -> None:
        """Run the loop, then write model/, audit, plots and page. began: of the run, by time.monotonic."""
        config, trainee, plan = self._config, self._trainee, self._prepared.train
        in_turn(self._saver.together, self._check_space if self._leads else nothing)
        with self._folder.begun() if self._leads else nullcontext():
            in_turn(self._saver.together, self._folder.check_shared)
            self._reporter.start(plan.total_steps, self._facts(), start_step=self._progress.step)
        if self._leads:
            self._folder.write_audit()
        parts = Parts(
            config=config,
            plan=plan,
            evaluations=self._evaluations,
            trainee=trainee,
            method=self._method,
            optimizer=self._optimizer,
            profiler=self._profiler(),
        )
        raise_seen_signal()
        with (
            stop_requests(config.stop_after, began) as requested,
            watchdog(self._output / "stacks", self._mesh.rank) as alive,
            parts.profiler or nullcontext(),
        ):
            loop = Loop(parts, self._progress, self._reporter, self.save_checkpoint, requested, alive)
            try:
                loop.run()
                self._saver.finish()
            except StepFailed as failure:
                if failure.sound and self._progress.step:
                    self._optimizer.zero_grad(set_to_none=True)
                    self.save_checkpoint(last=True)
                raise
            except Exception:
                with suppress(Exception):  # what is being written may still be completed; the first error counts
                    self._saver.finish(SECONDS_TO_FINISH)
                raise
        self._write_result()

    def _profiler(self) -> StepProfiler | None:
        if not self._config.profile:
            return None
        left = self._prepared.train.total_steps - self._progress.step
        if left < WARM + RECORDED:
            self._reporter.message(f"note: nothing is profiled: that takes {WARM + RECORDED} steps, {left} are left")
        parts, by_module = self._trainee.divided.parts, not self._config.compile
        return StepProfiler(self._output / "profile", self._mesh, parts, by_module=by_module)

    def _check_space(self) -> None:
        """Raises UserError where checkpoints and result will not fit the disk."""
        config, files, plan = self._config, self._trainee.files, self._prepared.train
        done, total = self._progress, plan.total_steps
        saving = Interval.of(config.save_steps, total)
        space = Space(
            checkpoint=files.plan.size + self._resume_plan(moments=True).size,
            result=files.plan.size,
            saves=saving.times_left(done.step, done.epoch, total, plan.steps_per_epoch),
            keep=config.keep_checkpoints + (self._prepared.eval is not None),  # the best one is kept beside them
            kept=len(list_checkpoints(self._output)),
        )
        fix = "free space, name another --output-dir, or lower --keep-checkpoints"
        check_space(space.needed(self._output), "the run", details=space.words(), fix=fix)

    def _resume_plan(self, *, moments: bool) -> FilePlan:
        trainee = self._trainee
        shapes, masters = trainee.trained_shapes, trainee.files.rounded
        return plan_resume_file(shapes, masters=masters, moments=moments, single=trainee.matrices)

    def save_checkpoint(self, *, last: bool) -> None:
        """Write a complete checkpoint, then drop the ones beyond `--keep-checkpoints` (never the best one).

        last: the run ends behind it, so it is written when this returns. Raises RunError where this one or the one
        before could not be saved, unless the user wants to go on then (but for the last).
        """
        with self._failure_borne(last=False):
            self._saver.finish()  # the one before
        with self._failure_borne(last=last):
            self._save(step_folder(self._output, self._progress.step), now=last)

    @contextmanager
    def _failure_borne(self, *, last: bool) -> Iterator[None]:
        try:
            yield
        except RunError as error:
            if last or self._config.on_save_failure == "stop":
                raise
            self._progress.best_step, self._progress.best_step_loss = self._best  # what was not written is not the best
            self._reporter.message(f"warning: {error.what}; training goes on (--on-save-failure continue)")

    def _save(self, final: Path, *, now: bool) -> None:
        if self._saved is not None and self._saved.resolve() == final.resolve() and self._mesh.any(final.exists()):
            return
        in_turn(self._saver.together, (lambda: self._make_way(final)) if self._leads else nothing)
        self._saved = final
        config, trainee, progress = self._config, self._trainee, self._progress
        state = {"progress": asdict(progress), "data": self._prepared.fingerprint, "seed": config.seed}
        uncounted = trainee.uncounted()
        counted = [(name, p) for name, p in trainee.trained() if id(p) not in uncounted]
        tensors = resume_tensors(counted, self._optimizer, masters=trainee.files.rounded)
        plan = self._resume_plan(moments=self._mesh.any(bool(self._optimizer.state)))  # a stage may train nothing

        def create(folder: Path) -> None:
            self._create_model(folder)
            plan.create(folder)
            write_trainer_state(folder, state)

        step = progress.step
        best = None if progress.best_step is None else step_folder(self._output, progress.best_step)
        best_known = progress.best_step, progress.best_step_loss

        def done() -> None:
            self._best = best_known
            if self._leads:
                point_at(self._output, {"latest": final, "best": best})
                retain(self._output, config.keep_checkpoints, newest=step, protect={best} - {None})
            self._reporter.message(f"saved {final.name}")

        model = trainee.files.plan, to_write(self._mesh, trainee.tensors())
        self._saver.write(final, create, [model, (plan, to_write(self._mesh, tensors.items()))], done, now=now)

    def _make_way(self, final: Path) -> None:
        """A checkpoint of a step that this run went past without it was damaged; a result is one of fewer steps."""
        self._folder.keep()
        discard(final)
        model = self._output / "model"
        if model.exists():
            self._reporter.message("removed model/, the result of fewer steps; it is written again at the end")
            discard(model)

    def _create_model(self, folder: Path) -> None:
        trainee = self._trainee
        tokenizer = self._load_tokenizer()
        create_model_files(folder, trainee.files, trainee.model, trainee.base, tokenizer, self._stops)

    @cached_property
    def _stops(self) -> Sequence[int]:
        """Ids that end an answer, which are the same in each checkpoint; texts end as they did."""
        base = self._trainee.base
        if self._config.method == "pretrain" or not base.can_generate():
            return ()
        return stop_tokens(base.generation_config, self._load_tokenizer())

    def _write_model(self, folder: Path) -> None:
        self._trainee.files.plan.write(folder, to_write(self._mesh, self._trainee.tensors()))

    def _write_result(self) -> None:
        model = self._output / "model"
        in_turn(self._saver.together, self._keep_place if self._leads else nothing)
        if not self._mesh.any(model.exists()):
            best = best_model(self._config, self._best, self._output, self._is_there, self._reporter.message)
            parts = best or (self._create_model, self._write_model)
            write_together(self._saver.together, model, *parts, manifest=False)
        if self._leads:
            self._folder.write_audit()
            if (losses := losses_in_words(self._prepared.audit)) != self._losses_told:
                self._reporter.message(f"note: {losses}")
        if skipped := self._progress.skipped_steps:
            self._reporter.message(f"note: steps that were skipped: {len(skipped):,}")
        give_back()  # the plots need memory too, and in pieces of other sizes
        self._reporter.finish(model)

    def _keep_place(self) -> None:
        self._folder.keep()
        if self._other_result:
            discard(self._output / "model")

    def _facts(self) -> dict[str, str]:
        config, trainee = self._config, self._trainee
        trained, total = trainee.parameters
        data = self._prepared.train.describe()
        tuner = config.tuner if config.quantization == "none" else f"{config.tuner} on {config.quantization}"
        return {
            "model": config.model,
            "method": f"{config.method}, {tuner}",
            **({"teacher": config.teacher} if config.teacher else {}),
            **({"answers": f"by {' '.join(config.engine_url)}"} if config.engine_url and answers(config) else {}),
            "layout": trainee.layout_words,
            "parameters": f"{trained:,} trained of {total:,}",
            "data": "{rows:,} rows, {tokens:,} tokens, {packs:,} packs, {fill:.1%} full".format(**data),
            "device": trainee.device_words,
            **({"memory": words} if (words := trainee.memory_words) else {}),
            **({"documents": f"in rows of their own, because of {trainee.alone}"} if trainee.alone else {}),
            "output": str(self._output),
        }
