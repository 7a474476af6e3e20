"""More processes to kill: `trainformer.hf`, LoRA with packing, several optimizers, and FSDP on two ranks."""

import json
import os
import signal
import socket
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import differences, kill_group, wait_for
from torch import nn
from torch.nn import functional as F
from victim import SAMPLES, Augmented, Recorder, enter, handlers, record_samples, write_end

from file_operations import PHASE, Watch, block_in_save, last_phase, mark, phase_file
from several_optimizers import several_optimizers
from trainformer import Trainer, hf
from trainformer.callbacks import EMA
from trainformer.utils.processes import is_alive


@dataclass(frozen=True)
class Victim:
    """What the cases have in common: faults, none of which may change the result."""

    pause: float = 0.0  # extra seconds per step
    block_in_save: tuple[int, int] | None = None  # (save, fsync): block there until killed
    die_at: int | tuple[str, int] | None = None  # SIGKILL at this event, see `Watch`
    victim: int = 0  # the rank that is killed
    samples = None  # per epoch, each seen once

    def start(self, folder):
        """The target of a forked process: train in a folder."""
        enter(folder)
        self.run()

    def run(self, phase_file=PHASE):
        """Train to the end, with the faults of the case."""
        torch.set_num_threads(1)
        if self.block_in_save is not None:
            block_in_save(self.block_in_save)
        watch, before = Watch(Path.cwd(), self.die_at, phase_file), handlers()
        self.train()
        if int(os.environ.get("RANK", 0)) == self.victim:
            write_end(watch, before)

    def differences(self, reference, other):
        """What differs between two finished runs."""
        return differences(reference, other, samples=self.samples)


# -- trainformer.hf ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HF(Victim):
    """Dropout, accumulation with an incomplete last window, evaluations, the best checkpoint kept, workers."""

    workers: int = 0
    samples = SAMPLES

    def train(self):
        model = Net(self)
        arguments = hf.TrainingArguments(
            "run",
            num_train_epochs=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=3,
            learning_rate=0.01,
            logging_steps=5,
            save_strategy="steps",
            save_steps=4,
            eval_strategy="steps",
            eval_steps=4,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            dataloader_num_workers=self.workers,
            resume_from_checkpoint="auto",
            use_cpu=True,
            disable_tqdm=True,
        )
        data, tests = Rows(Augmented()), Rows(Augmented(size=20, random_too=False))
        trainer = hf.Trainer(model, arguments, train_dataset=data, eval_dataset=tests, callbacks=[HFRecorder(model)])
        trainer.train()
        trainer.save_model("final")


class Rows(torch.utils.data.Dataset):
    """Samples as transformers wants them."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y, index = self.data[index]
        return {"x": x, "labels": y, "index": index}


class Net(nn.Module):
    """A classifier that remembers the samples it was trained on."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
        self.pause, self.seen = case.pause, []

    def forward(self, x, labels=None, index=None):
        mark("step" if self.training else "evaluation")
        if self.training:
            time.sleep(self.pause)
            self.seen += index.tolist()
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class HFRecorder(hf.TrainerCallback):
    """Records the samples of every step."""

    def __init__(self, model):
        self.model = model

    def on_step_end(self, args, state, control, **kwargs):
        record_samples(state.global_step, 0 if state.epoch is None else int(state.epoch - 1e-9), self.model.seen)
        self.model.seen = []
        mark("step", state.global_step)


# -- LoRA with packing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedLoRA(Victim):
    """A small Llama with LoRA and dropout, on documents packed into sequences, from a cache of tokens."""

    save_async: bool = False

    def parts(self):
        """The class of the task, its options, and the data."""
        from text_toys import sentences
        from trainformer.tasks import CausalLM

        return CausalLM, {"packing": True}, sentences()

    def train(self):
        from text_toys import chat_tokenizer, llama
        from trainformer.adapters import LoRA

        base, options, data = self.parts()

        class Task(base):
            def train_step(task, batch):
                mark("step")
                time.sleep(self.pause)
                recorder.task.seen.append(zlib.crc32(batch["input_ids"].numpy().tobytes()))
                return super().train_step(batch)

            def eval_step(task, batch):
                mark("evaluation")
                return super().eval_step(batch)

        torch.manual_seed(3)
        task = Task(
            llama(num_hidden_layers=1, attention_dropout=0.1),
            tokenizer=chat_tokenizer(),
            max_length=32,
            adapter=LoRA(r=4, dropout=0.1),
            cache_dir="tokens",
            **options,
        )
        recorder = Recorder(Seen(), Path("samples.jsonl").absolute())
        trainer = Trainer(
            task,
            data,
            data[:4],
            callbacks=[recorder],
            run_dir="run",
            epochs=3,
            batch_size=2,
            lr=0.01,
            log_every=3,
            save_every=4,
            save_last=2,
            save_best=1,
            eval_every=1,
            save_async=self.save_async,
            num_workers=0,
            log="none",
            device="cpu",
        )
        trainer.fit()


@dataclass(frozen=True)
class KTOWithLoRA(PackedLoRA):
    """Single answers, a KL divergence that is estimated before each step, and a reference without the adapter."""

    def parts(self):
        from text_toys import preferences
        from trainformer.tasks import KTO

        return KTO, {"beta": 0.5}, preferences()


class Seen:
    """Holds what was seen in a step."""

    def __init__(self):
        self.seen = []


# -- several optimizers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeveralOptimizers(Victim):
    """One of the examples: step functions with `every` (gan), yielded losses (ppo), or both models evaluated."""

    example: str = "gan"
    save_async: bool = False

    def train(self):
        task, data = several_optimizers(self.example)
        pause = self.pause

        class Marks:
            def on_step_begin(self, trainer, step):
                mark("step", step)
                time.sleep(pause)

        trainer = Trainer(
            task,
            data,
            data,
            callbacks=[Marks(), EMA(decay=0.9)],
            run_dir="run",
            epochs=3,
            batch_size=4,
            accumulation_steps=2,
            lr=0.01,
            log_every=3,
            save_every=4,
            save_last=2,
            save_best=1,
            eval_every=1,
            monitor_metric={"gan": "val/frechet_distance", "ppo": "val/episode_length"}.get(self.example, "val/loss"),
            save_async=self.save_async,
            num_workers=0,
            log="none",
            device="cpu",
        )
        trainer.fit()


# -- FSDP on two ranks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FSDP(Victim):
    """Two ranks. One of them is killed, and the other has to notice; or both are."""

    ranks = 2
    alone: bool = False  # whether the other one has to notice it
    save_async: bool = False
    samples = SAMPLES

    @property
    def syncs(self):
        """How many files of a checkpoint the victim writes at least."""
        return 3 if self.victim else 12

    def start(self, folder):
        """Start the ranks and wait for them. Killed ranks count as a killed process, anything else as a failure."""
        enter(folder)
        Path("ranks.json").unlink(missing_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = [fork(self.run_rank, rank, port) for rank in range(self.ranks)]
        Path("ranks.tmp").write_text(json.dumps(processes))
        os.replace("ranks.tmp", "ranks.json")
        running, codes = set(processes), {}
        while running:
            process, status = os.wait()
            codes[process] = os.waitstatus_to_exitcode(status)
            running.discard(process)
            # Ranks that wait for one that never joined are ended by their launcher: here, by this process.
            was_starting = last_phase(folder, phase_file(self.victim))[0] == "start-up"
            if codes[process] == -signal.SIGKILL and (was_starting or not self.alone):
                for other in running:
                    os.kill(other, signal.SIGKILL)
        killed = -signal.SIGKILL in codes.values()
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if any(codes.values()):
            raise SystemExit(f"exit codes of the ranks: {list(codes.values())}")

    def run_rank(self, rank, port):
        addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks}
        os.environ.update({name: str(value) for name, value in (addresses | names).items()})
        if rank != self.victim:
            object.__setattr__(self, "die_at", None)
            object.__setattr__(self, "block_in_save", None)
        self.run(phase_file(rank))

    def kill(self, process, folder):
        """Kill the rank, or all processes."""
        path = folder / "ranks.json"
        if self.alone and path.exists():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(json.loads(path.read_text())[self.victim], signal.SIGKILL)
        else:
            kill_group(process)
            ranks = json.loads(path.read_text()) if path.exists() else []
            wait_for(lambda: not any(map(is_alive, ranks)))

    def train(self):
        rank = int(os.environ["RANK"])
        task = Noisy(self)
        trainer = Trainer(
            task,
            Augmented(),
            Augmented(size=20, random_too=False),
            callbacks=[Recorder(task, Path(f"samples-{rank}.jsonl" if rank else "samples.jsonl").absolute())],
            run_dir="run",
            epochs=2,
            batch_size=12,
            lr=0.01,
            log_every=3,
            save_every=4,
            save_last=2,
            save_best=1,
            eval_every=1,
            save_async=self.save_async,
            strategy="fsdp",
            precision="no",
            num_workers=0,
            log="none",
            device="cpu",
        )
        trainer.fit()


class Noisy:
    """Classification with dropout: random numbers belong to a rank, and must come back with it."""

    def __init__(self, case):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
        self.pause, self.seen = case.pause, []

    def train_step(self, batch):
        mark("step")
        time.sleep(self.pause)
        x, y, index = batch
        self.seen += index.tolist()
        return F.cross_entropy(self.model(x), y)

    def eval_step(self, batch):
        mark("evaluation")
        x, y, _ = batch
        return {"loss": F.cross_entropy(self.model(x), y)}


def fork(function, *arguments):
    """Run a function in a child process; its id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)
