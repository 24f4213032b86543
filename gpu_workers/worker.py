"""Putting a rank together: backend, weights, KV pool, warm-up, and the link over which it takes plans."""

import ctypes
import gc
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from config.grammar import token_table_path
from config.graphs import graph_buckets
from config.schema import ChildSpec
from gpu_workers.backend import Backend
from gpu_workers.backends import make_backend
from gpu_workers.comm import make_comm
from gpu_workers.gpu_memory import GpuMemory
from gpu_workers.grammars import Grammars
from gpu_workers.runner import Runner
from gpu_workers.step_loop import run_plans
from gpu_workers.warm_up import WarmUp
from gpu_workers.weights.loader import load_model
from ipc.channels import BlockingDealer
from ipc.codec import Decoder
from ipc.control import Control, StartError
from ipc.engine_messages import ToWorker, WorkerReady
from ipc.process_usage import UsageMeter

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 16  # enough where nothing has to be compiled or measured


class Worker:
    """Rank `spec.index` with its model, its KV pool and host tier, and its link to the scheduler.

    Building it loads everything and runs one small step; StartError says why that is impossible.
    """

    def __init__(self, spec: ChildSpec, control: Control) -> None:
        self._spec = spec
        self._control = control
        config = spec.config
        settings = config.worker
        if spec.cpus:
            # All of the rank's for now: its memory comes to lie near them, and threads of libraries get no single one.
            _bind_this_thread(spec.cpus)
        backend = make_backend(
            settings.device,
            config.model.dtype,
            settings.threads,
            deterministic=bool(settings.deterministic),
            kernels=settings.kernels,
            quantized=config.model.quantization != "none",
            kv_dtype=config.model.kv_dtype,
            progress=control.stage,
            cpus=spec.cpus,
        )
        self._comm = make_comm(spec.index, settings.tp, spec.rendezvous_port)
        try:
            self._assemble(backend)
        except BaseException:
            self._comm.close()  # else its threads abort the interpreter as it ends
            raise

    def _assemble(self, backend: Backend) -> None:
        """Load everything and run one small step."""
        spec, control = self._spec, self._control
        config = spec.config
        settings = config.worker
        memory = GpuMemory(spec.gpu_bytes) if spec.gpu_bytes else None
        taking: Callable[[str], AbstractContextManager[object]] = memory.taking if memory else nullcontext
        control.stage("loading weights", 0.0)
        with taking("weights"):
            self._model = load_model(spec, backend, self._comm, control.stage)
        _give_back_memory()
        control.stage("allocating KV")
        with taking("the KV cache"):
            self._kv = self._model.allocate_kv(spec.num_blocks, config.scheduler.block_size)
        self._host_kv = backend.allocate_host_kv(self._kv, spec.num_host_blocks)
        # `config.resolve` has settled both.
        assert config.scheduler.max_seqs is not None
        assert config.scheduler.max_step_tokens is not None
        control.stage("compiling kernels, warming up" if memory else "warming up")
        warm_up = WarmUp(
            self._make_runner,
            max_seqs=config.scheduler.max_seqs,
            max_model_len=config.model.max_model_len or spec.arch.max_position,
            num_blocks=spec.num_blocks,
            block_size=config.scheduler.block_size,
        )
        with taking("kernels and the largest step"):
            if memory is not None:
                warm_up.compile_kernels(config.scheduler.max_step_tokens)
            warm_up.largest_step(config.scheduler.max_step_tokens if memory else _WARM_UP_TOKENS)
        # The last runner made: a device backend keeps what belongs to one, its graphs among it.
        self._runner = self._make_runner(config.scheduler.max_seqs)
        sequences = graph_buckets(settings.max_graph_seqs or 0)
        if sequences:
            with taking("CUDA graphs"):
                self._runner.capture(sequences, lambda done: control.stage("capturing CUDA graphs", done))
        if memory is not None:
            log.info("%s", memory.report())

    def _make_runner(self, max_seqs: int) -> Runner:
        return Runner(
            self._model,
            self._kv,
            self._spec.num_blocks,
            self._spec.config.scheduler.block_size,
            max_seqs,
            self._spec.config.model.max_model_len or self._spec.arch.max_position,
            self._comm,
            self._host_kv,
            self._spec.num_host_blocks,
            Grammars(
                token_table_path(self._spec.run_dir), self._spec.arch.vocab_size, packed=self._model.backend.overlaps
            )
            if self._spec.index == 0
            else None,
        )

    def serve(self, stop: threading.Event) -> int:
        """Report for work, then carry out plans until `stop` is set (0) or something is beyond repair (1)."""
        spec = self._spec
        decoder: Decoder[ToWorker] = Decoder(ToWorker)
        link = BlockingDealer(spec.endpoints.workers, b"rank%d" % spec.index, decoder, spec.incarnation)
        # What exists by now lives as long as the process: the collector need never look at it again.
        gc.collect()
        gc.freeze()
        if spec.cpus:
            _bind_this_thread(spec.cpus[:1])
        link.send(WorkerReady(spec.index, spec.num_blocks, spec.num_host_blocks, spec.after_crash))
        self._control.ready()
        try:
            return run_plans(link, self._runner, stop, UsageMeter(f"worker-{spec.index}"))
        finally:
            link.close()
            self._comm.close()
            gc.unfreeze()  # else what is frozen is never freed, and Triton's bindings list all of theirs on stderr


def _bind_this_thread(cpus: Sequence[int]) -> None:
    """To any of `cpus`, and the threads that it will start; StartError where the system refuses."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        named = ", ".join(map(str, cpus))
        raise StartError(f"--pin-threads: no thread can be bound to CPU {named}: {error.strerror}") from error


def _give_back_memory() -> None:
    """What loading took and needs no more goes back to the system; glibc would keep it, as much as half the weights."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
