"""The build of the CPU kernels: what is compiled, when it is not, and what a user is told when it cannot be."""

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cpu.build import (
    ISAS,
    SOURCES,
    BuildError,
    build,
    detect_isa,
    find_compiler,
    prebuild,
    sanitizer_environment,
)

from .conftest import FakeCompiler

REPOSITORY = Path(__file__).resolve().parents[3]
DAY = 24 * 3600

# `flags` of real CPUs, shortened to what matters here.
ZEN_4 = "fpu sse2 fma avx f16c avx2 avx512f avx512dq avx512cd avx512bw avx512vl avx512_bf16 avx512vbmi avx512_vnni"
CASCADE_LAKE = "fpu sse2 fma avx f16c avx2 avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"
SKYLAKE_X = "fpu sse2 fma avx f16c avx2 avx512f avx512dq avx512cd avx512bw avx512vl"
ALDER_LAKE = "fpu sse2 fma avx f16c avx2 avx_vnni"
SANDY_BRIDGE = "fpu sse2 sse4_1 sse4_2 popcnt avx"


# Which library


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        (ZEN_4, "avx512"),
        (CASCADE_LAKE, "avx512"),
        (SKYLAKE_X, "avx2"),
        (ALDER_LAKE, "avx2"),
        (SANDY_BRIDGE, "portable"),
        ("", "portable"),
    ],
)
def test_the_best_instruction_set_of_the_cpu_is_chosen(
    cache: Path, set_features: Callable[[str], None], flags: str, isa: str
) -> None:
    set_features(flags)
    assert detect_isa() == isa


def test_a_machine_without_flags_is_portable(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr("kernels.cpu.build.CPUINFO", cpuinfo)
    assert detect_isa() == "portable"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd evtstrm aes\nCPU implementer\t: 0x41\n")
    assert detect_isa() == "portable"


def test_the_environment_overrides_the_choice(
    cache: Path, set_features: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_features(ZEN_4)
    for isa in ISAS:
        monkeypatch.setenv("TOKENMILL_CPU_ISA", isa)
        assert detect_isa() == isa


def test_an_unknown_or_unsupported_instruction_set_is_refused(
    cache: Path, sources: Path, set_features: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_features(SKYLAKE_X)
    with pytest.raises(BuildError, match=r"^isa: this CPU cannot run avx512, it lacks avx512_vnni\. It can run avx2"):
        build("avx512", sources=sources)
    with pytest.raises(BuildError, match=r"^isa: 'sse2' is not one of avx512, avx2, portable$"):
        build("sse2", sources=sources)
    monkeypatch.setenv("TOKENMILL_CPU_ISA", "AVX2")
    with pytest.raises(BuildError, match=r"^TOKENMILL_CPU_ISA: 'AVX2' is not one of"):
        detect_isa()
    monkeypatch.setenv("TOKENMILL_CPU_ISA", "avx512")
    with pytest.raises(BuildError, match=r"^TOKENMILL_CPU_ISA: this CPU cannot run avx512, it lacks avx512_vnni"):
        build(sources=sources)


def test_flags_name_the_instruction_set_and_keep_arithmetic_strict(
    cache: Path, sources: Path, compiler: FakeCompiler, set_features: Callable[[str], None]
) -> None:
    set_features(ZEN_4)
    defines = {
        "avx512": {"-DTOKENMILL_ISA_AVX512=1"},
        "avx2": {"-DTOKENMILL_ISA_AVX2=1"},
        "portable": {"-DTOKENMILL_ISA_PORTABLE=1"},
    }
    for isa, expected in defines.items():
        before = len(compiler.calls())
        build(isa, sources=sources)
        for call in compiler.calls()[before:]:
            assert {word for word in call if word.startswith("-D")} == expected
            assert "-ffp-contract=off" in call
            assert not {"-ffast-math", "-Ofast", "-march=native", "-mtune=native"} & set(call)
            assert ("-mavx512f" in call) == (isa == "avx512")
            assert any(word.startswith("-mavx") for word in call) == (isa != "portable")


# When it is compiled


def test_it_is_compiled_once_and_then_found(cache: Path, sources: Path, compiler: FakeCompiler) -> None:
    library = build("portable", sources=sources)
    assert library.parent == cache
    assert compiler.compiled() == ["answer.cpp", "other.cpp"]
    calls = len(compiler.calls())
    assert calls == 3  # two files and the link
    assert build("portable", sources=sources) == library
    assert len(compiler.calls()) == calls


def test_each_ingredient_gives_another_library(
    cache: Path, sources: Path, compiler: FakeCompiler, set_features: Callable[[str], None]
) -> None:
    set_features(ZEN_4)
    libraries = [build("portable", sources=sources)]

    def must_be_new(isa: str = "portable", sanitize: str | None = None) -> None:
        compiled = len(compiler.compiled())
        library = build(isa, sanitize, sources=sources)
        assert library not in libraries
        assert len(compiler.compiled()) > compiled
        libraries.append(library)

    must_be_new("avx2")
    must_be_new(sanitize="address")
    must_be_new(sanitize="thread")
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    must_be_new()
    (sources / "other.cpp").write_text("int other() { return 2; }\n")
    must_be_new()
    (sources / "other.cpp").rename(sources / "renamed.cpp")
    must_be_new()
    compiler.set_version("fake c++ 2.0")
    must_be_new()
    assert all(library.exists() for library in libraries)


def test_going_back_to_earlier_sources_finds_the_earlier_library(
    cache: Path, sources: Path, compiler: FakeCompiler
) -> None:
    first = build("portable", sources=sources)
    header = (sources / "answer.h").read_text()
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    build("portable", sources=sources)
    (sources / "answer.h").write_text(header)
    calls = len(compiler.calls())
    assert build("portable", sources=sources) == first
    assert len(compiler.calls()) == calls


def test_libraries_unused_for_a_month_are_removed(cache: Path, sources: Path, compiler: FakeCompiler) -> None:
    unused, used = build("portable", sources=sources), build("portable", sanitize="address", sources=sources)
    for library in (unused, used):
        os.utime(library, (time.time() - 31 * DAY,) * 2)
    assert build("portable", sanitize="address", sources=sources) == used
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    new = build("portable", sources=sources)
    assert set(cache.glob("*.so")) == {used, new}


def test_sources_changed_during_the_compilation_are_not_filed_under_the_old_hash(
    cache: Path, sources: Path, compiler: FakeCompiler
) -> None:
    compiler.hold.touch()

    def change(_: str) -> None:
        (sources / "answer.h").write_text("#define ANSWER 43\n")
        compiler.hold.unlink(missing_ok=True)

    with pytest.raises(BuildError, match="changed while they were compiled"):
        build("portable", progress=change, sources=sources)
    assert list(cache.glob("*.so")) == []


def test_progress_is_told_when_it_takes_long(cache: Path, sources: Path, compiler: FakeCompiler) -> None:
    compiler.hold.touch()
    told = []

    def hear(text: str) -> None:
        told.append(text)
        compiler.hold.unlink(missing_ok=True)

    build("portable", progress=hear, sources=sources)
    assert told[0] == "compiling CPU kernels (portable), once for this machine: 0 of 2 files"
    assert told[-1] == "compiling CPU kernels (portable), once for this machine: 2 of 2 files"


# Several processes

_BUILD = """
import sys
from pathlib import Path
from kernels.cpu.build import build
print(build("portable", progress=lambda text: print(text, flush=True), sources=Path(sys.argv[1])))
"""


def start(sources: Path) -> subprocess.Popen[str]:
    """A process that builds, in a session of its own, so that its compilers can be killed with it."""
    return subprocess.Popen(
        [sys.executable, "-c", _BUILD, str(sources)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain for a minute"
        time.sleep(0.02)


def test_of_several_processes_one_compiles_and_the_others_use_its_library(
    cache: Path, sources: Path, compiler: FakeCompiler
) -> None:
    compiler.hold.touch()
    first = start(sources)
    wait_until(lambda: bool(compiler.calls()))
    others = [start(sources) for _ in range(3)]
    for process in others:
        assert process.stdout is not None
        assert process.stdout.readline() == "another process is compiling the CPU kernels, waiting for it\n"
    compiler.hold.unlink()
    outputs = [process.communicate(timeout=60)[0].splitlines()[-1] for process in [first, *others]]
    assert set(outputs) == {str(build("portable", sources=sources))}
    assert compiler.compiled() == ["answer.cpp", "other.cpp"]


def test_a_process_killed_midway_leaves_nothing_that_breaks_the_next(
    cache: Path, sources: Path, compiler: FakeCompiler
) -> None:
    compiler.hold.touch()
    process = start(sources)
    wait_until(lambda: bool(compiler.calls()))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    compiler.hold.unlink()
    assert list(cache.glob("build-*"))
    assert list(cache.glob("*.so")) == []
    library = build("portable", sources=sources)
    assert set(cache.iterdir()) == {library, cache / ".lock"}
    assert library.read_text()


# When it cannot be compiled


def test_a_broken_source_gives_what_the_compiler_said(cache: Path, sources: Path, real_compiler: str) -> None:
    (sources / "other.cpp").write_text("int other() { return undeclared_name; }\n")
    with pytest.raises(BuildError, match=r"could not compile other\.cpp") as caught:
        build("portable", sources=sources)
    assert "undeclared_name" in str(caught.value)
    assert "other.cpp:1" in str(caught.value)
    assert list(cache.glob("*.so")) == []


def test_a_failed_compilation_can_be_mended(cache: Path, sources: Path, real_compiler: str) -> None:
    good = (sources / "answer.h").read_text()
    (sources / "answer.h").write_text("#define ANSWER forty two\n")
    with pytest.raises(BuildError):
        build("portable", sources=sources)
    (sources / "answer.h").write_text(good)
    assert ctypes.CDLL(str(build("portable", sources=sources))).answer(0) == 42


def test_without_a_compiler_the_message_says_what_to_install(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
    with pytest.raises(BuildError, match=r"no C\+\+ compiler .*apt-get install g\+\+"):
        build("portable", sources=sources)


@pytest.mark.parametrize("named", ["no-such-compiler", "   ", "g++ 'unfinished"])
def test_another_compiler_than_the_one_named_is_not_used(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("CXX", named)
    assert find_compiler() is None
    with pytest.raises(BuildError, match=r"^CXX names .*no such program"):
        build("portable", sources=sources)


def test_the_named_compiler_may_have_arguments(
    cache: Path, sources: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launcher = tmp_path / "my launcher"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{launcher}' '{compiler.path}'")
    build("portable", sources=sources)
    assert compiler.compiled() == ["answer.cpp", "other.cpp"]


def test_compilers_are_looked_for_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("clang++", "g++", "c++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert find_compiler() == str(tmp_path / name)


# Where it is kept


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, sources: Path, compiler: FakeCompiler) -> None:
    home, xdg = sources / "home", sources / "xdg"
    monkeypatch.delenv("TOKENMILL_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(xdg))
    assert build("portable", sources=sources).parent == xdg / "tokenmill" / "kernels"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert build("portable", sources=sources).parent == home / ".cache" / "tokenmill" / "kernels"


def test_a_cache_that_cannot_be_written_gives_the_prebuilt_library_or_says_what_to_do(
    cache: Path, sources: Path, compiler: FakeCompiler
) -> None:
    cache.write_text("a file, so that no folder can be made here, not even by root")
    with pytest.raises(BuildError, match=r"cannot be kept in .*cache.*TOKENMILL_KERNEL_CACHE.*--output"):
        build("portable", sources=sources)
    prebuilt = prebuild("portable", sources / "prebuilt", sources=sources)
    assert build("portable", sources=sources) == prebuilt


def test_a_read_only_cache_still_serves_what_it_has(cache: Path, sources: Path, compiler: FakeCompiler) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    library = build("portable", sources=sources)
    cache.chmod(0o500)
    try:
        assert build("portable", sources=sources) == library
        (sources / "answer.h").write_text("#define ANSWER 43\n")
        with pytest.raises(BuildError, match="no permission to write there"):
            build("portable", sources=sources)
    finally:
        cache.chmod(0o700)


def test_a_prebuilt_library_needs_no_compiler_and_is_not_used_for_other_sources(
    cache: Path, sources: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prebuilt = prebuild("portable", sources / "prebuilt", sources=sources)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert build("portable", sources=sources) == prebuilt
    assert not cache.exists()
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        build("portable", sources=sources)


def test_a_library_can_be_prebuilt_for_another_cpu(
    cache: Path, sources: Path, compiler: FakeCompiler, set_features: Callable[[str], None]
) -> None:
    set_features(SANDY_BRIDGE)
    prebuilt = {isa: prebuild(isa, sources / "prebuilt", sources=sources) for isa in ISAS}
    set_features(CASCADE_LAKE)
    assert build(sources=sources) == prebuilt["avx512"]


# With a real compiler


def test_the_library_can_be_loaded_and_called(cache: Path, sources: Path, real_compiler: str) -> None:
    for isa in dict.fromkeys([detect_isa(), "portable"]):
        library = ctypes.CDLL(str(build(isa, sources=sources)))
        assert library.answer(0) == 42
        assert not hasattr(library, "other")  # hidden unless exported


def test_sanitizers_stop_a_program_that_reads_past_an_array(cache: Path, sources: Path, real_compiler: str) -> None:
    try:
        environment = os.environ | sanitizer_environment("address")
        library = build("portable", sanitize="address", sources=sources)
    except BuildError as error:
        pytest.skip(f"no sanitizers here: {error}")
    ended = [
        subprocess.run(
            [sys.executable, "-c", f"import ctypes; print(ctypes.CDLL({str(library)!r}).answer({index}))"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        for index in (0, 2)
    ]
    assert (ended[0].returncode, ended[0].stdout) == (0, "42\n"), ended[0].stderr
    assert ended[1].returncode != 0
    assert "answer.cpp:2" in ended[1].stderr


def test_a_sanitizer_stops_a_program_whose_threads_race(cache: Path, sources: Path, real_compiler: str) -> None:
    (sources / "answer.cpp").write_text(
        "#include <atomic>\n#include <thread>\n"
        'extern "C" __attribute__((visibility("default"))) int answer(int race) {\n'
        "    std::atomic<int> safe{0}; int unsafe = 0;\n"
        "    const auto add = [&] { safe++; if (race) unsafe++; };\n"
        "    std::thread other(add); add(); other.join();\n"
        "    return safe.load() + 40;\n"
        "}\n"
    )
    try:
        environment = os.environ | sanitizer_environment("thread")
        library = build("portable", sanitize="thread", sources=sources)
    except BuildError as error:
        pytest.skip(f"no sanitizers here: {error}")
    ended = [
        subprocess.run(
            [sys.executable, "-c", f"import ctypes; print(ctypes.CDLL({str(library)!r}).answer({race}))"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        for race in (0, 1)
    ]
    assert (ended[0].returncode, ended[0].stdout) == (0, "42\n"), ended[0].stderr
    assert "data race" in ended[1].stderr
    assert ended[1].returncode != 0


@pytest.mark.parametrize(
    "isa",
    [
        "avx512",
        pytest.param("avx2", marks=pytest.mark.slow),
        pytest.param("portable", marks=pytest.mark.slow),
    ],
)
def test_the_kernels_compile_without_a_warning(
    real_compiler: str, isa: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also for instructions that this machine's CPU lacks."""
    if isa != "portable" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{platform.machine()} has no such instructions")
    monkeypatch.setenv("CXX", f"{real_compiler} -Werror")
    # A copy, so that an edit meanwhile does no harm.
    copy = shutil.copytree(SOURCES, tmp_path / "sources", ignore=shutil.ignore_patterns("*.py", "prebuilt", "__*"))
    assert prebuild(isa, tmp_path, sources=copy).stat().st_size > 0


# Command line


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernels.cpu.build", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_builds_into_the_cache(cache: Path, compiler: FakeCompiler) -> None:
    done = command("--isa", "portable")
    assert done.returncode == 0, done.stderr
    [library] = cache.glob("tokenmill_cpu-portable-*.so")
    assert done.stdout.startswith(f"{library} (")
    assert compiler.compiled() == sorted(path.name for path in (REPOSITORY / "kernels" / "cpu").glob("*.cpp"))


def test_the_command_prebuilds_all_of_them(cache: Path, compiler: FakeCompiler, tmp_path: Path) -> None:
    done = command("--isa", "all", "--output", str(tmp_path / "prebuilt"))
    assert done.returncode == 0, done.stderr
    paths = [Path(line.split(" (")[0]) for line in done.stdout.splitlines()]
    assert sorted(paths) == sorted((tmp_path / "prebuilt").glob("*.so"))
    assert len(paths) == len(ISAS)
    assert not cache.exists()


def test_the_command_reports_an_error_in_a_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = command("--isa", "portable")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "build: CXX names no-such-compiler, but there is no such program. Correct or unset it\n"


def test_the_command_names_a_folder_that_cannot_be_written(compiler: FakeCompiler) -> None:
    done = command("--isa", "portable", "--output", str(compiler.path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"build: the CPU kernels cannot be kept in {compiler.path} (File exists). Name another folder\n"
    )


def test_the_command_refuses_what_makes_no_sense_and_explains_itself() -> None:
    assert "--isa all needs --output" in command("--isa", "all").stderr
    assert "invalid choice: 'sse9'" in command("--isa", "sse9").stderr
    text = command("--help").stdout
    for word in ("--isa", "--sanitize", "--output", "kernels/cpu/prebuilt", "TOKENMILL_KERNEL_CACHE", "CXX", *ISAS):
        assert word in text
