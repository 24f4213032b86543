"""Whether a file of costs is of this machine, model and worker, and can be right at all."""

import json
from pathlib import Path

import msgspec
import pytest

from config.machine import Gpu, Machine
from config.schema import Config, ModelConfig, SchedulerConfig, WorkerConfig
from launch.model_source import ModelSource
from tests.unit.tools.test_tune_predicting import CALIBRATION
from tools.simulate.costs import Outside, StepCost, Variation
from tools.tune.calibration_file import (
    CalibrationFileError,
    Subject,
    read_calibration,
    subject_of,
    write_calibration,
)

MEASURED = msgspec.structs.replace(
    CALIBRATION,
    cost=StepCost(5000.0, 900.0, 1100.0, 0.6, 0.0),
    variation=Variation(prefill={5: [0.9, 1.2], 9: [1.0]}, decode={1: [1.0, 1.1]}),
    outside=Outside(3000.0, 2000.0),
)
# As `resolve` leaves it.
CONFIG = Config(
    model=ModelConfig(model="m", dtype="float32", kv_dtype="float16"),
    worker=WorkerConfig(device="cpu", threads=2, kernels="native", deterministic=True, cuda_graphs=False),
)
MACHINE = Machine(cores=2, memory_available=1 << 30)
GPU = Gpu(name="H200", total_bytes=1 << 37, free_bytes=1 << 37, capability="sm_90")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """A model of 1,000 bytes, on a machine whose processor has a name."""
    cpuinfo, weights = tmp_path / "cpuinfo", tmp_path / "m.gguf"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Abacus 9000 @ 2 Hz\nmodel name\t: other\n")
    monkeypatch.setattr("tools.tune.calibration_file._CPUINFO", cpuinfo)
    weights.write_bytes(bytes(1000))
    return ModelSource(weights, "m")


@pytest.fixture
def subject(source: ModelSource) -> Subject:
    return subject_of(CONFIG, MACHINE, source)


@pytest.fixture
def file(tmp_path: Path, subject: Subject) -> Path:
    path = tmp_path / "costs.json"
    write_calibration(path, subject, MEASURED)
    return path


def test_what_is_kept_is_read_again(file: Path, subject: Subject) -> None:
    assert read_calibration(file, subject) == MEASURED
    assert subject.machine == "Abacus 9000 @ 2 Hz, 2 cores"
    assert subject.model == "m, 1,000 bytes"


def test_settings_that_steps_do_not_depend_on_change_nothing(file: Path, source: ModelSource) -> None:
    scheduler = SchedulerConfig(max_seqs=3, policy="deadline", prefix_cache=False, max_itl_ms=20.0)
    worker = msgspec.structs.replace(CONFIG.worker, kv_memory="1GiB")
    other = msgspec.structs.replace(CONFIG, scheduler=scheduler, worker=worker)
    busier = msgspec.structs.replace(MACHINE, memory_available=5)
    assert read_calibration(file, subject_of(other, busier, source)) == MEASURED


@pytest.mark.parametrize(
    ("section", "setting", "value", "difference"),
    [
        ("worker", "threads", 1, "--threads 2, here 1"),
        ("worker", "tp", 2, "--tp 1, here 2"),
        ("worker", "pin_threads", True, "--pin-threads False, here True"),
        ("worker", "kernels", "torch", "--kernels native, here torch"),
        ("worker", "deterministic", False, "--deterministic True, here False"),
        ("worker", "cuda_graphs", True, "--cuda-graphs False, here True"),
        ("model", "dtype", "bfloat16", "--dtype float32, here bfloat16"),
        ("model", "kv_dtype", "int8", "--kv-dtype float16, here int8"),
        ("model", "quantization", "none", "--quantization auto, here none"),
        ("scheduler", "block_size", 32, "--block-size 16, here 32"),
    ],
)
def test_a_file_of_other_flags_is_refused(
    file: Path, source: ModelSource, section: str, setting: str, value: object, difference: str
) -> None:
    part = msgspec.structs.replace(getattr(CONFIG, section), **{setting: value})
    other = subject_of(msgspec.structs.replace(CONFIG, **{section: part}), MACHINE, source)
    with pytest.raises(CalibrationFileError) as refused:
        read_calibration(file, other)
    hint = "delete it to have it measured anew, or name another file"
    assert str(refused.value) == f"--calibration {file}: measured with {difference}: {hint}"


def test_a_file_of_another_machine_or_model_is_refused(
    file: Path, source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(config: Config, machine: Machine, source: ModelSource) -> str:
        with pytest.raises(CalibrationFileError) as error:
            read_calibration(file, subject_of(config, machine, source))
        return str(error.value)

    cores = refused(CONFIG, msgspec.structs.replace(MACHINE, cores=8), source)
    assert "another machine: Abacus 9000 @ 2 Hz, 2 cores, here Abacus 9000 @ 2 Hz, 8 cores" in cores
    on_gpu = msgspec.structs.replace(CONFIG, worker=msgspec.structs.replace(CONFIG.worker, device="cuda"))
    gpus = refused(on_gpu, msgspec.structs.replace(MACHINE, gpus=(GPU, GPU)), source)
    assert "here Abacus 9000 @ 2 Hz, 2 cores, H200, H200; --device cpu, here cuda" in gpus
    source.path.write_bytes(bytes(2000))
    assert "another model: m, 1,000 bytes, here m, 2,000 bytes" in refused(CONFIG, MACHINE, source)
    for number in range(2):
        (tmp_path / f"{number}.safetensors").write_bytes(bytes(500))
    folder = ModelSource(tmp_path, "n")
    assert "another model: m, 1,000 bytes, here n, 1,000 bytes" in refused(CONFIG, MACHINE, folder)
    monkeypatch.setattr("tools.tune.calibration_file._CPUINFO", tmp_path / "none")
    assert "another machine" in refused(CONFIG, MACHINE, source)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cost.prefill_token", -3.0, "Expected `float` >= 0.0 - at `$.calibration.cost.prefill_token`"),
        ("cost.fixed", -0.5, "Expected `float` >= 0.0 - at `$.calibration.cost.fixed`"),
        ("cost.fixed", 1e300, "Expected `float` <= "),
        ("cost.fixed", "5", "Expected `float`, got `str`"),
        ("cost", dict.fromkeys(msgspec.to_builtins(MEASURED.cost), 0.0), "all costs in it are 0"),
        ("outside.arrive_us", -1.0, "Expected `float` >= 0.0 - at `$.calibration.outside.arrive_us`"),
        ("variation.decode", {"1": [1.0, 0.0]}, "Expected `float` > 0.0 - at `$.calibration.variation.decode"),
        ("variation.prefill", {"1": []}, "Expected `array` of length >= 1"),
        ("steps", -1, "Expected `int` >= 0 - at `$.calibration.steps`"),
        ("median_error", -0.1, "Expected `float` >= 0.0 - at `$.calibration.median_error`"),
    ],
    ids=["negative", "little", "huge", "text", "zero", "outside", "factor", "no-factor", "steps", "error"],
)
def test_a_file_that_cannot_be_right_is_refused(
    file: Path, subject: Subject, path: str, value: object, message: str
) -> None:
    content = json.loads(file.read_text())
    *above, name = ["calibration", *path.split(".")]
    place = content
    for part in above:
        place = place[part]
    assert name in place
    place[name] = value
    file.write_text(json.dumps(content))
    with pytest.raises(CalibrationFileError) as refused:
        read_calibration(file, subject)
    assert message in str(refused.value)
    assert "delete it" in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[", b"[" * 200_000, b"\xff", b"5"],
    ids=["nothing", "object", "cut", "deep", "bytes", "number"],
)
def test_what_is_no_such_file_is_told_in_a_line(file: Path, subject: Subject, text: bytes) -> None:
    file.write_bytes(text)
    with pytest.raises(CalibrationFileError, match="no calibration of this version: ") as refused:
        read_calibration(file, subject)
    assert "\n" not in str(refused.value)
