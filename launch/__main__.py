"""`python -m launch`: arguments -> configuration -> memory plan -> supervisor."""

import contextlib
import os
import sys

import msgspec

from config.arch import read_arch
from config.generation import describe, read_generation
from config.output_files import check_apart
from config.plan_advice import shortage
from config.plan_report import full_report, short_report
from config.recordings import EVENT_LOG, TRACE, check_recording
from config.resolve import resolve
from config.schema import GenerationDefaults
from config.sources import ConfigError, read_settings
from ipc.control import StartError
from launch import __version__
from launch.edge import check_edge
from launch.fleet import Engine
from launch.gpu_probe import find_gpus
from launch.kernels import find_kernels
from launch.listen import open_listener
from launch.machine import look_around
from launch.model_source import locate
from launch.progress import StartDisplay
from launch.sdk_edge import check_sdk, settle_sdk
from launch.supervisor import Supervisor


def main() -> int:
    """Exit status: 2 for settings that cannot be used, 1 when the engine could not start or died, else 0."""
    display = StartDisplay()
    try:
        settings = read_settings(sys.argv[1:], os.environ, __version__)
        for warning in settings.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        asked = settings.config
        for warning in check_edge(asked.server, os.environ):
            print(f"warning: {warning}", file=sys.stderr)
        for warning in check_sdk(asked.sdk, asked.tokenizer.tokenizers):
            print(f"warning: {warning}", file=sys.stderr)
        check_apart({"--event-log": asked.scheduler.event_log or None, "--record": asked.supervisor.record or None})
        for kind, file in ((EVENT_LOG, asked.scheduler.event_log), (TRACE, asked.supervisor.record)):
            if file:
                check_recording(kind, file)
        # The port first: it may be taken, and finding the model can mean a long download.
        listens = asked.server.frontends > 0 and not settings.plan
        listener = open_listener(asked.server.host, asked.server.port) if listens else None
        source = locate(asked.model.model, asked.model.revision, needs_weights=not settings.plan)
        try:
            arch = read_arch(source.path, needs_weights=not settings.plan)
            generation, unused = GenerationDefaults(), list[str]()
            if asked.model.generation_config == "auto":
                generation, unused = read_generation(source.path)
        except (ValueError, OSError) as error:
            raise StartError(f"--model {asked.model.model}: {error}") from None
        machine = look_around()
        if settings.plan_gpu is None:
            machine = find_gpus(asked, machine, display.say)
        else:
            machine = msgspec.structs.replace(machine, gpus=(settings.plan_gpu,), plans_elsewhere=True)
        # Before the kernels are compiled, what cannot be whether there are any or not.
        resolved = resolve(asked, arch, msgspec.structs.replace(machine, native_kernels=True))
        if resolved.config.worker.kernels == "native":
            machine = find_kernels(asked, machine, display.say)
            resolved = resolve(asked, arch, machine)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # finding the model or compiling kernels takes long
        return 0

    config, plan = resolved.config, resolved.plan
    if settings.plan:
        print(full_report(asked, arch, machine, resolved))
        print("\nwhat was chosen, and why", *resolved.reasons, sep="\n  ")
    if not plan.fits:
        print(f"error: {shortage(asked, arch, machine, resolved)}", file=sys.stderr)
        return 1
    if settings.plan:
        return 0

    for reason in resolved.reasons:
        display.say(reason)
    for line in (*unused, describe(generation)):
        display.say(line)
    display.say(short_report(plan))
    engine = Engine(
        config=msgspec.structs.replace(config, sdk=settle_sdk(config.sdk)),
        arch=arch,
        model_path=str(source.path),
        served_names=config.model.served_model_name or (source.name,),
        kv_memory_bytes=plan.kv,
        num_blocks=plan.num_blocks,
        num_host_blocks=plan.num_host_blocks,
        rank_cpus=resolved.rank_cpus,
        generation=generation,
        gpu_bytes=0 if plan.gpu is None else plan.gpu.usable,
        asked=asked,
        machine=machine,
    )
    with listener or contextlib.nullcontext():
        try:
            return Supervisor(engine, listener, display).run()
        except StartError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
