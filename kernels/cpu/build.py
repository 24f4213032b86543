"""Compiles this folder's C++ sources into one shared library: on first use, once for a machine, then from a cache.

Standard library only, since images run it before anything is installed: `python -m kernels.cpu.build --help`.

A library is named after the instruction set and a hash of all that goes into it, so a change of sources, flags or
compiler gives another file, and a library built on one machine is never taken for that of a CPU with other features.
The flags hold back whatever would let the same source give other numbers elsewhere: no -march=native, no -ffast-math,
no contraction of a multiplication and an addition that the source writes apart.
"""

import argparse
import errno
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

SOURCES = Path(__file__).resolve().parent
CACHE_VARIABLE = "TOKENMILL_KERNEL_CACHE"
ISA_VARIABLE = "TOKENMILL_CPU_ISA"
CPUINFO = Path("/proc/cpuinfo")

Progress = Callable[[str], None]

_KEPT_SECONDS = 30 * 24 * 3600
_QUIET_SECONDS = 1.0
_SHOWN_LINES = 15


class BuildError(Exception):
    """The library cannot be had; the text says why (with the compiler's last lines, if it spoke) and what to do."""


class IsaError(BuildError):
    """An instruction set that was asked for is unknown, or this CPU lacks it."""


@dataclass(frozen=True)
class _Isa:
    """What a CPU must have, in the words of /proc/cpuinfo, and what the compiler is told."""

    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = _Isa(frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c"))
_AVX512 = _Isa(
    _AVX2.needs | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    (*_AVX2.flags, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
)

# The most capable first.
ISAS = {
    "avx512": _Isa(_AVX512.needs, (*_AVX512.flags, "-DTOKENMILL_ISA_AVX512=1")),
    "avx2": _Isa(_AVX2.needs, (*_AVX2.flags, "-DTOKENMILL_ISA_AVX2=1")),
    "portable": _Isa(frozenset(), ("-DTOKENMILL_ISA_PORTABLE=1",)),
}

_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
_OPTIMISED = ("-O3",)
_SANITIZED = (
    "-O2",  # at -O1, g++ inlines none of the one-line vector functions, and tests take several times as long
    "-g",
    "-fno-omit-frame-pointer",
)


@dataclass(frozen=True)
class _Sanitizer:
    """Flags, and what a process needs that loads such a library."""

    flags: tuple[str, ...]
    library: str
    variables: dict[str, str]


SANITIZERS = {
    "address": _Sanitizer(
        ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"),
        "libasan.so",
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    ),
    # Of other libraries it knows too little to tell their races from their locks.
    "thread": _Sanitizer(
        ("-fsanitize=thread",),
        "libtsan.so",
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1"},
    ),
}


def _cpu_features() -> frozenset[str]:
    """Feature names of the first CPU in /proc/cpuinfo; none where there is no such file or it has no `flags`."""
    with suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return frozenset(value.split())
    return frozenset()


def _known(isa: str, origin: str) -> str:
    if isa not in ISAS:
        raise IsaError(f"{origin}: {isa!r} is not one of {', '.join(ISAS)}")
    return isa


def _supported(isa: str, origin: str) -> str:
    """`isa` if this CPU can run it; `origin` says where the name came from."""
    features = _cpu_features()
    missing = ISAS[_known(isa, origin)].needs - features
    if missing:
        able = [name for name, other in ISAS.items() if other.needs <= features]
        raise IsaError(
            f"{origin}: this CPU cannot run {isa}, it lacks {', '.join(sorted(missing))}. It can run {', '.join(able)}"
        )
    return isa


def detect_isa() -> str:
    """The most capable of ISAS that this CPU has, or what TOKENMILL_CPU_ISA says if it has that.

    Raises:
        BuildError: TOKENMILL_CPU_ISA is no such name, or the CPU lacks it.
    """
    wanted = os.environ.get(ISA_VARIABLE, "")
    if wanted:
        return _supported(wanted, ISA_VARIABLE)
    features = _cpu_features()
    return next(name for name, isa in ISAS.items() if isa.needs <= features)


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, else c++, g++ or clang++ from the PATH.

    A command for `shlex.split` whose first word is an absolute path, since CXX may be `ccache g++`. None if CXX names
    a program that does not exist (another compiler than the one asked for would be a surprise) or there is no compiler.
    """
    for name in [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]:
        try:
            program, *arguments = shlex.split(name)
        except ValueError:  # blank, or a quotation mark without its partner
            continue
        found = shutil.which(program)
        if found:
            return shlex.join([os.path.abspath(found), *arguments])
    return None


def _compiler() -> list[str]:
    command = find_compiler()
    if command:
        return shlex.split(command)
    named = os.environ.get("CXX")
    if named:
        raise BuildError(f"CXX names {named}, but there is no such program. Correct or unset it")
    raise BuildError(
        "there is no C++ compiler (looked for c++, g++ and clang++). Install one, for example with "
        "`apt-get install g++` or `dnf install gcc-c++`, or name it in CXX"
    )


def cache_folder() -> Path:
    """$TOKENMILL_KERNEL_CACHE, else tokenmill/kernels in $XDG_CACHE_HOME or in ~/.cache; it may not exist yet."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not shared.is_absolute():  # relative ones are to be ignored (XDG base directory specification)
        try:
            shared = Path.home() / ".cache"
        except RuntimeError as error:
            raise BuildError(f"this user has no home folder for a cache. Set {CACHE_VARIABLE} to a folder") from error
    return shared / "tokenmill" / "kernels"


def _run(command: list[str], purpose: str, temporary: Path | None = None) -> str:
    """What a compiler's command wrote to stdout; `temporary` is where it puts its own files."""
    environment = os.environ | {"LC_ALL": "C"} | ({"TMPDIR": str(temporary)} if temporary else {})
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        raise BuildError(f"the compiler could not be started to {purpose}: {error}") from error
    if done.returncode:
        said = "\n".join((done.stderr + done.stdout).strip().splitlines()[-_SHOWN_LINES:])
        raise BuildError(
            f"{command[0]} could not {purpose} (status {done.returncode}). Try another compiler (CXX), or simpler "
            f"instructions ({ISA_VARIABLE}=portable). It said:\n{said}"
        )
    return done.stdout


class _Recipe:
    """One library to be made: its sources, flags, and the hash of everything except the compiler."""

    def __init__(self, sources: Path, isa: str, sanitize: str | None) -> None:
        self.sources = sources
        self.isa = isa
        self.label = f"{isa}-{sanitize}-sanitized" if sanitize else isa
        how = (*_SANITIZED, *SANITIZERS[sanitize].flags) if sanitize else _OPTIMISED
        self.flags = [*_FLAGS, *how, *ISAS[isa].flags]
        self.files = sorted(sources.glob("*.cpp"))
        if not self.files:
            raise BuildError(f"there are no C++ sources in {sources}")
        self.digest = self.digest_now()

    def digest_now(self) -> str:
        """Hash of the files' present contents, the flags and the platform."""
        digest = hashlib.sha256(repr([sys.platform, platform.machine(), self.flags]).encode())
        for file in sorted([*self.sources.glob("*.cpp"), *self.sources.glob("*.h")]):
            content = file.read_bytes()
            digest.update(f"\n{file.name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    def prebuilt_name(self) -> str:
        """File name of the library that any compiler may have built, since who runs it may have none."""
        return f"tokenmill_cpu-{self.label}-{self.digest[:20]}.so"

    def cached_name(self, compiler: list[str]) -> str:
        """File name of the library built by this very compiler."""
        version = (_run([*compiler, "--version"], "tell its version").splitlines() or [""])[0]
        digest = hashlib.sha256(repr([self.digest, compiler, version]).encode()).hexdigest()
        return f"tokenmill_cpu-{self.label}-{digest[:20]}.so"


def build(
    isa: str | None = None, sanitize: str | None = None, progress: Progress | None = None, sources: Path = SOURCES
) -> Path:
    """The shared library of the CPU kernels for this machine, compiled if nobody has done so before.

    A prebuilt library (in `prebuilt/` beside the sources) is used if it is of exactly these sources and flags. Several
    processes may call this at once: one compiles, the others wait for it.

    Args:
        isa: a name from ISAS that this CPU can run; `detect_isa()` if None.
        sanitize: "address" (with UndefinedBehaviorSanitizer) or "thread"; to be loaded in `sanitizer_environment()`.
        progress: told in words, once a compilation takes longer than a second or another process is compiling.
        sources: the folder with the *.cpp and *.h files.

    Raises:
        BuildError: no compiler, a failed compilation, no writable cache folder, or an isa that cannot be had.
    """
    recipe = _Recipe(sources, detect_isa() if isa is None else _supported(isa, "isa"), sanitize)
    prebuilt = sources / "prebuilt" / recipe.prebuilt_name()
    if prebuilt.exists():
        return prebuilt
    compiler = _compiler()
    library = cache_folder() / recipe.cached_name(compiler)
    if not library.exists():
        advice = (
            f"Set {CACHE_VARIABLE} to a folder that can be written, or prebuild them: "
            f"python -m kernels.cpu.build --output {SOURCES / 'prebuilt'}"
        )
        with _lock(library.parent, 0o700, advice, progress):
            _remove_unused(library.parent)
            _make(recipe, compiler, library, progress)
    with suppress(OSError):  # the time of use, which a read-only cache cannot hold
        os.utime(library)
    return library


def prebuild(
    isa: str, folder: Path, sanitize: str | None = None, progress: Progress | None = None, sources: Path = SOURCES
) -> Path:
    """Compile into `folder`, for any CPU; `build()` finds it once the folder is `prebuilt/` beside the sources."""
    recipe = _Recipe(sources, _known(isa, "isa"), sanitize)
    library = folder.absolute() / recipe.prebuilt_name()
    with _lock(library.parent, 0o777, "Name another folder", progress):
        _make(recipe, _compiler(), library, progress)
    return library


def _lock(folder: Path, mode: int, advice: str, progress: Progress | None) -> IO[str]:
    """Make `folder`, and be the only process that writes there until the returned file is closed.

    The lock of a process that dies is free at once.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        if not os.access(folder, os.W_OK):  # the lock file may be writable where the folder is not
            raise PermissionError(errno.EACCES, "no permission to write there")
        lock = (folder / ".lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                progress("another process is compiling the CPU kernels, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise BuildError(f"the CPU kernels cannot be kept in {folder} ({error.strerror}). {advice}") from error
    return lock


def _remove_unused(folder: Path) -> None:
    """Delete libraries that nobody has used for long; one that is loaded somewhere stays usable there."""
    for library in folder.glob("tokenmill_cpu-*.so"):
        with suppress(OSError):
            if time.time() - library.stat().st_mtime > _KEPT_SECONDS:
                library.unlink()


def _make(recipe: _Recipe, compiler: list[str], library: Path, progress: Progress | None) -> None:
    """Compile and link, unless it was done while we waited for the lock, which the caller holds."""
    if library.exists():
        return
    for abandoned in library.parent.glob("build-*"):  # of a process that was killed, since we hold the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            linked = folder / library.name
            objects = _compile(recipe, compiler, folder, progress)
            purpose = f"link the CPU kernels ({recipe.label})"
            _run([*compiler, *recipe.flags, "-shared", *map(str, objects), "-o", str(linked)], purpose, folder)
            if recipe.digest_now() != recipe.digest:
                raise BuildError("the C++ sources were changed while they were compiled. Run it again")
            if not linked.exists():
                raise BuildError(f"{compiler[0]} made no library, and said nothing. Try another compiler (CXX)")
            with linked.open("rb") as file:
                os.fsync(file.fileno())  # a name must not outlive a power cut that its content does not
            linked.replace(library)
    except OSError as error:
        raise BuildError(f"the CPU kernels could not be written to {library.parent}: {error}") from error


def _compile(recipe: _Recipe, compiler: list[str], folder: Path, progress: Progress | None) -> list[Path]:
    """One object file for each source, several at a time."""
    began = time.monotonic()
    objects = [folder / f"{file.stem}.o" for file in recipe.files]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(max_workers=cores) as pool:
        pending = {
            pool.submit(
                _run, [*compiler, *recipe.flags, "-c", str(file), "-o", str(into)], f"compile {file.name}", folder
            )
            for file, into in zip(recipe.files, objects, strict=True)
        }
        told = -1
        while pending:
            done, pending = wait(pending, timeout=_QUIET_SECONDS, return_when=FIRST_COMPLETED)
            try:
                for future in done:
                    future.result()
            except BuildError:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            finished = len(objects) - len(pending)
            if progress and finished > told and time.monotonic() - began > _QUIET_SECONDS:
                progress(
                    f"compiling CPU kernels ({recipe.label}), once for this machine: {finished} of {len(objects)} files"
                )
                told = finished
    return objects


def sanitizer_environment(sanitize: str) -> dict[str, str]:
    """Variables for a subprocess that loads a sanitized library: Python itself knows nothing of the sanitizer.

    libstdc++ comes along because AddressSanitizer looks for the throwing of exceptions when the process starts.

    Raises:
        BuildError: the compiler has no shared libasan or libtsan (clang++ names them otherwise; use g++).
    """
    sanitizer = SANITIZERS[sanitize]
    compiler = _compiler()
    libraries = []
    for name in (sanitizer.library, "libstdc++.so"):
        path = Path(_run([*compiler, f"-print-file-name={name}"], f"tell where {name} is").strip())
        if not path.is_absolute() or path.read_bytes()[:4] != b"\x7fELF":
            raise BuildError(f"{compiler[0]} has no shared library {name}. Install it and g++, and set CXX=g++")
        libraries.append(str(path.resolve()))
    return {"LD_PRELOAD": " ".join(libraries), **sanitizer.variables}


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.cpu.build",
        description="Compile the native CPU kernels ahead of time. A server does this by itself on first use;\n"
        "run it for images and for hosts without a compiler or a writable cache folder. Prints each\n"
        "library and the seconds it took.",
        epilog="In an image that may run on any x86 CPU, with the compiler in the build stage only:\n"
        "  python -m kernels.cpu.build --isa all --output kernels/cpu/prebuilt\n\n"
        "environment:\n"
        "  CXX                     the compiler (default: c++, g++ or clang++)\n"
        "  TOKENMILL_KERNEL_CACHE  where libraries are kept (default: ~/.cache/tokenmill/kernels)\n"
        f"  TOKENMILL_CPU_ISA       the instruction set, instead of the best: {', '.join(ISAS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--isa",
        choices=[*ISAS, "all"],
        help="instruction set (default: the best this CPU has); one that it lacks, and all of them, need --output",
    )
    parser.add_argument(
        "--sanitize",
        choices=[*SANITIZERS],
        help="with AddressSanitizer and UBSan, or with ThreadSanitizer, for tests; many times slower",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="put the library there instead of in the cache; kernels/cpu/prebuilt is where a server looks first",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 with the libraries' paths on stdout, 1 when there is none to be had, 2 for a bad setting."""
    parser = _arguments()
    options = parser.parse_args(arguments)
    if options.isa == "all" and options.output is None:
        parser.error("--isa all needs --output")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        for isa in ISAS if options.isa == "all" else [options.isa or detect_isa()]:
            began = time.monotonic()
            if options.output is None:
                library = build(isa, options.sanitize, say)
            else:
                library = prebuild(isa, options.output, options.sanitize, say)
            print(f"{library} ({time.monotonic() - began:.1f} s)", flush=True)
    except BuildError as error:
        say(f"build: {error}")
        return 2 if isinstance(error, IsaError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
