"""Builds the native modules with CMake and Ninja; everything else is in pyproject.toml.

Environment, read at build time only:
  DTCOMM_CUDA=0|1              never / always build `_cuda`; by default it is built where a GPU is visible, for that GPU
  DTCOMM_BUILD_TYPE=Release    CMake's build type
  DTCOMM_EMULATOR=1            also build `_emulator`; in a checkout `make emulator` does
  DTCOMM_SANITIZE=address,...  instrument the native code
  DTCOMM_TESTS=ON              also build csrc/tests
  DTCOMM_WERROR=1              warnings are errors
  CUDAARCHS=90-real            CMake's own: architectures of `_cuda`
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
PASSED_ON = ("DTCOMM_CUDA", "DTCOMM_EMULATOR", "DTCOMM_SANITIZE", "DTCOMM_TESTS", "DTCOMM_WERROR")


class CMakeBuild(build_ext):
    """One CMake project makes every module, so it is configured and built once."""

    def run(self) -> None:
        target = Path(self.get_ext_fullpath(self.extensions[0].name)).resolve().parent
        target.mkdir(parents=True, exist_ok=True)
        # In place: one folder that every later build continues, `pip install -e` included, whose build_temp is a
        # new one each time. A wheel may be built with tools of an environment that is gone afterwards, so it has
        # a folder of its own; each run names those tools anew.
        build = Path(self.build_temp).resolve() / "wheel"
        if self.inplace:
            build = ROOT / "build" / f"inplace-{sys.implementation.cache_tag}"
        env = os.environ | {"PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])}
        ninja = shutil.which("ninja", path=env["PATH"])
        if ninja is None:
            raise SystemExit("ninja was not found: pip install ninja, or build with isolation")
        import pybind11

        options = {
            "CMAKE_BUILD_TYPE": os.environ.get("DTCOMM_BUILD_TYPE", "Release"),
            "CMAKE_MAKE_PROGRAM": ninja,
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "DTCOMM_OUTPUT_DIR": str(target),
            "DTCOMM_EMULATOR": "0",
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
        }
        if "SETUPTOOLS_EXT_SUFFIX" in os.environ:  # of another processor
            options["PYTHON_MODULE_EXTENSION"] = os.environ["SETUPTOOLS_EXT_SUFFIX"]
            options["PYBIND11_PYTHON_EXECUTABLE_LAST"] = (
                sys.executable
            )  # else pybind11 forgets the line above
        configure = ["cmake", "--log-level=NOTICE", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
        configure.append("-U*Python*")  # what an earlier build in the same folder found, for another Python
        configure += [f"-D{name}={value}" for name, value in options.items()]
        compile_all = ["cmake", "--build", str(build)]
        if not sys.stdout.isatty():
            # On a terminal ninja overwrites one line of progress; in a log it would be a line for each file.
            compile_all += ["--", "--quiet"]
        for command in (configure, compile_all):
            status = subprocess.run(command, env=env).returncode
            if status:
                raise SystemExit(f"{' '.join(command[:3])} failed with status {status}; its output is above")


setup(ext_modules=[Extension("dtcomm._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
