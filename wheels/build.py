"""Builds an sdist and manylinux_2_28 wheels for x86_64 and aarch64 on one machine; `make wheels` calls it.

The compiler is the clang of the Python package ziglang: it compiles for an old glibc on any host, and for both
processors. The native module includes no torch header, so one wheel for each Python serves every torch.

The sdist is built first, and the wheels from its contents, so that it is complete. For each processor all Pythons share
a build folder, because only the bindings depend on Python. auditwheel checks each wheel and gives it its tag.

Where nvcc is found there is a second wheel for each Python and this processor, with the module `_cuda`. nvcc refuses
the C++ library of ziglang, so `_cuda` is made by this machine's compiler, and the wheel's tag is that of this machine's
C library, such as manylinux_2_34. pip prefers it where it fits, and takes the other one elsewhere.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
PROCESSORS = ("x86_64", "aarch64")
GLIBC = "2.28"
PLATFORM = "manylinux_2_28"
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13")
NATIVE_TESTS = ("hadamard_test", "tsan_engine_test", "fuzz_payloads_test --seconds 20")
NEEDS_KERNEL = "tsan_engine_test"  # calls process_vm_readv, which qemu-user does not have
EMULATOR = "qemu-aarch64"
EMULATOR_LIBRARIES = Path("/usr/aarch64-linux-gnu")
EMULATOR_PACKAGES = "apt-get install qemu-user libc6-arm64-cross"


class BuildError(Exception):
    """A step failed or something is missing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build, and print the files; return 0, or 1 if a step failed."""
    options = _parser().parse_args(argv)
    try:
        pythons = find_pythons(options.python)
        tools = _environment(WORK / "tools", sys.executable, ROOT / "wheels" / "requirements.txt")
        source = build_sdist(options.out)
        wheels = [
            build_wheel(source, python, processor, tools, options.out)
            for processor in options.processors
            for python in pythons.values()
        ]
        wheels = build_with_kernels(source, wheels, pythons, tools, options.out) or wheels
        for processor in options.processors:
            run_native_tests(processor)
        if options.smoke and platform.machine() in options.processors:
            version = _version(next(iter(pythons.values())))
            (wheel,) = (
                path for path in wheels if f"-{version}-" in path.name and platform.machine() in path.name
            )
            smoke_test(wheel, next(iter(pythons.values())), options.smoke)
    except BuildError as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    for path in sorted(options.out.iterdir()):
        print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")
    return 0


def find_pythons(names: Sequence[str]) -> dict[str, str]:
    """The Pythons to build for, by version, such as "cp311"; of the default ones those that are installed."""
    pythons = {}
    for name in names or PYTHONS:
        path = shutil.which(name)
        version = _version(path) if path else ""
        if version:
            assert path is not None
            pythons[version] = path
        elif names:
            raise BuildError(f"{name}: no such Python; PYTHONS takes names or paths, separated by spaces")
        else:
            print(
                f"wheels: no wheel for {name}, which is not installed (make wheels PYTHONS=...)",
                file=sys.stderr,
            )
    if not pythons:
        raise BuildError(
            f"none of {', '.join(PYTHONS)} is installed; make wheels PYTHONS=/path/to/python3.11"
        )
    return pythons


def build_sdist(out: Path) -> Path:
    """Write the sdist to ``out``; returns a folder with its contents."""
    python = _environment(
        WORK / _version(sys.executable), sys.executable, ROOT / "wheels" / "requirements-python.txt"
    )
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("dtcomm-*"):
        old.unlink()
    _run([python, "setup.py", "-q", "sdist", "--dist-dir", str(out)], cwd=ROOT)
    (archive,) = out.glob("dtcomm-*.tar.gz")
    source = WORK / "source"
    # Files whose contents are the same keep their times, so that a second build compiles what has changed.
    fresh = WORK / "extracted"
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(archive) as packed:
        packed.extractall(fresh, filter="data")
    (extracted,) = fresh.iterdir()
    _synchronize(extracted, source)
    return source


def build_wheel(source: Path, python: str, processor: str, tools: Path, out: Path) -> Path:
    """Build the wheel of one Python and processor from the sdist's contents; returns its path in ``out``."""
    version = _version(python)
    interpreter = _environment(WORK / version, python, ROOT / "wheels" / "requirements-python.txt")
    folder = WORK / processor
    suffix = f".cpython-{version[2:]}-{processor}-linux-gnu.so"
    environment = {
        "PATH": f"{tools.parent}{os.pathsep}{os.environ['PATH']}",
        "CMAKE_TOOLCHAIN_FILE": str(source / "wheels" / "zig.cmake"),
        "DTCOMM_ZIG": str(_compiler(folder / "bin", tools, processor)),
        "DTCOMM_TARGET": processor,
        "DTCOMM_CUDA": "0",
        "DTCOMM_TESTS": "ON",
        "SETUPTOOLS_EXT_SUFFIX": suffix,
        "_PYTHON_HOST_PLATFORM": f"linux-{processor}",
    }
    raw, base = folder / "raw", source / "build"
    shutil.rmtree(base, ignore_errors=True)
    shutil.rmtree(raw, ignore_errors=True)
    # Two calls: in one, bdist_wheel would build once more and forget --build-temp.
    build = ["build", "--build-base", str(base), "build_ext", "--build-temp", str(folder / "cmake")]
    _run([interpreter, "setup.py", "-q", *build], source, environment)
    wheel_command = ["bdist_wheel", "--skip-build", "--dist-dir", str(raw)]
    _run([interpreter, "setup.py", "-q", *wheel_command], source, environment)
    (wheel,) = raw.glob(f"dtcomm-*-{version}-linux_{processor}.whl")
    if f"dtcomm/_C{suffix}" not in zipfile.ZipFile(wheel).namelist():
        raise BuildError(f"{wheel.name}: no module _C{suffix}")
    # "auto" fails if no tag is right; a tag of another processor than the host's cannot be asked for.
    repaired_folder = folder / "repaired"
    shutil.rmtree(repaired_folder, ignore_errors=True)
    repair = ["repair", "--plat", "auto", "--wheel-dir", str(repaired_folder), str(wheel)]
    _run([tools.parent / "auditwheel", *repair], ROOT, environment)
    (repaired,) = repaired_folder.glob(f"dtcomm-*-{version}-manylinux_*_{processor}.whl")
    tag = re.search(r"manylinux_2_(\d+)_", repaired.name)
    if tag is None or int(tag[1]) > int(GLIBC.partition(".")[2]):
        raise BuildError(f"{repaired.name}: needs a newer C library than {GLIBC}")
    platform_tag = f"{PLATFORM}_{processor}"
    _run([tools, "-m", "wheel", "tags", "--remove", "--platform-tag", platform_tag, str(repaired)], ROOT)
    (tagged,) = repaired_folder.glob(f"dtcomm-*-{version}-{platform_tag}.whl")
    return Path(shutil.move(tagged, out / tagged.name))


def nvcc_path() -> str | None:
    """Where nvcc is; None if it is not found."""
    return shutil.which("nvcc", path=os.pathsep.join([os.environ["PATH"], "/usr/local/cuda/bin"]))


def build_with_kernels(
    source: Path, wheels: Sequence[Path], pythons: Mapping[str, str], tools: Path, out: Path
) -> list[Path]:
    """Add wheels with `_cuda` for this processor, and return them; none without nvcc, and a line says so."""
    nvcc, host = nvcc_path(), [wheel for wheel in wheels if platform.machine() in wheel.name]
    if nvcc is None or not host:
        reason = "nvcc was not found" if nvcc is None else f"no wheel is for {platform.machine()}"
        print(f"wheels: no wheel has CUDA kernels (_cuda): {reason}", file=sys.stderr)
        return []
    folder, added = WORK / "cuda", []
    for version, python in pythons.items():
        (wheel,) = (path for path in host if f"-{version}-" in path.name)
        shutil.rmtree(folder / "lib", ignore_errors=True)
        environment = {
            "PATH": os.pathsep.join([str(tools.parent), os.environ["PATH"], str(Path(nvcc).parent)]),
            "DTCOMM_CUDA": "1",
            "LDFLAGS": "-static-libstdc++ -static-libgcc -Wl,-s",  # any C++ library will do
        }
        interpreter = _environment(WORK / version, python, ROOT / "wheels" / "requirements-python.txt")
        build = ["build_ext", "--build-temp", str(folder / "cmake"), "--build-lib", str(folder / "lib")]
        _run([interpreter, "setup.py", "-q", *build], source, environment)
        (module,) = (folder / "lib" / "dtcomm").glob("_cuda*.so")
        added.append(add_module(wheel, module, tools, folder, out))
    return added


def add_module(wheel: Path, module: Path, tools: Path, folder: Path, out: Path) -> Path:
    """Write a copy of a wheel that has a native module too, tagged by auditwheel; return its path in ``out``."""
    for name in ("unpacked", "packed", "repaired"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    _run([tools, "-m", "wheel", "unpack", "--dest", folder / "unpacked", wheel], ROOT)
    (contents,) = (folder / "unpacked").iterdir()
    shutil.copy(module, contents / "dtcomm")
    _run([tools, "-m", "wheel", "pack", "--dest-dir", folder / "packed", contents], ROOT)
    (packed,) = (folder / "packed").iterdir()
    linux = f"linux_{platform.machine()}"
    _run([tools, "-m", "wheel", "tags", "--remove", "--platform-tag", linux, packed], ROOT)
    (packed,) = (folder / "packed").iterdir()
    repair = ["repair", "--plat", "auto", "--wheel-dir", folder / "repaired", packed]
    environment = {"PATH": f"{tools.parent}{os.pathsep}{os.environ['PATH']}"}
    _run([tools.parent / "auditwheel", *repair], ROOT, environment)
    (repaired,) = (folder / "repaired").iterdir()
    tag = re.search(r"manylinux_2_(\d+)_", repaired.name)
    if tag is None or int(tag[1]) <= int(GLIBC.partition(".")[2]):
        raise BuildError(f"{repaired.name}: its tag must differ from that of the wheel without kernels")
    # One tag: of several, pip would also take it where the other wheel is meant.
    platform_tag = f"manylinux_2_{tag[1]}_{platform.machine()}"
    _run([tools, "-m", "wheel", "tags", "--remove", "--platform-tag", platform_tag, repaired], ROOT)
    (tagged,) = (folder / "repaired").iterdir()
    return Path(shutil.move(tagged, out / tagged.name))


def run_native_tests(processor: str) -> None:
    """Run the tests of csrc/tests that the build has made, under qemu-user where the processor is another one."""
    prefix: list[str] = []
    if processor != platform.machine():
        if shutil.which(EMULATOR) is None or not EMULATOR_LIBRARIES.is_dir():
            raise BuildError(
                f"the native tests for {processor} need {EMULATOR}; on Debian: {EMULATOR_PACKAGES}"
            )
        prefix = [EMULATOR, "-L", str(EMULATOR_LIBRARIES)]
    for test in NATIVE_TESTS:
        name, *arguments = test.split()
        if prefix and name == NEEDS_KERNEL:
            print(
                f"wheels: {name} is not run for {processor}: it needs a kernel of that processor", flush=True
            )
            continue
        _run([*prefix, WORK / processor / "cmake" / "wheel" / name, *arguments])


def smoke_test(wheel: Path, python: str, torch: str) -> None:
    """Install a wheel into an environment of its own and reduce a tensor on two ranks, outside the checkout."""
    folder = WORK / "smoke"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _run([python, "-m", "venv", folder / "venv"])
    _run([folder / "venv" / "bin" / "python", "-m", "pip", "install", "-q", f"torch=={torch}", str(wheel)])
    shutil.copy(ROOT / "wheels" / "smoke_test.py", folder)
    torchrun = folder / "venv" / "bin" / "torchrun"
    _run([torchrun, "--nproc-per-node", "2", "smoke_test.py"], cwd=folder)


def _compiler(folder: Path, tools: Path, processor: str) -> Path:
    """A folder with ``c++``, ``ar`` and ``ranlib`` for a processor."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("c++", "ar", "ranlib"):
        target = f" -target {processor}-linux-gnu.{GLIBC}" if name == "c++" else ""
        script = f'#!/bin/sh\nexec "{tools}" -m ziglang {name}{target} "$@"\n'
        path = folder / name
        if not path.exists() or path.read_text() != script:
            path.write_text(script)
            path.chmod(0o755)
    return folder


def _environment(folder: Path, python: str, requirements: Path) -> Path:
    """The Python of a virtual environment that has what ``requirements`` lists."""
    stamp, text = folder / ".requirements", requirements.read_text()
    if not stamp.exists() or stamp.read_text() != text:
        _run([python, "-m", "venv", folder])
        _run([folder / "bin" / "python", "-m", "pip", "install", "-q", "-r", requirements])
        stamp.write_text(text)
    return folder / "bin" / "python"


def _synchronize(source: Path, target: Path) -> None:
    """Make ``target`` equal to ``source``, without touching equal files."""
    wanted = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    for path in [
        path for path in target.rglob("*") if path.is_file() and path.relative_to(target) not in wanted
    ]:
        path.unlink()
    for name in wanted:
        old, new = target / name, source / name
        if not old.is_file() or old.read_bytes() != new.read_bytes():
            old.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(new, old)


def _version(python: str | Path) -> str:
    """The version of a Python as in wheels' names, "cp311"; empty if it does not run."""
    code = "import sys; print('cp%d%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 and re.match(r"cp\d+", done.stdout) else ""


def _run(
    command: Sequence[str | Path], cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> None:
    text = " ".join(map(str, command))
    print(f"== {text}", flush=True)
    # Nothing of the checkout may be found instead of what was installed.
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    status = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**inherited, **(environment or {})}
    ).returncode
    if status:
        raise BuildError(f"{text}: failed with status {status}; its output is above")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Build an sdist and manylinux_2_28 wheels.")
    parser.add_argument(
        "--python", action="append", default=[], help="a Python to build for; may be repeated"
    )
    parser.add_argument(
        "--processors",
        nargs="+",
        choices=PROCESSORS,
        default=list(PROCESSORS),
        help="processors to build for",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the results")
    parser.add_argument(
        "--smoke", metavar="TORCH", default="", help="test a wheel with this version of torch; empty: do not"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
